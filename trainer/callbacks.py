"""Keras callbacks of every run: what a person reads, the history file, TensorBoard."""

from __future__ import annotations

import csv
import io
import time
from pathlib import Path

import keras

from trainer import files, progress
from trainer.data.order import EpochPlan
from trainer.loop import Logs
from trainer.saving import HISTORY_FILE


class Report(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Reports steps, metrics, examples per second and the time left. For the chief alone."""

    def __init__(self, plan: EpochPlan, first_epoch: int, epochs: int):
        super().__init__()
        self._plan = plan
        self._first_step = first_epoch * plan.steps
        self._epochs = epochs
        self._epoch = first_epoch
        self._done = self._first_step
        self._started = time.monotonic()
        self._epoch_started = self._started
        self._rate = 0.0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Starts the clock of the epoch."""
        self._epoch = epoch
        self._epoch_started = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Reports how far the training has come."""
        self._done = self._epoch * self._plan.steps + batch + 1
        examples = min((batch + 1) * self._plan.global_batch_size, self._plan.records)
        self._rate = examples / (time.monotonic() - self._epoch_started)
        progress.advance("train", self._done, self._epochs * self._plan.steps, "steps", self._text(logs))

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Reports the epoch with its validation."""
        progress.say("train", self._text(logs))

    def _text(self, logs: Logs | None) -> str:
        steps_left = self._epochs * self._plan.steps - self._done
        eta = (time.monotonic() - self._started) / (self._done - self._first_step) * steps_left
        return (
            f"epoch {self._epoch + 1}/{self._epochs}  {_metrics(logs)}  "
            f"{self._rate:,.0f} examples/s  ETA {eta:.0f} s"
        )


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
            | {name: repr(value) for name, value in _loss_first(logs)}
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


def chief_callbacks(
    directory: Path, logs: Path, plan: EpochPlan, first_epoch: int, epochs: int
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks of the chief. None of them reads a metric, so they may run there alone."""
    return [
        Report(plan, first_epoch, epochs),
        HistoryFile(directory, plan, first_epoch),
        keras.callbacks.TensorBoard(str(logs), write_graph=False),
    ]


def _loss_first(logs: Logs | None) -> list[tuple[str, float]]:
    return sorted(
        (logs or {}).items(), key=lambda item: (item[0].startswith("val_"), not item[0].endswith("loss"))
    )


def _metrics(logs: Logs | None) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in _loss_first(logs))
