"""The model: any function that returns a compiled Keras 3 model."""

from __future__ import annotations

import keras
from shardline import DatasetInfo, encode_columns, make_output


def build_model(
    dataset: DatasetInfo, learning_rate: float = 3e-3, units: int = 64, dropout: float = 0.5
) -> keras.Model:
    """Returns a linear model of all columns, numbers normalized and words embedded, next to a hidden layer.

    Dropout and weight decay keep it from learning a small table by heart.

    Args:
        dataset: What is known about the data: inputs, label, features, records.
        learning_rate: Learning rate of Adam.
        units: Units of the hidden layer; a run's parameter hparams sets such arguments.
        dropout: Share of these units that each step leaves out.
    """
    columns, encoded = encode_columns(dataset)
    linear = keras.layers.concatenate(encoded)
    hidden = keras.layers.Dropout(dropout)(keras.layers.Dense(units, activation="relu")(linear))
    output, loss, metric = make_output(dataset, keras.layers.concatenate([linear, hidden]))
    model = keras.Model(columns, output)
    optimizer = keras.optimizers.AdamW(learning_rate, weight_decay=0.1)
    model.compile(optimizer=optimizer, loss=loss, metrics=[metric])
    return model
