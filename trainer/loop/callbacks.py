"""Callbacks of a run: which replicas run each, and their hooks, called as by Keras' `fit`.

Each replica makes all callbacks, and calls those that run on it. A callback's attribute `on` is "all" or
"chief". The default is "chief" for Keras' own callbacks that write or print, else "all".
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from shardline.trainer.base import plugins
from shardline.trainer.base.crash import is_machine_failure
from shardline.trainer.base.errors import RunError, SettingsError, ShardlineError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.keras_compat.keras_internals import has_batch_hooks
from shardline.trainer.keras_compat.tensorflow_internals import local_mean_reads
from shardline.trainer.loop.reports import Board, Counters, HistoryFile, Report, TuningMetric
from shardline.trainer.loop.run import DatasetRun, TrainingRun
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

    def check(self, shown: Shapes) -> None:
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


def make_callbacks(run: DatasetRun) -> list[keras.callbacks.Callback]:
    """Makes the callbacks of the settings, on every replica."""
    settings = run.settings
    callbacks: list[keras.callbacks.Callback] = []
    for reference in settings.callbacks:
        callbacks += load_callbacks(reference, run.scratch or run.dirs.model)
    if settings.early_stopping:
        callbacks.append(Stopping(settings.early_stopping, settings.early_stopping_patience))
    return [*callbacks, keras.callbacks.History()]


def chief_reports(run: DatasetRun, counters: Counters) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that print and record progress, on the chief; [] on other replicas."""
    settings = run.settings
    if not run.cluster.is_chief:
        return []
    run.dirs.make()
    callbacks = [
        HistoryFile(run.dirs.model, counters),
        Report(counters, settings.epochs, in_memory=run.data.in_memory),
        Board(str(run.dirs.logs), write_graph=False),
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
            callback.check(shown)
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
