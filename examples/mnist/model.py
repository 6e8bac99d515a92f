"""A convolutional network that reads MNIST's test digits to more than 99 %."""

from __future__ import annotations

import keras

from shardline import DatasetInfo


def build_model(dataset: DatasetInfo, learning_rate: float = 2e-3, updates: int = 4000) -> keras.Model:
    """Two blocks of convolution, BatchNormalization and pooling; a hidden layer with dropout.

    Args:
        dataset: Shape of the images and number of classes.
        learning_rate: Of Adam, at the start ...
        updates: ... from where it falls to nothing over so many updates.
    """
    model = keras.Sequential(
        [
            keras.Input(dataset.input_shape, dtype="uint8"),
            keras.layers.Rescaling(1 / 255),
            *_block(32),
            *_block(64),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.4),
            keras.layers.Dense(dataset.num_classes, activation="softmax"),
        ]
    )
    schedule = keras.optimizers.schedules.CosineDecay(learning_rate, updates)
    model.compile(keras.optimizers.Adam(schedule), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def _block(filters: int) -> list[keras.Layer]:
    return [
        keras.layers.Conv2D(filters, 3, padding="same", use_bias=False),
        keras.layers.BatchNormalization(synchronized=True),
        keras.layers.ReLU(),
        keras.layers.MaxPooling2D(),
    ]
