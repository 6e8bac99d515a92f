"""The learning rate of larger global batches: linear scaling with warm-up."""

from __future__ import annotations

from typing import Any

import keras


@keras.saving.register_keras_serializable("shardline")
class ScaledWarmup(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]  # keras has no types
    """A learning rate times a factor, reached linearly over the first updates.

    Goyal et al., "Accurate, Large Minibatch SGD" (arXiv:1706.02677), section 2: k times the batch takes k
    times the learning rate, after a gradual warm-up.
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule,
        factor: float = 1.0,
        warmup_steps: int = 0,
    ):
        """Wraps a learning rate.

        Args:
            learning_rate: A number or another schedule.
            factor: What it is multiplied by.
            warmup_steps: Updates until the full value is reached; 0 starts with it.
        """
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
