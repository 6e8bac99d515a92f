"""Callbacks of a run: where each runs, and every hook called as Keras' `fit` calls it.

Each replica makes all callbacks, and calls those that run on it. A callback says itself where it runs: its
attribute `on` is "all" or "chief". Without it those of Keras' own that write or print run on the chief.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from shardline.trainer.base import plugins, progress
from shardline.trainer.base.crash import is_machine_failure
from shardline.trainer.base.errors import RunError, SettingsError, ShardlineError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.keras_compat.keras_internals import has_batch_hooks
from shardline.trainer.keras_compat.tensorflow_internals import local_mean_reads
from shardline.trainer.loop.optimizers import FrozenLayers, Unfreeze
from shardline.trainer.loop.reports import Board, Counters, HistoryFile, Report, TuningMetric
from shardline.trainer.loop.run import DatasetRun, TrainingRun
from shardline.trainer.loop.step import Logs, Shapes

# Of Keras' own, those that write to one path, to one address, or to the terminal.
_ON_CHIEF = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
_PLACES = ("all", "chief")


class Hooks:
    """The callbacks of one replica, called hook by hook.

    Attributes:
        remembering: Callbacks whose state a checkpoint keeps and that run on every replica.
        chief_remembering: Those of the chief alone; empty on any other replica.
        by_step: Whether a callback of the user's has a hook of every training step.
        by_test_step: Whether one has a hook of every step of an evaluation.
    """

    def __init__(
        self,
        run: TrainingRun,
        chosen: Sequence[keras.callbacks.Callback],
        reports: Sequence[keras.callbacks.Callback],
    ):
        """Takes the callbacks that every replica has made, and those that report, none but on the chief."""
        alone = [one for one in chosen if place_of(one) == "chief"]
        self.remembering = [one for one in chosen if one not in alone]
        chief = run.cluster.is_chief
        self.chief_remembering = [*alone, *(one for one in reports if isinstance(one, HistoryFile))] * chief
        self.by_step = any(has_batch_hooks(one, "train") for one in chosen) or bool(
            run.settings.profile_steps
        )
        self.by_test_step = any(has_batch_hooks(one, "test") for one in chosen)
        self._watchdog = run.watchdog
        self._strategy = run.strategy
        self._alone = {id(one) for one in (*alone, *reports)} if run.cluster.num_workers > 1 else set()
        self._called = [*chosen, *reports] if chief else self.remembering

    def begin(self, model: keras.Model, *, epochs: int, steps: int, verbose: int) -> None:
        """Tells the callbacks what they will see, and that training begins."""
        for callback in self._called:
            with _failing(callback, "set_model"):
                callback.set_model(model)
                callback.set_params({"verbose": verbose, "epochs": epochs, "steps": steps})
            if isinstance(callback, keras.callbacks.History):
                model.history = callback
        self("on_train_begin")

    def __call__(self, hook: str, *number: int, logs: Logs | None = None) -> None:
        """Calls a hook of every callback, with the number of an epoch or step if it has one, and logs."""
        given = dict(logs or {})  # what one adds (a scheduler the learning rate) the next one sees
        for callback in self._called:
            name = type(callback).__name__
            self._watchdog.at(f"in {hook} of {name}")
            refusal = SettingsError(
                f"{hook} of {name}, which runs on the chief alone, reads a metric of all replicas or takes a "
                "step with them, and they are not there; take the metric from its logs, or set the "
                f"callback's attribute on = {_PLACES[0]!r} so that it runs on every replica"
            )
            alone = refusal if id(callback) in self._alone else None
            with _failing(callback, hook), local_mean_reads(self._strategy, alone):
                getattr(callback, hook)(*number, given)


@contextlib.contextmanager
def _failing(callback: keras.callbacks.Callback, hook: str) -> Iterator[None]:
    """Turns what a user's callback raises into one line; TensorFlow's own may be a record's or a peer's."""
    what = f"callback {type(callback).__name__} failed in {hook}"
    try:
        yield
    except (ShardlineError, tf.errors.OpError, SystemExit):
        raise
    except Exception as failure:
        if type(callback).__module__.startswith("shardline."):
            raise  # one of ours: a crash
        kind = RunError if is_machine_failure(failure) else SettingsError
        raise kind(f"{what}: {plugins.describe(failure)}") from failure


def place_of(callback: keras.callbacks.Callback) -> str:
    """Returns where a callback runs, "all" or "chief"; any other word is a SettingsError."""
    place = getattr(callback, "on", "chief" if isinstance(callback, _ON_CHIEF) else "all")
    if place not in _PLACES:
        raise SettingsError(
            f"callback {type(callback).__name__} has on = {place!r}; a callback runs on "
            f"{' or '.join(map(repr, _PLACES))}"
        )
    return str(place)


def load_callbacks(reference: str, directory: Path) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that a function makes, called with the keyword `directory` if it has one."""
    make = plugins.load(reference, "callback", SettingsError)
    if not callable(make):
        raise SettingsError(f"callback {reference!r} is {make!r}, not a function")
    signature = inspect.signature(make)
    given = {"directory": directory} if "directory" in signature.parameters else {}
    try:
        signature.bind(**given)
    except TypeError as error:
        raise SettingsError(f"callback {reference!r}: {error}; it is given nothing, or directory") from None
    with plugins.calling(f"callback {reference!r} failed", SettingsError):
        made = make(**given)
    callbacks = list(made) if isinstance(made, (list, tuple)) else [made]
    for callback in callbacks:
        returned = "has to return a keras.callbacks.Callback or a list of them, it returned"
        check_callback(callback, f"callback {reference!r} {returned}")
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise SettingsError(
                f"callback {reference!r} makes a BackupAndRestore, which would go on from a place that the "
                "run does not know; leave it out: checkpoints are saved and restored without it"
            )
    return callbacks


def check_callback(callback: Any, refusal: str) -> None:
    """Refuses, in these words, what is no callback of Keras, and one that runs where no callbacks do."""
    if not isinstance(callback, keras.callbacks.Callback):
        raise SettingsError(f"{refusal} {type(callback).__name__}")
    place_of(callback)


class Stopping(keras.callbacks.EarlyStopping):  # type: ignore[misc]  # keras has no types
    """Ends the training when a metric no longer improves, and gives the model its best weights back."""

    def __init__(self, metric: str, patience: int):
        # Keras finds no direction for the losses of several outputs.
        mode = "min" if metric.endswith(("loss", "error")) else "auto"
        super().__init__(metric, patience=patience, mode=mode, restore_best_weights=True)

    def check(self, shown: Shapes) -> None:
        """Refuses a metric that is not shown, or of which Keras does not know which way it improves."""
        _check_metric("early_stopping", self.monitor, shown)
        try:
            self._set_monitor_op()  # as Keras does after an epoch
        except ValueError:
            raise SettingsError(
                f"early_stopping: Keras does not know whether {self.monitor} improves upwards or downwards; "
                "use another metric, or bring an EarlyStopping with its mode as a callback"
            ) from None

    def improves(self, value: float, other: float) -> bool:
        """Whether a value of the metric is better than another, as Keras decides it."""
        return bool(self._is_improvement(value, other))


def chosen_callbacks(
    run: DatasetRun,
    model: keras.Model,
    frozen: FrozenLayers | None,
    retrace: Callable[[], None],
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that the settings choose, which every replica makes.

    `retrace` is called when the layers that are to be trained later have become trainable.
    """
    settings, chief = run.settings, run.cluster.is_chief
    callbacks: list[keras.callbacks.Callback] = []
    if frozen:

        def changed() -> None:
            retrace()
            if chief:
                progress.report("train", f"{len(model.trainable_weights)} weights are trained from now on")

        rate = settings.fine_tuning_learning_rate * (run.replicas if settings.scale_learning_rate else 1)
        callbacks.append(Unfreeze(frozen, settings.unfreeze_at_epoch, rate, changed))
    for reference in settings.callbacks:
        callbacks += load_callbacks(reference, run.scratch or run.dirs.model)
    if settings.early_stopping:
        callbacks.append(Stopping(settings.early_stopping, settings.early_stopping_patience))
    return [*callbacks, keras.callbacks.History()]


def chief_reports(run: DatasetRun, counters: Counters) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that show and record things; none on any replica but the chief."""
    settings = run.settings
    if not run.cluster.is_chief:
        return []
    run.dirs.make()
    callbacks = [
        HistoryFile(run.dirs.model, counters),
        Report(counters, settings.epochs, in_memory=run.feed("train").in_memory),
        Board(
            str(run.dirs.logs),
            write_graph=False,
            histogram_freq=settings.histograms,
            profile_batch=settings.profile_steps or 0,
        ),
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
            f"{setting}: {metric} is a number for each class; give the metric an average "
            '(F1Score(average="macro")), or name another one'
        )
