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
        self._first_epoch = first_epoch
        self._epochs = epochs
        self._epoch = first_epoch
        self._train_seconds = 0.0
        self._examples = 0
        self._started = time.monotonic()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Remembers which epoch runs."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Starts the clock of an execution."""
        self._execution_started = time.monotonic()
        self._execution_first = batch

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Reports how far the training has come."""
        self._train_seconds += time.monotonic() - self._execution_started
        self._examples += (batch + 1 - self._execution_first) * self._plan.global_batch_size
        steps = self._plan.steps
        done = self._epoch * steps + batch + 1
        fresh = done - self._first_epoch * steps
        left = (time.monotonic() - self._started) / fresh * (self._epochs * steps - done)
        progress.advance(
            "train",
            done,
            self._epochs * steps,
            "steps",
            f"epoch {self._epoch + 1}/{self._epochs}  {_metrics(logs)}  "
            f"{self._examples / self._train_seconds:,.0f} examples/s  ETA {left:.0f} s",
        )

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Reports the epoch's metrics."""
        progress.say("train", f"epoch {epoch + 1}/{self._epochs}  {_metrics(logs)}")


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
