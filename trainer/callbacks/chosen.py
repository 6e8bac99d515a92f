"""The callbacks of a run, as its settings ask for them.

Callbacks that a user brings: `pkg.module:make`.

TensorBoard's profile of some steps.

Early stopping on a validation metric.

The metric of a hyperparameter tuning job, reported as Vertex AI reads it.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from shardline.trainer import plugins, progress
from shardline.trainer.assembly import Assembly
from shardline.trainer.callbacks.report import HistoryFile, Meter, Report
from shardline.trainer.errors import SettingsError
from shardline.trainer.measurements import Measurements
from shardline.trainer.optimizers import Unfreeze
from shardline.trainer.run import Run
from shardline.trainer.step import Logs


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

    def __init__(self, directory: Path, meter: Meter, first: int, last: int):
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

    def __init__(self, metric: str, meter: Meter, environ: Mapping[str, str]):
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
    run: Run, assembly: Assembly, meter: Meter, retrace: Callable[[], None]
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


def chief_callbacks(run: Run, meter: Meter) -> list[keras.callbacks.Callback]:
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
