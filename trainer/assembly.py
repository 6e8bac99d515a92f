"""From settings to a model that is built, in the strategy's scope, and ready for its first step.

The loss of each output of a model as an exact mean over the examples.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from shardline.trainer.cluster import strategy as strategies
from shardline.trainer.data.pipeline import Feed
from shardline.trainer.models.build import build, create_variables
from shardline.trainer.optimizers import FrozenLayers, tune_optimizer
from shardline.trainer.run import Run
from shardline.trainer.saving import warm_start


def weigh_output_losses(model: keras.Model) -> None:
    """Makes the metrics of each output's loss count batches by their examples.

    Keras weighs them by the static size of the batch, which is not known where the last batch of a split may
    be smaller, and then averages over batches (keras/src/trainers/compile_utils.py, `CompileLoss.call`).
    Only these objects are changed, neither their class nor what is saved.

    Args:
        model: Compiled and built.
    """
    losses = model._compile_loss
    if losses is None or not losses.metrics:
        return
    batch = threading.local()
    call = losses.call

    def counted_call(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        batch.examples = tf.shape(tf.nest.flatten(y_pred)[0])[0]
        return call(y_true, y_pred, sample_weight)

    losses.call = counted_call
    for metric in losses.metrics:
        if metric is not None:
            _weigh(metric, batch)


def _weigh(metric: keras.metrics.Metric, batch: threading.local) -> None:
    update = metric.update_state

    def update_state(value: Any, sample_weight: Any = None) -> Any:
        return update(value, sample_weight=batch.examples if sample_weight is None else sample_weight)

    metric.update_state = update_state


_POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}


@dataclass(frozen=True)
class Assembly:
    """A model that is ready to train.

    Attributes:
        model: Compiled and built; its variables belong to the strategy.
        frozen: Its frozen layers, where they are to be trained later.
    """

    model: keras.Model
    frozen: FrozenLayers | None = None


def assemble(run: Run, feed: Feed, *, evaluate_only: bool = False) -> Assembly:
    """Builds the model of a run.

    Args:
        run: The run.
        feed: Data of the shapes that the model will take.
        evaluate_only: Whether weights will be restored and nothing is trained.

    Raises:
        ModelError: When the model function or what it returns cannot be used.
        SettingsError: When a setting does not fit the model.
    """
    settings = run.settings
    # One up: tf.data cannot compare a global seed of 0 with the tensor that seeds each epoch's shuffle.
    keras.utils.set_random_seed(settings.seed + 1)
    keras.config.set_dtype_policy(_POLICIES[settings.precision])
    with run.strategy.scope():
        model = build(
            settings.model,
            run.manifest.info(),
            settings.model_arguments,
            transformed=bool(settings.transform),
        )
        strategies.check_model(run.strategy, model)
        frozen = None
        if not evaluate_only:
            tune_optimizer(model, settings, run.replicas)
            frozen = FrozenLayers(model) if settings.unfreeze_at_epoch else None
        with frozen.thawed() if frozen else contextlib.nullcontext():
            create_variables(model, feed.element_spec)
        weigh_output_losses(model)
        if settings.initial_model and not evaluate_only:
            warm_start(model, settings.initial_model)
    return Assembly(model, frozen)
