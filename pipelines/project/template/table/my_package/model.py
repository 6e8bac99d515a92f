"""The model: any function that returns a compiled Keras 3 model."""

from __future__ import annotations

import keras
from shardline import DatasetInfo


def build_model(dataset: DatasetInfo, learning_rate: float = 3e-3, units: int = 32) -> keras.Model:
    """Returns a network over all columns: numbers normalized, words hashed.

    Args:
        dataset: What is known about the data: inputs, num_classes, class_names, features, records.
        learning_rate: Learning rate of Adam.
        units: Units of the hidden layer; a run's parameter hparams sets such arguments.
    """
    columns = {
        name: keras.Input(column.shape, name=name, dtype=column.dtype)
        for name, column in dataset.inputs.items()
    }
    numbers, words = [], []
    for name, column in columns.items():
        values = column if column.shape[1:] else keras.ops.expand_dims(column, -1)
        if column.dtype == "string":
            words.append(keras.layers.Hashing(32, output_mode="multi_hot", name=f"{name}_hash")(values))
        else:
            numbers.append(keras.ops.cast(values, "float32"))
    normalize = keras.layers.BatchNormalization(momentum=0.9, synchronized=True)
    hidden = keras.layers.Concatenate()([normalize(keras.layers.Concatenate()(numbers)), *words])
    hidden = keras.layers.Dense(units, activation="relu")(hidden)
    model = keras.Model(columns, keras.layers.Dense(dataset.num_classes, activation="softmax")(hidden))
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model
