"""What the built-in models have in common: what they take, how they end, and what they are trained with.

Losses that Keras does not have.
"""

from __future__ import annotations

from typing import Any

import keras

from shardline.trainer.data.manifest import DatasetInfo
from shardline.trainer.errors import ModelError


@keras.saving.register_keras_serializable("shardline")
class SmoothedCrossentropy(keras.losses.Loss):  # type: ignore[misc]  # keras has no types
    """Crossentropy of whole-number labels, smoothed; Keras smooths one-hot labels alone."""

    def __init__(self, label_smoothing: float, name: str = "smoothed_crossentropy", **kwargs: Any):
        """Takes the share of each label, in 0..1, that is spread evenly over all classes."""
        super().__init__(name=name, **kwargs)
        self.label_smoothing = label_smoothing

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the loss of each example: y_true (batch,), y_pred probabilities (batch, classes)."""
        labels = keras.ops.one_hot(keras.ops.cast(y_true, "int32"), y_pred.shape[-1], dtype=y_pred.dtype)
        return keras.losses.categorical_crossentropy(labels, y_pred, label_smoothing=self.label_smoothing)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {**super().get_config(), "label_smoothing": self.label_smoothing}


def check_images(name: str, dataset: DatasetInfo, smallest: int = 1) -> None:
    """Refuses a dataset that a model of images cannot take.

    Args:
        name: Of the model.
        dataset: The dataset.
        smallest: Pixels that an image must have a side.

    Raises:
        ModelError: When the dataset is a table, or its images are too small.
    """
    if dataset.is_table:
        raise ModelError(f"{name} takes images, and the dataset is a table; use mlp or a model of your own")
    if min(dataset.input_shape[:2]) < smallest:
        raise ModelError(
            f"{name} needs images of at least {smallest} pixels a side, got {dataset.input_shape}; "
            "preprocess with image_size"
        )


def classify(
    name: str,
    inputs: keras.KerasTensor | dict[str, keras.KerasTensor],
    features: keras.KerasTensor,
    num_classes: int,
    *,
    learning_rate: float,
    label_smoothing: float,
) -> keras.Model:
    """Ends a model with a softmax over the classes and compiles it with Adam, crossentropy and accuracy.

    Args:
        name: Of the model.
        inputs: Its inputs.
        features: Its last hidden layer, (batch, units).
        num_classes: Number of classes.
        learning_rate: Of Adam.
        label_smoothing: Share of each label that is spread evenly over all classes, in 0..1.
    """
    # In float32 whatever the precision of the rest: the loss takes the logarithm of small probabilities.
    classes = keras.layers.Dense(num_classes, activation="softmax", dtype="float32")(features)
    model = keras.Model(inputs, classes, name=name)
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss=SmoothedCrossentropy(label_smoothing) if label_smoothing else "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model
