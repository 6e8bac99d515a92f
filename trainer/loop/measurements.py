"""Measurements of a trial of a hyperparameter tuning job, in the file that Vertex AI's agent reads."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from shardline.trainer.base import crash

#: Where the platform's agent looks, unless the environment says otherwise.
_FILE = "/tmp/hypertune/output.metrics"
FILE_VARIABLE = "CLOUD_ML_HP_METRIC_FILE"
_TRIAL_VARIABLE = "CLOUD_ML_TRIAL_ID"
_MOST_LINES = 100


class Measurements:
    """Writes the file as cloudml-hypertune 0.1.0.dev6 does, a library of one class last released in 2019.

    https://github.com/GoogleCloudPlatform/cloudml-hypertune/blob/master/hypertune/hypertune.py
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Goes on with what an earlier attempt has reported; a SettingsError where it cannot be written."""
        self._path = Path(environ.get(FILE_VARIABLE) or _FILE)
        self._trial = environ.get(_TRIAL_VARIABLE, "0")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a+", encoding="utf-8", errors="replace") as file:
                file.seek(0)
                self._lines = deque(file.read().splitlines(), maxlen=_MOST_LINES)
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
        # In place: whether the agent would find a file that has taken the name of another is said nowhere.
        with self._path.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in self._lines)


def read_measurements(path: Path, metric: str) -> list[tuple[int, float, float]]:
    """Returns what a trial has reported: step, value and time of each report (seconds since the epoch).

    Of two reports of one step, which a restarted trial makes, the last counts. A line that is being written
    is left for later; a missing file reports nothing.
    """
    found: dict[int, tuple[int, float, float]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
            step, value = int(entry["global_step"]), float(entry[metric])
            found[step] = (step, value, float(entry["timestamp"]))
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
    return [found[step] for step in sorted(found)]
