"""The wheel of this clone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.helpers.markdown import ROOT


def build_wheel(directory: Path) -> Path:
    """Builds it with pip into a directory, from a copy: setuptools leaves files where it builds."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(
            ROOT / "shardline", Path(copy, "shardline"), ignore=shutil.ignore_patterns("__pycache__")
        )
        for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, copy)
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*pip, "--wheel-dir", str(directory), copy], check=True)
    return next(directory.glob("shardline-*.whl"))
