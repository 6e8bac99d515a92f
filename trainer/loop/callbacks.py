"""Callbacks of a run: which replicas run each, their hooks, called as by Keras' `fit`, and the reports.

Each replica makes all callbacks, and calls those that run on it. A callback's attribute `on` is "all" or
"chief". The default is "chief" for Keras' own callbacks that write or print, else "all". Reports are progress
lines, history.csv, TensorBoard and the metric of a tuning job.
"""

from __future__ import annotations

import contextlib
import csv
import inspect
import io
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shardline.trainer.base import files, plugins, progress
from shardline.trainer.base.crash import is_machine_failure
from shardline.trainer.base.errors import RunError, SettingsError, ShardlineError
from shardline.trainer.base.progress import Measurements
from shardline.trainer.base.settings import HISTORY_FILE, OutputDirs, TrainSettings
from shardline.trainer.keras_compat.keras_internals import has_batch_hooks
from shardline.trainer.keras_compat.tensorflow_internals import local_mean_reads
from shardline.trainer.loop.process import Counters, TrainingRun
from shardline.trainer.loop.step import Logs, Shapes

# Keras' own callbacks that write to a path, to an address, or to the terminal.
_ON_CHIEF = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
_SCOPES = ("all", "chief")
# Share of the time spent waiting for input from which on it is reported.
_NOTABLE_WAIT = 0.1


class Hooks:
    """The callbacks of one replica, called hook by hook.

    Attributes:
        stateful: Callbacks on every replica whose state is in a checkpoint.
        chief_stateful: Those on the chief alone; empty on any other replica.
        by_step: Whether a callback of the user has a hook for every training step.
        by_test_step: Whether one has a hook for every step of an evaluation.
    """

    def __init__(
        self,
        run: TrainingRun,
        callbacks: Sequence[keras.callbacks.Callback],
        reports: Sequence[keras.callbacks.Callback],
        verbose: int = 2,
    ):
        """Takes the callbacks that every replica has made, and the reports of the chief."""
        chief_only = [item for item in callbacks if callback_scope(item) == "chief"]
        self.stateful = [item for item in callbacks if item not in chief_only]
        chief, history = run.cluster.is_chief, [item for item in reports if isinstance(item, HistoryFile)]
        self.chief_stateful = [*chief_only, *history] * chief
        self.by_step = any(has_batch_hooks(item, "train") for item in callbacks)
        self.by_test_step = any(has_batch_hooks(item, "test") for item in callbacks)
        self._params = {"verbose": verbose, "epochs": run.settings.epochs, "steps": run.data.steps}
        self._watchdog = run.watchdog
        self._strategy = run.strategy
        several = run.cluster.num_workers > 1
        self._chief_only = {id(item) for item in (*chief_only, *reports)} if several else set()
        self._called = [*callbacks, *reports] if chief else self.stateful

    def begin(self, model: keras.Model) -> None:
        """Sets model and parameters of the callbacks, and calls `on_train_begin`."""
        for callback in self._called:
            with _reporting_failure(callback, "set_model"):
                callback.set_model(model)
                callback.set_params(dict(self._params))
            if isinstance(callback, keras.callbacks.History):
                model.history = callback
        self("on_train_begin")

    def __call__(self, hook: str, *number: int, logs: Logs | None = None) -> None:
        """Calls a hook of every callback, with the number of an epoch or step if it has one, and logs."""
        shared = dict(logs or {})  # a callback sees what earlier ones add, as a scheduler its learning rate
        for callback in self._called:
            name = type(callback).__name__
            self._watchdog.at(f"in {hook} of {name}")
            refusal = SettingsError(
                f"{hook} of {name}, which runs on the chief alone, reads a metric of all replicas or takes a "
                "step with them, and the others do not take part; take the metric from its logs, or set the "
                f"callback's attribute on = {_SCOPES[0]!r} to run it on every replica"
            )
            chief_only = refusal if id(callback) in self._chief_only else None
            with _reporting_failure(callback, hook), local_mean_reads(self._strategy, chief_only):
                getattr(callback, hook)(*number, shared)


@contextlib.contextmanager
def _reporting_failure(callback: keras.callbacks.Callback, hook: str) -> Iterator[None]:
    """Converts an exception of a user's callback to one line; not TensorFlow's, maybe of data or a peer."""
    failed = f"callback {type(callback).__name__} failed in {hook}"
    try:
        yield
    except (ShardlineError, tf.errors.OpError, SystemExit):
        raise
    except Exception as failure:
        if type(callback).__module__.startswith("shardline."):
            raise  # a bug of a built-in callback
        kind = RunError if is_machine_failure(failure) else SettingsError
        raise kind(f"{failed}: {plugins.describe(failure)}") from failure


def callback_scope(callback: keras.callbacks.Callback) -> str:
    """Returns the replicas that run a callback, "all" or "chief"; any other `on` is a SettingsError."""
    scope = getattr(callback, "on", "chief" if isinstance(callback, _ON_CHIEF) else "all")
    if scope not in _SCOPES:
        raise SettingsError(
            f"callback {type(callback).__name__} has on = {scope!r}; a callback runs on "
            f"{' or '.join(map(repr, _SCOPES))}"
        )
    return str(scope)


def load_callbacks(reference: str, directory: Path) -> list[keras.callbacks.Callback]:
    """Calls a user's function, with the keyword `directory` if it has it, and returns its callbacks."""
    make = plugins.load(reference, "callback", SettingsError)
    if not callable(make):
        raise SettingsError(f"callback {reference!r} is a {type(make).__name__}, not a function")
    signature = inspect.signature(make)
    arguments = {"directory": directory} if "directory" in signature.parameters else {}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise SettingsError(
            f"callback {reference!r}: {error}; it is called without arguments, or with directory"
        ) from None
    with plugins.calling(f"callback {reference!r} failed", SettingsError):
        made = make(**arguments)
    callbacks = list(made) if isinstance(made, (list, tuple)) else [made]
    for callback in callbacks:
        returned = "has to return a keras.callbacks.Callback or a list of them, it returned"
        check_callback(callback, f"callback {reference!r} {returned}")
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise SettingsError(
                f"callback {reference!r} makes a BackupAndRestore, which would resume from another step than "
                "the run; leave it out: checkpoints are saved and restored without it"
            )
    return callbacks


def check_callback(callback: Any, refusal: str) -> None:
    """Refuses, with the message `refusal`, an object that is not a callback; and an invalid `on`."""
    if not isinstance(callback, keras.callbacks.Callback):
        raise SettingsError(f"{refusal} {type(callback).__name__}")
    callback_scope(callback)


class Stopping(keras.callbacks.EarlyStopping):  # type: ignore[misc]  # keras has no types
    """Early stopping: ends the training when a metric no longer improves, and restores the best weights."""

    def __init__(self, metric: str, patience: int):
        # Keras does not know the direction of the losses of several outputs.
        mode = "min" if metric.endswith(("loss", "error")) else "auto"
        super().__init__(metric, patience=patience, mode=mode, restore_best_weights=True)

    def check_metric(self, shown: Shapes) -> None:
        """Refuses a metric that is not shown, or whose direction Keras does not know."""
        _check_metric("early_stopping", self.monitor, shown)
        try:
            self._set_monitor_op()  # as Keras does after an epoch
        except ValueError:
            raise SettingsError(
                f"early_stopping: Keras does not know whether {self.monitor} improves upwards or downwards; "
                "use another metric, or a callback of your own, EarlyStopping with a mode"
            ) from None

    def improves(self, value: float, other: float) -> bool:
        """Whether a value of the metric is better than another, by Keras' comparison."""
        return bool(self._is_improvement(value, other))


def make_callbacks(settings: TrainSettings, directory: Path) -> list[keras.callbacks.Callback]:
    """Makes the callbacks of the settings, on every replica; they may write to a directory."""
    callbacks: list[keras.callbacks.Callback] = []
    for reference in settings.callbacks:
        callbacks += load_callbacks(reference, directory)
    if settings.early_stopping:
        callbacks.append(Stopping(settings.early_stopping, settings.early_stopping_patience))
    return [*callbacks, keras.callbacks.History()]


def chief_reports(run: TrainingRun, dirs: OutputDirs, *, in_memory: bool) -> list[keras.callbacks.Callback]:
    """Returns the callbacks of the chief that print and record progress."""
    settings, counters = run.settings, run.counters
    dirs.make()
    callbacks = [
        HistoryFile(dirs.model, counters),
        Report(counters, settings.epochs, in_memory=in_memory),
        Board(str(dirs.logs), write_graph=False),
    ]
    if settings.tuning_metric:
        callbacks.append(TuningMetric(settings.tuning_metric, counters, os.environ))
    return callbacks


def check_metrics(
    settings: TrainSettings, callbacks: Sequence[keras.callbacks.Callback], shown: Shapes
) -> None:
    """Checks the metrics that settings name, before the first step: Keras would warn after an epoch."""
    for callback in callbacks:
        if isinstance(callback, Stopping):
            callback.check_metric(shown)
    if settings.tuning_metric:
        _check_metric("tuning_metric", settings.tuning_metric, shown)


def _check_metric(setting: str, metric: str, shown: Shapes) -> None:
    if metric not in shown:
        raise SettingsError(f"{setting}: no metric {metric!r}; there are {', '.join(sorted(shown))}")
    if shown[metric]:
        raise SettingsError(
            f"{setting}: {metric} has a value for each class; set the metric's average "
            '(F1Score(average="macro")), or name another one'
        )


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
