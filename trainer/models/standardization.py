"""Numbers of any scale brought to mean 0 and variance 1, by statistics that are learnt while training."""

from __future__ import annotations

from typing import Any

import keras

# How much of the statistics a batch replaces once enough have been seen.
_RATE = 0.01
_EPSILON = 1e-6
# Standard deviations beyond which a value says no more than that it is extreme.
_LARGEST = 10.0


@keras.saving.register_keras_serializable("shardline")
class Standardization(keras.layers.Layer):  # type: ignore[misc]  # keras has no types
    """Subtracts each column's mean and divides by its standard deviation.

    What BatchNormalization does, apart from three things that matter for a table's raw columns: the first
    batches count in full, so that a short training does not end with statistics of half-way; the variance is
    taken around the mean, as in float32 the squares of a column such as a year say nothing of it; and both
    are those of the global batch, so that all replicas agree.
    """

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Creates the statistics of (batch, columns)."""
        columns = (input_shape[-1],)
        self.mean = self.add_weight(columns, "zeros", trainable=False, name="mean")
        self.variance = self.add_weight(columns, "ones", trainable=False, name="variance")
        self.batches = self.add_weight((), "zeros", trainable=False, name="batches")

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Standardizes float32 (batch, columns); in training also learns its statistics."""
        if training:
            self._learn(inputs)
        standardized = (inputs - self.mean) / keras.ops.sqrt(self.variance + _EPSILON)
        return keras.ops.clip(standardized, -_LARGEST, _LARGEST)

    def _learn(self, inputs: Any) -> None:
        centred = inputs - self.mean
        shift = _mean(centred)
        variance = _mean(keras.ops.square(centred - shift))
        self.batches.assign(self.batches + 1)
        rate = keras.ops.maximum(1 / self.batches, _RATE)
        # Of two groups together: the mean of their variances and what their means differ by.
        self.variance.assign((1 - rate) * (self.variance + rate * shift**2) + rate * variance)
        self.mean.assign(self.mean + rate * shift)


def _mean(values: Any) -> Any:
    """Returns the mean of each column over the batches of all replicas."""
    return keras.ops.moments(values, axes=[0], synchronized=True)[0]
