"""Given: the model that a program gives, or the function that builds it, with all its variables."""

from __future__ import annotations

from typing import Any, TypeAlias

import keras
import tensorflow as tf

from shardline.trainer import plugins
from shardline.trainer.cluster.strategy import check_model
from shardline.trainer.data.given import Batches
from shardline.trainer.errors import ModelError
from shardline.trainer.keras_internals import noting_compile
from shardline.trainer.models.build import create_variables
from shardline.trainer.optimizers import tune_optimizer
from shardline.trainer.process import Process
from shardline.trainer.settings import TrainSettings
from shardline.trainer.tensorflow_internals import is_seeded

BuildModel: TypeAlias = Any  # a keras.Model, or a function that returns one


def built(
    process: Process, build_model: BuildModel, settings: TrainSettings, **steps: Batches
) -> keras.Model:
    """Returns the model with all the variables of some steps, such as train_step, each with its batches.

    It has to be compiled for all but predict_step.

    Raises:
        ModelError: It is no model, or not compiled although it has to be, or was built for other devices.
    """
    compiled = "predict_step" not in steps
    if settings.deterministic:
        tf.config.experimental.enable_op_determinism()
    if not is_seeded():
        keras.utils.set_random_seed(settings.seed + 1)
    if process.is_alone and isinstance(build_model, keras.Model):
        strategy = build_model.distribute_strategy
    else:
        strategy = process.strategy
    with strategy.scope():
        model = _model(build_model, compiled=compiled)
    # Not in the scope, whose strategy a model that was built in none takes for its own.
    if not process.is_alone and model.distribute_strategy is not process.strategy:
        raise ModelError(
            "the model was built outside the strategy of this process; build it in "
            "shardline.strategy().scope(), or give the function that builds it"
        )
    with strategy.scope():
        check_model(process.strategy, model)
        if compiled:
            tune_optimizer(model, settings, process.replicas)
            create_variables(model, **{name: _part(one, process.replicas) for name, one in steps.items()})
        elif not model.built:
            model(keras.utils.unpack_x_y_sample_weight(steps["predict_step"].first)[0])
    return model


def _part(batches: Batches, replicas: int) -> Any:
    """Returns what one replica takes of the first batch, at least an example."""
    share = 1 if batches.is_own else replicas
    return tf.nest.map_structure(lambda one: one[: max(1, len(one) // share)], batches.first)


def _model(build_model: BuildModel, *, compiled: bool) -> keras.Model:
    model = build_model
    if not isinstance(model, keras.Model):
        if not callable(model):
            raise ModelError(f"build_model is {type(model).__name__}, not a function or a keras.Model")
        with noting_compile(), plugins.calling("build_model failed", ModelError):
            model = model()
    if not isinstance(model, keras.Model):
        raise ModelError(f"build_model gives {type(model).__name__}, not a keras.Model")
    if compiled and not model.compiled:
        raise ModelError("build_model gives a model that is not compiled; call model.compile(...)")
    return model
