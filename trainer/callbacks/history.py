"""The history file: a row per epoch."""

from __future__ import annotations

import csv
import io
import time
from pathlib import Path

import keras

from trainer import files
from trainer.callbacks.report import loss_first
from trainer.data.order import EpochPlan
from trainer.loop import Logs
from trainer.saving import HISTORY_FILE


class HistoryFile(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Keeps history.csv: a row per epoch with its metrics, examples and seconds. For the chief alone."""

    def __init__(self, directory: Path, plan: EpochPlan, first_epoch: int):
        super().__init__()
        self._path = directory / HISTORY_FILE
        self._plan = plan
        self._rows = read_history(directory)[:first_epoch]

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Starts the clock of the epoch."""
        self._started = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Adds the epoch's row."""
        seconds = time.monotonic() - self._started
        self._rows.append(
            {"epoch": str(epoch + 1)}
            | {name: repr(value) for name, value in loss_first(logs)}
            | {"examples": str(self._plan.records), "seconds": f"{seconds:.3f}"}
        )
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(self._rows[-1]), restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(self._rows)
        files.write_text(self._path, text.getvalue())


def read_history(directory: Path) -> list[dict[str, str]]:
    """Returns the rows of a model directory's history.csv; none where there is no such file."""
    path = directory / HISTORY_FILE
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
