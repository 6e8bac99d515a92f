"""The directory of one run, and the record in it of what ran."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardline.trainer import files
from shardline.trainer.errors import SettingsError
from shardline.trainer.progress import Scalar

_PACKAGES = ("shardline", "tensorflow", "keras", "kfp", "google-cloud-pipeline-components")


def timestamp(time: datetime.datetime) -> str:
    """Returns a time in UTC as RFC 3339 text."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


class RunRecord:
    """The directory of one run and its run.json, which says at any time how far the run has come.

    Attributes:
        directory: The run's own directory.
        created: When the run was created, RFC 3339 in UTC.
        sha256: Checksum of the pipeline's YAML, in hexadecimal.
    """

    def __init__(self, runs: Path, pipeline: bytes, now: datetime.datetime) -> None:
        """Makes the directory, named by the time, and puts an exact copy of the pipeline into it.

        Raises:
            SettingsError: When the directory cannot be written.
        """
        self.created = timestamp(now)
        self.sha256 = hashlib.sha256(pipeline).hexdigest()
        self._started = time.monotonic()
        self._content: dict[str, Any] = {}
        try:
            self.directory = _make_unique(runs.absolute(), now.strftime("%Y-%m-%dT%H-%M-%SZ"))
            files.write_bytes(self.directory / "pipeline.yaml", pipeline)
        except OSError as error:
            raise SettingsError(
                f"cannot write the run directory {runs}: {error.strerror}; choose another with --runs-dir"
            ) from None

    @property
    def duration(self) -> float:
        """Seconds since the run was created."""
        return time.monotonic() - self._started

    def start(self, name: str, path: Path, parameters: Mapping[str, Any]) -> None:
        """Records what runs, with which settings and versions."""
        self._content = {
            "pipeline": name,
            "yaml": str(path),
            "sha256": self.sha256,
            "state": "running",
            "created": self.created,
            "duration_s": None,
            "parameters": dict(parameters),
            "versions": {"python": platform.python_version(), **_versions()},
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "facts": {},
            "error": None,
        }
        self._save()

    def end(self, state: str, facts: Mapping[str, Scalar], error: str | None) -> None:
        """Records how the run ended: "succeeded", "failed" or "stopped"."""
        self._content |= {
            "state": state,
            "duration_s": round(self.duration, 3),
            "facts": dict(facts),
            "error": error,
        }
        self._save()

    def _save(self) -> None:
        files.write_json(self.directory / "run.json", self._content)


def _make_unique(runs: Path, name: str) -> Path:
    runs.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        directory = runs / (name if number == 1 else f"{name}-{number}")
        try:
            directory.mkdir()
        except FileExistsError:
            number += 1
        else:
            return directory


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions
