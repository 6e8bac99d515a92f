"""Reports of a run, callbacks of the chief: progress lines, history.csv, TensorBoard, tuning metric."""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from shardline.trainer.base import files, progress
from shardline.trainer.base.settings import HISTORY_FILE
from shardline.trainer.loop.measurements import Measurements
from shardline.trainer.loop.step import Logs

# Share of the time spent waiting for input from which on it is reported.
_NOTABLE_WAIT = 0.1


@dataclass
class Counters:
    """Counters of a run.

    Attributes:
        total_steps: Steps of the whole run, if nothing ends it early.
        first_step: Steps that earlier processes have trained.
        steps: Steps of the whole run until now.
        examples: Examples that this process has trained, over all replicas.
        seconds: Seconds that this process has trained.
        waited: Seconds of these that it waited for input.
    """

    total_steps: int = 0
    first_step: int = 0
    steps: int = 0
    examples: int = 0
    seconds: float = 0.0
    waited: float = 0.0


class Report(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Reports steps, metrics, speed, the wait for input and the time left. For the chief alone."""

    def __init__(self, counters: Counters, epochs: int, *, in_memory: bool = False):
        super().__init__()
        self._advice = "larger batches" if in_memory else "cache memory, or images stored raw or smaller"
        self._counters = counters
        self._epochs = epochs
        self._epoch = 0
        self._started = time.monotonic()
        self._before = replace(counters)  # at the last report
        self._rate = self._wait = 0.0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Remembers the epoch for the reports within it."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Reports progress."""
        counters, before = self._counters, self._before
        seconds = max(counters.seconds - before.seconds, 1e-9)
        self._rate = (counters.examples - before.examples) / seconds
        self._wait = min(1.0, (counters.waited - before.waited) / seconds)
        self._before = replace(counters)
        epoch, shown = f"epoch {self._epoch + 1}/{self._epochs}", format_metrics(logs)
        text = f"{epoch}  {shown}  {self._rate:,.0f}/s  {self._eta()}"
        progress.advance("train", counters.steps, counters.total_steps, "steps", text)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Reports the epoch, with its validation in a line of its own."""
        shown = scalar_metrics(logs)
        validation = {name: value for name, value in shown.items() if name.startswith("val_")}
        training = {name: value for name, value in shown.items() if name not in validation}
        speed = f"{self._rate:,.0f} examples/s  {self._eta()}"
        wait = f"input wait {self._wait:.0%}" if self._wait > _NOTABLE_WAIT else ""
        progress.report("train", f"epoch {epoch + 1}/{self._epochs}  {format_metrics(training)}  {speed}")
        if second := "  ".join(filter(None, [format_metrics(validation), wait])):
            progress.report("train", f"  {second}")

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Reports the wait for input, if it was long, and what may help."""
        counters = self._counters
        share = min(1.0, counters.waited / counters.seconds) if counters.seconds else 0.0
        if share > _NOTABLE_WAIT:
            waited = f"steps waited for input {share:.0%} of the time"
            progress.report("train", f"{waited}; what may help: {self._advice}")

    def _eta(self) -> str:
        counters = self._counters
        done = max(1, counters.steps - counters.first_step)
        left = max(0, counters.total_steps - counters.steps)
        return f"ETA {(time.monotonic() - self._started) / done * left:.0f} s"


def scalar_metrics(logs: Logs | None) -> dict[str, float]:
    """Returns the metrics that are one number, not one for each class as in F1Score."""
    return {name: value for name, value in (logs or {}).items() if isinstance(value, float)}


def to_json_values(logs: Logs) -> dict[str, Any]:
    """Returns metrics as JSON values: arrays as lists, and null for a metric that is not finite."""
    return {
        name: np.asarray(value).tolist() if np.all(np.isfinite(value)) else None
        for name, value in logs.items()
    }


def format_metrics(logs: Logs | None) -> str:
    """Returns scalar metrics as one line, "loss 0.1234  accuracy 0.9876"."""
    return "  ".join(f"{name} {value:.4f}" for name, value in _loss_first(scalar_metrics(logs)))


def _loss_first(logs: Logs | None) -> list[tuple[str, Any]]:
    return sorted(
        (logs or {}).items(), key=lambda item: (item[0].startswith("val_"), not item[0].endswith("loss"))
    )


class HistoryFile(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Keeps history.csv: a row per epoch with its metrics, examples and seconds, part of the checkpoint."""

    def __init__(self, directory: Path, counters: Counters):
        super().__init__()
        self._path = directory / HISTORY_FILE
        self._counters = counters
        self._rows: list[dict[str, str]] = []
        self._before = (0, 0.0)  # examples and seconds of the current epoch before it was resumed
        self._first_example = 0
        self._started = time.monotonic()

    def get_state(self) -> dict[str, Any]:
        """Returns the rows, and examples and seconds of the current epoch."""
        examples, seconds = self._spent()
        return {"rows": self._rows, "examples": examples, "seconds": seconds}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the state of a checkpoint."""
        self._rows = [dict(row) for row in state["rows"]]
        self._before = (int(state["examples"]), float(state["seconds"]))

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Starts the clock of the epoch, or of the rest of a resumed one."""
        self._first_example = self._counters.examples
        self._started = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Adds the epoch's row; a metric that only some epochs have is empty in the others."""
        examples, seconds = self._spent()
        # Numbers with all digits, arrays (F1Score of each class) as lists.
        metrics = {name: json.dumps(np.asarray(value).tolist()) for name, value in _loss_first(logs)}
        last = {"examples": str(examples), "seconds": f"{seconds:.3f}"}
        row = {"epoch": str(epoch + 1), **metrics, **last}
        # The row of the whole epoch replaces that of one that a limit had cut short.
        self._rows = [*(other for other in self._rows if other["epoch"] != row["epoch"]), row]
        self._before = (0, 0.0)
        self.on_epoch_begin(epoch + 1)
        names = dict.fromkeys(name for row in self._rows for name in row if name not in last)
        text = io.StringIO()
        writer = csv.DictWriter(text, [*names, *last], restval="")
        writer.writeheader()
        writer.writerows(self._rows)
        files.write_text(self._path, text.getvalue())

    def _spent(self) -> tuple[int, float]:
        examples, seconds = self._before
        new = self._counters.examples - self._first_example
        return examples + new, seconds + time.monotonic() - self._started


def sync_events(directory: Path) -> None:
    """Uploads event files that are still open: a mounted bucket does so at fsync or close."""
    for path in directory.glob("events.out.tfevents.*"):
        files.sync(path)


class Board(keras.callbacks.TensorBoard):  # type: ignore[misc]  # keras has no types
    """TensorBoard callback for scalar metrics, as Keras writes no others."""

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Writes the metrics of a step, when due."""
        super().on_train_batch_end(batch, scalar_metrics(logs))

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Writes the metrics of a validation."""
        super().on_test_end(scalar_metrics(logs))

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Writes the metrics of an epoch, and uploads them to a mounted bucket."""
        super().on_epoch_end(epoch, scalar_metrics(logs))
        for writer in self._writers.values():
            writer.flush()
        for directory in (self._train_dir, self._val_dir):
            sync_events(Path(directory))


class TuningMetric(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Reports a metric to a hyperparameter tuning job after each validation. For the chief alone."""

    def __init__(self, metric: str, counters: Counters, environ: Mapping[str, str]):
        super().__init__()
        self._metric = metric
        self._counters = counters
        self._measurements = Measurements(environ)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Reports the metric if it is finite."""
        value = float((logs or {}).get(self._metric, math.nan))
        if math.isfinite(value):
            self._measurements.add(self._metric, value, self._counters.steps)
        else:
            progress.report("train", f"{self._metric} is not finite and is not reported")
