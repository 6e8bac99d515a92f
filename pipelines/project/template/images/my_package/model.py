"""The model: any function that returns a compiled Keras 3 model."""

from __future__ import annotations

import keras
from shardline import DatasetInfo


def build_model(dataset: DatasetInfo, learning_rate: float = 3e-3, filters: int = 16) -> keras.Model:
    """Returns a small convolutional network with batch normalization over the global batch.

    Args:
        dataset: What is known about the data: input_shape, num_classes, class_names, features, records.
        learning_rate: Learning rate of Adam.
        filters: Filters of the first convolution; a run's parameter hparams sets such arguments.
    """
    model = keras.Sequential(
        [
            keras.Input(dataset.input_shape, dtype="uint8"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(filters, 3, use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9, synchronized=True),
            keras.layers.Activation("relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(2 * filters, 3, activation="relu"),
            keras.layers.GlobalMaxPooling2D(),
            keras.layers.Dense(dataset.num_classes, activation="softmax"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model
