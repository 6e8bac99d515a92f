"""What a person reads while a run trains.

The history file: a row per epoch.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras

from shardline.trainer import files, progress
from shardline.trainer.saving import HISTORY_FILE
from shardline.trainer.step import Logs

#: Share of the time for which it is worth to change something.
_MUCH = 0.1


@dataclass
class Meter:
    """What the chief has counted since this process began to train.

    Attributes:
        replicas: Replicas that share the work.
        total_steps: Steps of the whole run, if nothing ends it early.
        first_step: Steps done before this process began.
        steps: Steps done, those before this process included.
        examples: Examples trained by this process's job.
        seconds: Time spent on them.
        waited: Part of it, on the chief, spent waiting for input.
    """

    replicas: int
    total_steps: int = 0
    first_step: int = 0
    steps: int = 0
    examples: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    def add(self, steps: int, examples: int, seconds: float, waited: float) -> None:
        """Counts some steps."""
        self.steps += steps
        self.examples += examples
        self.seconds += seconds
        self.waited += waited


@dataclass
class _Mark:
    """Where the meter stood at the last report."""

    examples: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    started: float = field(default_factory=time.monotonic)


class Report(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Reports steps, metrics, speed, the wait for input and the time left. For the chief alone."""

    def __init__(self, meter: Meter, epochs: int, *, in_memory: bool = False):
        """Takes what is counted, and whether examples are in memory already."""
        super().__init__()
        self._in_memory = in_memory
        self._meter = meter
        self._epochs = epochs
        self._epoch = 0
        self._mark = _Mark()
        self._speed = ""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Remembers the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Reports how far the training has come."""
        meter, mark = self._meter, self._mark
        seconds = max(meter.seconds - mark.seconds, 1e-9)
        rate = (meter.examples - mark.examples) / seconds
        waited = min(1.0, (meter.waited - mark.waited) / seconds)
        each = f" ({rate / meter.replicas:,.0f} per replica)" if meter.replicas > 1 else ""
        self._speed = f"{rate:,.0f} examples/s{each}  input wait {waited:.0%}"
        self._mark = _Mark(meter.examples, meter.seconds, meter.waited, mark.started)
        progress.advance("train", meter.steps, meter.total_steps, "steps", self._text(logs))

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Reports the epoch with its validation."""
        progress.say("train", self._text(logs))

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Says what the run has waited for, where that was much, and what would help."""
        meter = self._meter
        share = min(1.0, meter.waited / meter.seconds) if meter.seconds else 0.0
        if share > _MUCH:
            advice = "larger batches" if self._in_memory else "cache memory, images stored raw or smaller"
            progress.say("train", f"steps waited for input {share:.0%} of the time; what may help: {advice}")

    def _text(self, logs: Logs | None) -> str:
        meter = self._meter
        done = max(1, meter.steps - meter.first_step)
        left = max(0, meter.total_steps - meter.steps)
        eta = (time.monotonic() - self._mark.started) / done * left
        return f"epoch {self._epoch + 1}/{self._epochs}  {_metrics(logs)}  {self._speed}  ETA {eta:.0f} s"


def loss_first(logs: Logs | None) -> list[tuple[str, float]]:
    """Returns the metrics in the order in which people read them: losses first, validation last."""
    return sorted(
        (logs or {}).items(), key=lambda item: (item[0].startswith("val_"), not item[0].endswith("loss"))
    )


def _metrics(logs: Logs | None) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in loss_first(logs))


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
