"""Optimizers: gradient accumulation, learning rates of a resumed run, and moving averages at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras.optimizers.schedules import LearningRateSchedule

from shardline.trainer.base.errors import SettingsError
from shardline.trainer.keras_compat.keras_internals import (
    inner_optimizers,
    moving_averages,
    own_learning_rate,
    updating_optimizers,
)


def accumulate_gradients(model: keras.Model, steps: int) -> None:
    """Sets the steps of an update in a compiled model that is not yet built, or has them already."""
    if steps == 1:
        return
    if model.optimizer is None:
        raise SettingsError("gradient_accumulation_steps needs a model that is compiled with an optimizer")
    inner = inner_optimizers(model.optimizer)
    if not inner:
        raise SettingsError("gradient_accumulation_steps needs a MultiOptimizer with an OptimizerMap")
    for optimizer in inner:
        own = optimizer.gradient_accumulation_steps
        if own and own != steps:
            raise SettingsError(
                f"gradient_accumulation_steps is {steps}, but the model's optimizer has its own {own}; set "
                "one of them"
            )
        if not own and optimizer.built:
            raise SettingsError(
                "gradient_accumulation_steps needs an optimizer that has not been built; build_model has "
                "built it"
            )
        optimizer.gradient_accumulation_steps = steps


def learning_rates(model: keras.Model) -> list[float | dict[str, Any]]:
    """Returns the learning rate of each of a model's optimizers: a number, or a schedule's configuration."""
    return [_describe(own_learning_rate(optimizer)) for optimizer in updating_optimizers(model)]


def _describe(rate: Any) -> float | dict[str, Any]:
    if isinstance(rate, LearningRateSchedule):
        try:
            serialized: dict[str, Any] = keras.saving.serialize_keras_object(rate)
        except NotImplementedError:  # a custom schedule without get_config
            serialized = {}
        return {"class_name": type(rate).__name__, "config": serialized.get("config", {})}
    if callable(rate):
        return {"class_name": getattr(rate, "__name__", type(rate).__name__), "config": {}}
    return float(str(np.float32(rate.numpy())))  # 0.001 as it was written


def apply_changed_rates(model: keras.Model, before: Sequence[Any], now: Sequence[Any]) -> None:
    """Sets changed learning rates of optimizers that were restored with their earlier ones."""
    for optimizer, old, new in zip(updating_optimizers(model), before, now, strict=False):
        if isinstance(new, float) and old != new:
            own_learning_rate(optimizer).assign(new)


def finalize(model: keras.Model) -> None:
    """Sets trained weights to their moving averages, as the end of `fit` does."""
    trained = {id(variable) for variable in model.trainable_variables}
    for optimizer in inner_optimizers(model.optimizer) if model.optimizer is not None else ():
        for variable, average in moving_averages(optimizer):
            if id(variable) in trained:
                variable.assign(average)
