"""Losses that Keras does not have."""

from __future__ import annotations

from typing import Any

import keras


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
