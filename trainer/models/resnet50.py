"""Transfer learning with ResNet50, as in the Vertex AI multi-worker training codelab."""

from __future__ import annotations

from pathlib import Path

import keras

from trainer.data.manifest import DatasetInfo
from trainer.errors import ModelError

# The smallest image that keras.applications.ResNet50 accepts without its top.
_SMALLEST = 32
# Mean of ImageNet's training images, in the BGR order that ResNet50's published weights expect.
_IMAGENET_MEAN_BGR = (103.939, 116.779, 123.68)


def build_model(dataset: DatasetInfo, learning_rate: float = 1e-4, weights: str = "none") -> keras.Model:
    """ResNet50 without its top -> global average pooling -> Dense 1016 relu -> softmax.

    Args:
        dataset: Shape of the images (grey images are repeated over three channels) and number of classes.
        learning_rate: Of Adam.
        weights: "imagenet" (Keras downloads them), the path of a weights file, or "none". Loaded weights
            are frozen and only the head is trained; with "none" everything is trained.

    Raises:
        ModelError: When the images are too small or the weights cannot be had.
    """
    if min(dataset.input_shape[:2]) < _SMALLEST:
        raise ModelError(
            f"resnet50 needs at least {_SMALLEST} pixels a side, got {dataset.input_shape}; give image_size"
        )
    images = keras.Input(dataset.input_shape, dtype="uint8")
    pixels = keras.layers.Rescaling(1.0)(images)
    if dataset.input_shape[-1] == 1:
        pixels = keras.layers.Concatenate()([pixels, pixels, pixels])
    # What keras.applications.resnet50.preprocess_input does, as layers that are saved with the model.
    pixels = keras.layers.Normalization(mean=_IMAGENET_MEAN_BGR, variance=(1.0, 1.0, 1.0))(pixels[..., ::-1])
    base = _base(weights)
    head = keras.layers.GlobalAveragePooling2D()(base(pixels))
    head = keras.layers.Dense(1016, activation="relu")(head)
    classes = keras.layers.Dense(dataset.num_classes, activation="softmax")(head)
    model = keras.Model(images, classes, name="resnet50_transfer")
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def _base(weights: str) -> keras.Model:
    if weights == "none":
        return keras.applications.ResNet50(weights=None, include_top=False)
    if weights != "imagenet" and not Path(weights).is_file():
        raise ModelError(f"resnet50: no weights file {weights!r}; give imagenet, a path, or none")
    try:
        base = keras.applications.ResNet50(weights=weights, include_top=False)
    except Exception as error:  # Keras raises what its downloader and its file formats raise
        raise ModelError(
            f"resnet50: cannot load weights {weights!r}: {error}; imagenet needs network access, else give "
            "the path of a .weights.h5 file of ResNet50 without its top"
        ) from error
    base.trainable = False
    return base
