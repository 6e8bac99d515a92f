"""The model: any function that returns a compiled Keras 3 model."""

from __future__ import annotations

import keras
from shardline import DatasetInfo, encode_columns, make_output


def build_model(dataset: DatasetInfo, learning_rate: float = 3e-3, units: int = 32) -> keras.Model:
    """Returns a network over all columns: numbers normalized, words embedded.

    Args:
        dataset: What is known about the data: inputs, label, features, records.
        learning_rate: Learning rate of Adam.
        units: Units of the hidden layer; a run's parameter hparams sets such arguments.
    """
    columns, encoded = encode_columns(dataset)
    features = keras.layers.Dense(units, activation="relu")(keras.layers.concatenate(encoded))
    output, loss, metric = make_output(dataset, features)
    model = keras.Model(columns, output)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate), loss=loss, metrics=[metric])
    return model
