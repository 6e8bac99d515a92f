"""The convolutional network of TensorFlow's multi-worker training tutorial."""

from __future__ import annotations

import keras

from trainer.data.manifest import DatasetInfo
from trainer.errors import ModelError

# A 3x3 convolution followed by 2x2 pooling needs this many pixels to leave one.
_SMALLEST = 4


def build_model(dataset: DatasetInfo, learning_rate: float = 2e-3) -> keras.Model:
    """Conv2D 32 -> pooling -> flatten -> Dense 64 -> Dense classes.

    Args:
        dataset: Shape of the images and number of classes.
        learning_rate: Of Adam.

    Raises:
        ModelError: When the images are too small.
    """
    if min(dataset.input_shape[:2]) < _SMALLEST:
        raise ModelError(f"mnist_cnn needs images of at least {_SMALLEST} pixels, got {dataset.input_shape}")
    model = keras.Sequential(
        [
            keras.Input(dataset.input_shape, dtype="uint8"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(dataset.num_classes, activation="softmax"),
        ],
        name="mnist_cnn",
    )
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model
