"""A multilayer perceptron on the columns of a table, and the layer that standardizes its numbers."""

from __future__ import annotations

from typing import Any

import keras

from shardline.trainer.data.manifest import DatasetInfo
from shardline.trainer.errors import ModelError
from shardline.trainer.models.zoo import finish

# How much of the statistics a batch replaces once enough have been seen.
_RATE = 0.01
_EPSILON = 1e-6
# Standard deviations beyond which a value says no more than that it is extreme.
_LARGEST = 10.0


@keras.saving.register_keras_serializable("shardline")
class Standardization(keras.layers.Layer):  # type: ignore[misc]  # keras has no types
    """Subtracts each column's mean and divides by its standard deviation.

    Unlike BatchNormalization, as a table's raw columns need it: the first batches count in full, so that a
    short training does not end with statistics of half-way; the variance is taken around the mean, as in
    float32 the squares of a column such as a year say nothing of it; and both are the global batch's.
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


def build_model(
    dataset: DatasetInfo,
    learning_rate: float = 1e-3,
    label_smoothing: float = 0.0,
    units: int = 64,
    buckets: int = 1024,
    embedding: int = 8,
) -> keras.Model:
    """Numbers standardized, text hashed and embedded -> Dense relu, twice -> softmax.

    Args:
        dataset: Columns and number of classes. Whole numbers and floats are numbers, text is a category.
        learning_rate: Learning rate of Adam.
        label_smoothing: Share of each label that is spread evenly over all classes, in 0..1.
        units: Size of each hidden layer.
        buckets: Number of buckets into which the values of a text column are hashed.
        embedding: Numbers that stand for a bucket.
    """
    if not dataset.is_table:
        raise ModelError(
            "mlp takes a table, and the dataset has images; use mnist_cnn, resnet50 or keras:NAME"
        )
    inputs = {name: keras.Input((), name=name, dtype=column.dtype) for name, column in dataset.inputs.items()}
    parts, numbers = [], []
    for name, column in dataset.inputs.items():
        if column.dtype == "string":
            hashed = keras.layers.Hashing(buckets, name=f"{name}_hash")(inputs[name])
            parts.append(keras.layers.Embedding(buckets, embedding, name=f"{name}_embedding")(hashed))
        else:
            numbers.append(inputs[name])
    if numbers:
        parts.append(_numbers(numbers))
    features = keras.layers.Concatenate()(parts) if len(parts) > 1 else parts[0]
    for _ in range(2):
        features = keras.layers.Dense(units, activation="relu")(features)
    return finish("mlp", inputs, features, dataset, learning_rate, label_smoothing)


def _numbers(columns: list[Any]) -> Any:
    """Returns all number columns side by side, (batch, columns), each with mean 0 and variance 1."""
    floats = [keras.ops.expand_dims(keras.ops.cast(column, "float32"), -1) for column in columns]
    stacked = keras.ops.concatenate(floats, axis=-1) if len(floats) > 1 else floats[0]
    return Standardization(dtype="float32")(stacked)
