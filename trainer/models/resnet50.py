"""Transfer learning with ResNet50, as in the Vertex AI multi-worker training codelab."""

from __future__ import annotations

import keras

from shardline.trainer.data.manifest import DatasetInfo
from shardline.trainer.models.application import extract_features
from shardline.trainer.models.classifier import check_images, classify

# What keras.applications.ResNet50 accepts without its top.
_SMALLEST = 32


def build_model(
    dataset: DatasetInfo, learning_rate: float = 1e-4, weights: str = "none", label_smoothing: float = 0.0
) -> keras.Model:
    """ResNet50 without its top -> global average pooling -> Dense 1016 relu -> softmax.

    Args:
        dataset: Shape of the images (grey images are repeated over three channels) and number of classes.
        learning_rate: Of Adam.
        weights: "imagenet" (Keras downloads them), the path of a weights file, or "none". Loaded weights
            are frozen and only the head is trained; with "none" everything is trained.
        label_smoothing: Share of each label that is spread evenly over all classes, in 0..1.

    Raises:
        ModelError: When the images are too small or the weights cannot be had.
    """
    check_images("resnet50", dataset, _SMALLEST)
    images, features = extract_features("resnet50", keras.applications.ResNet50, dataset, weights)
    features = keras.layers.Dense(1016, activation="relu")(features)
    return classify(
        "resnet50_transfer",
        images,
        features,
        dataset.num_classes,
        learning_rate=learning_rate,
        label_smoothing=label_smoothing,
    )
