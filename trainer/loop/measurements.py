"""Measurements of a trial of a hyperparameter tuning job, in the file that Vertex AI's agent reads."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from shardline.trainer.base import crash

FILE_VARIABLE = "CLOUD_ML_HP_METRIC_FILE"


class Measurements:
    """Writes the file as cloudml-hypertune 0.1.0.dev6 does, a library of one class last released in 2019.

    https://github.com/GoogleCloudPlatform/cloudml-hypertune/blob/master/hypertune/hypertune.py
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Reads the reports of an earlier process; a SettingsError if the file cannot be written."""
        self._path = Path(environ.get(FILE_VARIABLE) or "/tmp/hypertune/output.metrics")
        self._trial = environ.get("CLOUD_ML_TRIAL_ID", "0")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a+", encoding="utf-8", errors="replace") as file:
                file.seek(0)
                self._lines = deque(file.read().splitlines(), maxlen=100)
        except OSError as error:
            raise crash.output_error(
                error,
                f"the trial's metric cannot be reported: {self._path} cannot be written ({error.strerror}); "
                "run the image as root, as the platform's own images do, or give its user that directory",
            ) from None

    def add(self, metric: str, value: float, step: int) -> None:
        """Reports the finite value of a metric at a training step."""
        report = {"timestamp": time.time(), "trial": self._trial, metric: str(value)}
        report |= {"global_step": str(step), "checkpoint_path": ""}
        self._lines.append(json.dumps(report, sort_keys=True))
        # Rewritten in place: it is not documented whether the agent would notice a replaced file.
        with self._path.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in self._lines)


def read_measurements(path: Path, metric: str) -> list[tuple[int, float, float]]:
    """Returns the reports of a trial: step, value and time (seconds since 1970) of each.

    Of two reports of one step, by a restarted trial, the last counts. An incomplete line is skipped, and a
    value that is not finite; a missing file has no reports.
    """
    reports: dict[int, tuple[int, float, float]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
            step, value = int(entry["global_step"]), float(entry[metric])
            if math.isfinite(value):
                reports[step] = (step, value, float(entry["timestamp"]))
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
    return [reports[step] for step in sorted(reports)]
