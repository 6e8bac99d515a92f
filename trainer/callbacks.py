"""What a person reads while a run trains.

The history file: a row per epoch.

The callbacks of a run, as its settings ask for them.

Callbacks that a user brings: `pkg.module:make`.

TensorBoard's profile of some steps.

Early stopping on a validation metric.

The metric of a hyperparameter tuning job, reported as Vertex AI reads it.
"""

from __future__ import annotations

import csv
import inspect
import io
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from shardline.trainer import files, plugins, progress
from shardline.trainer.assembly import Assembly
from shardline.trainer.errors import SettingsError
from shardline.trainer.measurements import Measurements
from shardline.trainer.optimizers import Unfreeze
from shardline.trainer.run import Run
from shardline.trainer.saving import HISTORY_FILE
from shardline.trainer.step import Logs

#: Share of the time for which it is worth to change something.
_MUCH = 0.1


@dataclass
class Counters:
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

    def __init__(self, meter: Counters, epochs: int, *, in_memory: bool = False):
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

    def __init__(self, directory: Path, meter: Counters):
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


def load_callbacks(reference: str, directory: Path) -> list[keras.callbacks.Callback]:
    """Makes the callbacks that an import string names.

    Args:
        reference: `pkg.module:make`; `make()` or `make(directory)` returns a callback or a list of them.
        directory: Given to `make` where it has a parameter of that name.

    Raises:
        SettingsError: When there is no such function, or it fails, or returns something else.
    """
    make = plugins.load(reference, "callback", SettingsError)
    arguments = _arguments(reference, make, directory)
    try:
        made = make(**arguments)
    except Exception as error:
        raise SettingsError(f"callback {reference!r} failed: {plugins.describe(error)}") from error
    callbacks = list(made) if isinstance(made, (list, tuple)) else [made]
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.Callback):
            raise SettingsError(
                f"callback {reference!r} has to return a keras.callbacks.Callback or a list of them, "
                f"it returned {type(callback).__name__}"
            )
    return callbacks


def _arguments(reference: str, make: Any, directory: Path) -> dict[str, Path]:
    if not callable(make):
        raise SettingsError(f"callback {reference!r} is {make!r}, not a function")
    parameters = inspect.signature(make).parameters.values()
    required = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "directory"
    ]
    if required:
        raise SettingsError(
            f"callback {reference!r} requires {', '.join(required)}, but it is given nothing, or directory"
        )
    return {"directory": directory} if any(p.name == "directory" for p in parameters) else {}


class Profile(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Profiles the steps first..last of the run. For the chief alone.

    The steps of one call into TensorFlow cannot be told apart from outside, so the run has to look up before
    the first and after the last of them.
    """

    def __init__(self, directory: Path, meter: Counters, first: int, last: int):
        super().__init__()
        self._directory = str(directory)
        self._meter = meter
        self._first = first
        self._last = last
        self._running = False

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Starts the profile before its first step."""
        if not self._running and self._meter.steps == self._first - 1:
            tf.profiler.experimental.start(self._directory)
            self._running = True

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Ends it after its last."""
        if self._running and self._meter.steps >= self._last:
            self._stop()

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Ends it where the run ends earlier."""
        if self._running:
            self._stop()

    def _stop(self) -> None:
        tf.profiler.experimental.stop()
        self._running = False


class Stopping(keras.callbacks.EarlyStopping):  # type: ignore[misc]  # keras has no types
    """Ends the training when a metric no longer improves, and gives the model its best weights back.

    For every replica: all of them see the same metrics and stop after the same epoch.
    """

    def __init__(self, metric: str, patience: int, available: Sequence[str]):
        """Checks the metric before the first step, where Keras would warn after an epoch.

        Args:
            metric: That has to improve ("val_loss").
            patience: Epochs without improvement after which the training ends.
            available: Metrics that an epoch reports.

        Raises:
            SettingsError: When `metric` is none of them.
        """
        if metric not in available:
            there = ", ".join(sorted(available)) or "none: the dataset has no validation split"
            raise SettingsError(f"early_stopping: no metric {metric!r}; there are {there}")
        # Keras finds no direction for the losses of several outputs.
        mode = "min" if metric.endswith(("loss", "error")) else "auto"
        super().__init__(metric, patience=patience, mode=mode, restore_best_weights=True)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts anew.

        Raises:
            SettingsError: When Keras does not know which way the metric improves.
        """
        super().on_train_begin(logs)
        try:
            self._set_monitor_op()
        except ValueError:
            raise SettingsError(
                f"early_stopping: Keras does not know whether {self.monitor} improves upwards or downwards; "
                "use another metric, or bring an EarlyStopping with its mode as a callback"
            ) from None


class TuningMetric(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Reports a metric after each validation. For the chief alone."""

    def __init__(self, metric: str, meter: Counters, environ: Mapping[str, str]):
        """Takes what it needs.

        Args:
            metric: To report ("val_accuracy").
            meter: Counts the steps.
            environ: The process's environment.
        """
        super().__init__()
        self._metric = metric
        self._meter = meter
        self._measurements = Measurements(environ)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Reports the metric, unless it is not finite: the trial has then measured nothing."""
        value = float((logs or {}).get(self._metric, math.nan))
        if math.isfinite(value):
            self._measurements.add(self._metric, value, self._meter.steps)
        else:
            progress.say("train", f"{self._metric} is not finite and is not reported")


def check_metric(metric: str, available: Sequence[str]) -> None:
    """Checks the metric before the first step.

    Args:
        metric: To report.
        available: Metrics that an epoch reports.

    Raises:
        SettingsError: When `metric` is none of them.
    """
    if metric not in available:
        raise SettingsError(f"tuning_metric: no metric {metric!r}; there are {', '.join(sorted(available))}")


def stateful_callbacks(
    run: Run, assembly: Assembly, meter: Counters, retrace: Callable[[], None]
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that are part of a checkpoint; the chief keeps the history besides."""
    settings, chief = run.settings, run.cluster.is_chief
    callbacks = []
    if assembly.frozen:

        def changed() -> None:
            retrace()
            if chief:
                progress.say(
                    "train", f"{len(assembly.model.trainable_weights)} weights are trained from now on"
                )

        callbacks.append(
            Unfreeze(assembly.frozen, settings.unfreeze_at_epoch, settings.fine_tuning_learning_rate, changed)
        )
    for reference in settings.callbacks:
        callbacks += load_callbacks(reference, run.scratch or run.dirs.model)
    names = list(assembly.model.get_metrics_result())
    available = names + [f"val_{name}" for name in names if "validation" in run.manifest.splits]
    if settings.early_stopping:
        callbacks.append(Stopping(settings.early_stopping, settings.early_stopping_patience, available))
    if settings.tuning_metric:
        check_metric(settings.tuning_metric, available)
    return [*callbacks, HistoryFile(run.dirs.model, meter)] if chief else callbacks


def chief_callbacks(run: Run, meter: Counters) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that only show or report things; none of them reads a metric itself."""
    settings = run.settings
    callbacks = [
        Report(meter, settings.epochs, in_memory=run.feed("train").in_memory),
        keras.callbacks.TensorBoard(
            str(run.dirs.logs), write_graph=False, histogram_freq=settings.histograms
        ),
    ]
    if settings.tuning_metric:
        callbacks.append(TuningMetric(settings.tuning_metric, meter, os.environ))
    if settings.profiled_steps:
        callbacks.append(Profile(run.dirs.logs, meter, *settings.profiled_steps))
    return callbacks
