"""The history file: a row per epoch."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from shardline.trainer import files
from shardline.trainer.callbacks.report import Meter, loss_first
from shardline.trainer.loop import Logs
from shardline.trainer.saving import HISTORY_FILE

Row = dict[str, str]


class HistoryFile(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Keeps history.csv: a row per epoch with its metrics, examples and seconds. For the chief alone.

    Its rows are part of the checkpoint, so that a resumed run repeats and loses none.
    """

    def __init__(self, directory: Path, meter: Meter):
        super().__init__()
        self._path = directory / HISTORY_FILE
        self._meter = meter
        self._rows: list[Row] = []
        self._examples_before = 0
        self._seconds_before = 0.0
        self._first_example = 0
        self._started = time.monotonic()

    def get_state(self) -> dict[str, Any]:
        """Returns the rows, and what the epoch in hand has come to."""
        return {"rows": self._rows, "examples": self._examples(), "seconds": self._seconds()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's state."""
        self._rows = [dict(row) for row in state["rows"]]
        self._examples_before = int(state["examples"])
        self._seconds_before = float(state["seconds"])

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Starts the clock of the epoch, or lets it go on where the epoch has been resumed."""
        self._first_example = self._meter.examples
        self._started = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Adds the epoch's row."""
        row = {"epoch": str(epoch + 1)}
        row |= {name: repr(value) for name, value in loss_first(logs)}
        row |= {"examples": str(self._examples()), "seconds": f"{self._seconds():.3f}"}
        # The row of an epoch that a limit had cut short gives way to that of the whole epoch.
        self._rows = [*(old for old in self._rows if old["epoch"] != row["epoch"]), row]
        self._examples_before, self._seconds_before = 0, 0.0
        self.on_epoch_begin(epoch + 1)
        write_history(self._path, self._rows)

    def _examples(self) -> int:
        return self._examples_before + self._meter.examples - self._first_example

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started


def write_history(path: Path, rows: list[Row]) -> None:
    """Writes a history file; a metric that only some epochs have leaves the others' cells empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    last = [name for name in ("examples", "seconds") if name in names]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*(name for name in names if name not in last), *last], restval="")
    writer.writeheader()
    writer.writerows(rows)
    files.write_text(path, text.getvalue())


def read_history(directory: Path) -> list[Row]:
    """Returns the rows of a model directory's history.csv; none where there is no such file."""
    path = directory / HISTORY_FILE
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
