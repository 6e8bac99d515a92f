"""Transformation: a user's own function from a batch of examples to what a model takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from shardline.trainer import plugins
from shardline.trainer.errors import SettingsError

#: (x, y) of a batch -> x, (x, y) or (x, y, sample_weight), where each may be a dict or a tuple of tensors.
Transform = Callable[[Any, tf.Tensor], Any]


def load_transform(reference: str) -> Transform:
    """Finds a transformation.

    Args:
        reference: `pkg.module:function`.

    Raises:
        SettingsError: When there is no such function.
    """
    function = plugins.load(reference, "transform", SettingsError)
    if not callable(function):
        raise SettingsError(f"transform {reference!r} is not a function but {type(function).__name__}")
    checked: Transform = tf.function(function)  # AutoGraph converts it; what calls it is not converted

    def transform(x: Any, y: tf.Tensor) -> Any:
        try:
            return checked(x, y)
        except Exception as error:  # a user's code runs here and may raise anything
            raise SettingsError(f"transform {reference!r} failed: {plugins.describe(error)}") from error

    return transform
