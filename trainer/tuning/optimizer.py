"""The optimizers of a model, and the settings that reach into them."""

from __future__ import annotations

from collections.abc import Iterator

import keras
from keras.optimizers.schedules import LearningRateSchedule

from shardline.trainer.errors import SettingsError
from shardline.trainer.settings import TrainSettings
from shardline.trainer.tuning.learning_rate import ScaledWarmup


def innermost(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer that updates weights, inside any that only scales the loss."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def tune_optimizer(model: keras.Model, settings: TrainSettings, replicas: int) -> None:
    """Applies gradient accumulation and learning-rate scaling to a compiled model that is not yet built.

    Args:
        model: The model.
        settings: Of the run.
        replicas: By which the learning rate is scaled, where that is asked for.

    Raises:
        SettingsError: When the model's optimizer cannot take them.
    """
    wanted = list(_wanted(settings))
    if not wanted:
        return
    if model.optimizer is None:
        raise SettingsError(f"{wanted[0]} needs a model that is compiled with an optimizer")
    optimizer = innermost(model.optimizer)
    if optimizer.built:
        raise SettingsError(
            f"{wanted[0]} needs an optimizer that has not been built; build_model has built it"
        )
    if settings.gradient_accumulation_steps > 1:
        _accumulate(optimizer, settings.gradient_accumulation_steps)
    if settings.scale_learning_rate or settings.warmup_steps:
        factor = float(replicas) if settings.scale_learning_rate else 1.0
        # The constructor's own argument: a plain number has become a variable by now.
        rate = optimizer._learning_rate
        inner = rate if isinstance(rate, LearningRateSchedule) else float(rate.numpy())
        optimizer.learning_rate = ScaledWarmup(inner, factor, settings.warmup_steps)


def finalize(model: keras.Model) -> bool:
    """Gives a model the moving average of its weights, where its optimizer keeps one, as Keras' `fit` does.

    Returns:
        Whether its weights have changed.
    """
    if model.optimizer is None or not innermost(model.optimizer).use_ema:
        return False
    model.optimizer.finalize_variable_values(model.trainable_variables)
    return True


def _wanted(settings: TrainSettings) -> Iterator[str]:
    if settings.gradient_accumulation_steps > 1:
        yield "gradient_accumulation_steps"
    if settings.scale_learning_rate:
        yield "scale_learning_rate"
    if settings.warmup_steps:
        yield "warmup_steps"


def _accumulate(optimizer: keras.optimizers.Optimizer, steps: int) -> None:
    own = optimizer.gradient_accumulation_steps
    if own and own != steps:
        raise SettingsError(
            f"gradient_accumulation_steps is {steps}, but the model's optimizer has its own {own}; give one"
        )
    optimizer.gradient_accumulation_steps = steps
