"""A localized pipeline, executed as a local run does it, where no process has to load TensorFlow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def execute(
    directory: Path,
    spec: Mapping[str, Any] | str,
    given: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a localized pipeline (or its YAML) with parameters; a new directory takes all that it writes."""
    text = spec if isinstance(spec, str) else yaml.safe_dump(spec)
    (directory / "local.yaml").write_text(text)
    (directory / "given.json").write_text(json.dumps(given or {}))
    (directory / "scratch").mkdir()
    paths = [str(directory / name) for name in ("local.yaml", "given.json", "outputs", "scratch")]
    return subprocess.run(
        [sys.executable, "-m", "shardline.pipelines.local.execute", *paths],
        env={**(environment or os.environ), "PYTHONPATH": without_tensorflow(directory)},
        capture_output=True,
        text=True,
    )


def without_tensorflow(directory: Path) -> str:
    """Returns a PYTHONPATH with which there is no TensorFlow, written into a directory.

    The fork server of a run, which would load it before anything else, ends at once, and all tasks start by
    themselves: the way of a machine where nothing can be forked.
    """
    place = directory / "without-tensorflow"
    place.mkdir()
    (place / "tensorflow.py").write_text("raise ImportError('this test is without TensorFlow')\n")
    return os.pathsep.join([str(place), os.getcwd()])
