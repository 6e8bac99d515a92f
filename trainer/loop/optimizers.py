"""Optimizers: gradient accumulation, learning-rate scaling with warm-up, and fine-tuning of frozen layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras.optimizers.schedules import LearningRateSchedule

from shardline.trainer.base.errors import SettingsError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.keras_compat.keras_internals import (
    all_layers,
    inner_optimizers,
    moving_averages,
    own_learning_rate,
    updating_optimizers,
)


@keras.saving.register_keras_serializable("shardline")
class ScaledWarmup(LearningRateSchedule):  # type: ignore[misc]  # keras has no types
    """A learning rate, or schedule, times a factor, reached linearly over the first updates.

    Goyal et al., "Accurate, Large Minibatch SGD" (arXiv:1706.02677), section 2.
    """

    def __init__(
        self, learning_rate: float | LearningRateSchedule, factor: float = 1.0, warmup_steps: int = 0
    ):
        super().__init__()
        self.learning_rate = learning_rate
        self.factor = factor
        self.warmup_steps = warmup_steps

    def __call__(self, step: Any) -> Any:
        """Returns the learning rate of an update, counted from 0."""
        inner = self.learning_rate
        rate = inner(step) if callable(inner) else inner
        done = keras.ops.cast(step, "float32") + 1.0
        return rate * self.factor * keras.ops.minimum(done / max(1, self.warmup_steps), 1.0)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {
            "learning_rate": keras.saving.serialize_keras_object(self.learning_rate),
            "factor": self.factor,
            "warmup_steps": self.warmup_steps,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ScaledWarmup:
        """Returns the schedule of a configuration."""
        rate = keras.saving.deserialize_keras_object(config["learning_rate"])
        return cls(**{**config, "learning_rate": rate})


def tune_optimizer(model: keras.Model, settings: TrainSettings, replicas: int) -> None:
    """Applies gradient accumulation and learning-rate scaling to a compiled model that is not yet built.

    A model that already has them, because it is trained further, is not changed.
    """
    steps = settings.gradient_accumulation_steps
    factor = float(replicas) if settings.scale_learning_rate else 1.0
    tuning = {
        "gradient_accumulation_steps": steps > 1,
        "scale_learning_rate": settings.scale_learning_rate,
        "warmup_steps": settings.warmup_steps > 0,
    }
    using = {
        **tuning,
        "averaging_steps": settings.averaging_steps > 0,
        "fine_tuning_learning_rate": settings.fine_tuning_learning_rate > 0,
    }
    if model.optimizer is None and (names := [name for name, is_set in using.items() if is_set]):
        raise SettingsError(f"{names[0]} needs a model that is compiled with an optimizer")
    if not (names := [name for name, is_set in tuning.items() if is_set]):
        return
    inner = inner_optimizers(model.optimizer)
    if inner and all(_is_tuned(optimizer, settings, factor) for optimizer in inner):
        return
    if any(optimizer.built for optimizer in (model.optimizer, *inner)):
        raise SettingsError(
            f"{names[0]} needs an optimizer that has not been built; build_model has built it"
        )
    if not inner:
        raise SettingsError(f"{names[0]} needs a MultiOptimizer with an OptimizerMap")
    for optimizer in inner:
        own = optimizer.gradient_accumulation_steps
        if steps > 1 and own and own != steps:
            raise SettingsError(
                f"gradient_accumulation_steps is {steps}, but the model's optimizer has its own {own}; set "
                "one of them"
            )
        if steps > 1:
            optimizer.gradient_accumulation_steps = steps
        if rated := [name for name in names if name != "gradient_accumulation_steps"]:
            rate = own_learning_rate(optimizer)
            if not isinstance(rate, keras.Variable | LearningRateSchedule):
                raise SettingsError(
                    f"{rated[0]} needs a learning rate that is a number or a LearningRateSchedule; "
                    f"{type(optimizer).__name__} has a function"
                )
            rate = float(rate.numpy()) if isinstance(rate, keras.Variable) else rate
            optimizer.learning_rate = ScaledWarmup(rate, factor, settings.warmup_steps)


def _is_tuned(optimizer: keras.Optimizer, settings: TrainSettings, factor: float) -> bool:
    """Whether a built optimizer already has this accumulation and learning rate."""
    steps, rate = settings.gradient_accumulation_steps, own_learning_rate(optimizer)
    accumulates = steps == 1 or optimizer.gradient_accumulation_steps == steps
    wanted, rated = (factor, settings.warmup_steps), settings.scale_learning_rate or settings.warmup_steps
    has_rate = isinstance(rate, ScaledWarmup) and (rate.factor, rate.warmup_steps) == wanted
    return bool(optimizer.built) and accumulates and (has_rate or not rated)


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


class FrozenLayers:
    """Layers that a model function has frozen, to be trained from some epoch on."""

    def __init__(self, model: keras.Model):
        self._layers = [layer for layer in all_layers(model) if not layer.trainable]
        if not any(layer.weights or not layer.built for layer in self._layers):
            raise SettingsError(
                "unfreeze_at_epoch is set, but the model has no frozen layers: load weights, or set "
                "trainable=False on the layers that are to be trained later"
            )

    @contextlib.contextmanager
    def temporarily_trainable(self) -> Iterator[None]:
        """Makes the layers trainable within the context, to build the optimizer for their weights too."""
        self.unfreeze()
        try:
            yield
        finally:
            for layer in self._layers:
                layer.trainable = False

    def unfreeze(self) -> None:
        """Makes the layers trainable, all but BatchNormalization (keras.io/guides/transfer_learning)."""
        for layer in self._layers:
            layer.trainable = True
        for layer in self._layers:
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.trainable = False


class Unfreeze(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Unfreezes layers at the start of an epoch, from 1, and calls `changed`. For every replica."""

    def __init__(self, frozen: FrozenLayers, epoch: int, learning_rate: float, changed: Callable[[], None]):
        super().__init__()
        self._frozen: FrozenLayers | None = frozen
        self._epoch = epoch
        self._learning_rate = learning_rate
        self._changed = changed

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Unfreezes in the chosen epoch, or in the later one in which the run has resumed."""
        if self._frozen is None or epoch + 1 < self._epoch:
            return
        self._frozen.unfreeze()
        self._frozen = None
        for optimizer in inner_optimizers(self.model.optimizer) if self._learning_rate else ():
            if not isinstance(own_learning_rate(optimizer), keras.Variable):
                # Keras does not allow a number in place of a schedule or a function.
                optimizer.learning_rate = ScaledWarmup(self._learning_rate)
            elif epoch + 1 == self._epoch:  # only once: later it is restored from a checkpoint
                optimizer.learning_rate = self._learning_rate
        self._changed()
