"""A multilayer perceptron on the columns of a table."""

from __future__ import annotations

from typing import Any

import keras

from shardline.trainer.data.manifest import DatasetInfo, Feature
from shardline.trainer.errors import ModelError
from shardline.trainer.models.classifier import classify
from shardline.trainer.models.standardization import Standardization


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
        learning_rate: Of Adam.
        label_smoothing: Share of each label that is spread evenly over all classes, in 0..1.
        units: Of each hidden layer.
        buckets: Into which the values of a text column are hashed.
        embedding: Numbers that stand for a bucket.

    Raises:
        ModelError: When the dataset is no table.
    """
    if not dataset.is_table:
        raise ModelError(
            "mlp takes a table, and the dataset has images; use mnist_cnn, resnet50 or keras:NAME"
        )
    inputs = {name: keras.Input((), name=name, dtype=column.dtype) for name, column in dataset.inputs.items()}
    parts = [
        _category(inputs[column.name], column, buckets, embedding)
        for column in dataset.inputs.values()
        if column.dtype == "string"
    ]
    if numbers := [inputs[column.name] for column in dataset.inputs.values() if column.dtype != "string"]:
        parts.append(_numbers(numbers))
    features = keras.layers.Concatenate()(parts) if len(parts) > 1 else parts[0]
    for _ in range(2):
        features = keras.layers.Dense(units, activation="relu")(features)
    return classify(
        "mlp",
        inputs,
        features,
        dataset.num_classes,
        learning_rate=learning_rate,
        label_smoothing=label_smoothing,
    )


def _category(values: Any, column: Feature, buckets: int, embedding: int) -> Any:
    hashed = keras.layers.Hashing(buckets, name=f"{column.name}_hash")(values)
    return keras.layers.Embedding(buckets, embedding, name=f"{column.name}_embedding")(hashed)


def _numbers(columns: list[Any]) -> Any:
    """Returns all number columns side by side, (batch, columns), each with mean 0 and variance 1."""
    floats = [keras.ops.expand_dims(keras.ops.cast(column, "float32"), -1) for column in columns]
    stacked = keras.ops.concatenate(floats, axis=-1) if len(floats) > 1 else floats[0]
    return Standardization(dtype="float32")(stacked)
