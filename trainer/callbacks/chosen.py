"""The callbacks of a run, as its settings ask for them."""

from __future__ import annotations

import os
from collections.abc import Callable

import keras

from shardline.trainer import progress
from shardline.trainer.assembly import Assembly
from shardline.trainer.callbacks.history import HistoryFile
from shardline.trainer.callbacks.plugin import load_callbacks
from shardline.trainer.callbacks.profile import Profile
from shardline.trainer.callbacks.report import Meter, Report
from shardline.trainer.callbacks.stopping import Stopping
from shardline.trainer.callbacks.tuning_metric import TuningMetric, check_metric
from shardline.trainer.run import Run
from shardline.trainer.tuning.fine_tuning import Unfreeze


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
