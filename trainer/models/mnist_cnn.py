"""The convolutional network of TensorFlow's multi-worker training tutorial."""

from __future__ import annotations

import keras

from shardline.trainer.data.manifest import DatasetInfo
from shardline.trainer.models.classifier import check_images, classify

# A 3x3 convolution followed by 2x2 pooling needs this many pixels to leave one.
_SMALLEST = 4


def build_model(
    dataset: DatasetInfo, learning_rate: float = 2e-3, label_smoothing: float = 0.0
) -> keras.Model:
    """Conv2D 32 -> pooling -> flatten -> Dense 64 -> Dense classes.

    Args:
        dataset: Shape of the images and number of classes.
        learning_rate: Of Adam.
        label_smoothing: Share of each label that is spread evenly over all classes, in 0..1.

    Raises:
        ModelError: When the images are too small.
    """
    check_images("mnist_cnn", dataset, _SMALLEST)
    images = keras.Input(dataset.input_shape, dtype="uint8")
    features = keras.layers.Rescaling(1 / 255)(images)
    for layer in (
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
    ):
        features = layer(features)
    return classify(
        "mnist_cnn",
        images,
        features,
        dataset.num_classes,
        learning_rate=learning_rate,
        label_smoothing=label_smoothing,
    )
