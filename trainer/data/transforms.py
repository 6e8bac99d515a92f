"""Augmentation: a user's own function that changes training examples at random, the same on any cluster.

Transformation: a user's own function from a batch of examples to what a model takes.

Nested structures of tensors in words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from shardline.trainer import plugins
from shardline.trainer.data.decode import Inputs
from shardline.trainer.data.manifest import DatasetInfo
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


def describe_structure(structure: Any) -> str:
    """Returns a nested structure of tensors, or of their specifications, as "(uint8 (9, 9, 3), int64 ())"."""

    def words(item: Any) -> str:
        return f"{item.dtype.name} {tuple(item.shape)}" if hasattr(item, "dtype") else type(item).__name__

    return str(tf.nest.map_structure(words, structure)).replace("'", "")


#: (x, y, seed) -> (x, y) of one example: x uint8 (height, width, channels), or for a table a dict of scalars;
#: y a scalar int64; seed int64 (2,), for TensorFlow's stateless random functions.
Augmentation = Callable[[Any, tf.Tensor, tf.Tensor], tuple[Any, tf.Tensor]]


def load_augmentation(reference: str, dataset: DatasetInfo) -> Augmentation:
    """Finds an augmentation and tries it on an example of the dataset's shape, without computing anything.

    Args:
        reference: `pkg.module:function`.
        dataset: What the examples look like.

    Raises:
        SettingsError: When there is no such function, it fails, or it returns something else than an example
            of the same shape and dtype.
    """
    function = plugins.load(reference, "augmentation", SettingsError)
    if not callable(function):
        raise SettingsError(f"augmentation {reference!r} is not a function but {type(function).__name__}")
    wanted = (_example_spec(dataset), tf.TensorSpec((), tf.int64))
    try:
        compiled = tf.function(function)  # AutoGraph converts it; what calls it is not converted
        traced = compiled.get_concrete_function(*wanted, tf.TensorSpec((2,), tf.int64))
    except Exception as error:  # a user's code runs here and may raise anything
        text = " ".join(f"{type(error).__name__}: {error}".split())  # names file and line of user code itself
        raise SettingsError(
            f"augmentation {reference!r} failed on an example (x, y, seed): {text}"
        ) from error
    found = traced.structured_outputs
    if not _agree(found, wanted):
        raise SettingsError(
            f"augmentation {reference!r} returned {describe_structure(found)}; it must return (x, y) "
            f"as it got them, {describe_structure(wanted)}"
        )
    checked: Augmentation = compiled
    return checked


def augment_batch(
    augmentation: Augmentation, x: Inputs, y: tf.Tensor, seeds: tf.Tensor
) -> tuple[Inputs, tf.Tensor]:
    """Applies an augmentation to each example of a batch.

    Args:
        augmentation: The function.
        x: Inputs, (batch, ...).
        y: int64 (batch,).
        seeds: int64 (batch, 2).
    """
    signature = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), (x, y))
    x, y = tf.map_fn(lambda one: augmentation(*one), (x, y, seeds), fn_output_signature=signature)
    return x, y


def _example_spec(dataset: DatasetInfo) -> Any:
    if dataset.is_table:
        return {name: tf.TensorSpec((), feature.dtype) for name, feature in dataset.inputs.items()}
    return tf.TensorSpec(dataset.input_shape, tf.uint8)


def _agree(found: Any, wanted: Any) -> bool:
    try:
        tf.nest.assert_same_structure(found, wanted, check_types=False)
    except (ValueError, TypeError):
        return False
    pairs = zip(tf.nest.flatten(found), tf.nest.flatten(wanted), strict=True)
    return all(a.dtype == b.dtype and a.shape.is_compatible_with(b.shape) for a, b in pairs)
