"""Arrays: those that a program gives, checked, and the batches of a sequence that Keras takes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shardline.trainer import plugins
from shardline.trainer.errors import SettingsError


def checked_arrays(data: Any, name: str) -> Any:
    """Returns arrays of as many examples, as NumPy has them, with numbers in the precision of Keras."""
    if data is None:
        raise SettingsError(
            f"{name} is None; give a tf.data.Dataset, a function of an input context, arrays (x, y), or a "
            "dataset directory"
        )
    structure = keras.tree.lists_to_tuples(data)  # of a list tf.data makes one tensor
    leaves = tf.nest.flatten(structure)
    for leaf in leaves:
        if not hasattr(leaf, "__array__") or isinstance(leaf, np.generic):
            held = "is" if leaf is data else "holds"
            raise SettingsError(
                f"{name} {held} a {type(leaf).__name__}, which is no array; give arrays (x, y), made by "
                "np.asarray(...), or a tf.data.Dataset, of a generator by tf.data.Dataset.from_generator(...)"
            )
    arrays = tf.nest.map_structure(_array, structure)
    counts = [len(array) if array.ndim else 0 for array in tf.nest.flatten(arrays)]
    if len(set(counts)) != 1 or 0 in counts:
        raise SettingsError(
            f"{name} has arrays of {' and '.join(map(str, counts)) or 'no'} examples; give as many in each, "
            "at least one"
        )
    for array in tf.nest.flatten(arrays):
        if array.dtype == object and not all(isinstance(value, str | bytes) for value in array.flat):
            raise SettingsError(
                f"{name} has an array of Python objects that are not all text; give numbers or texts, each "
                "of one shape, such as array.astype(str)"
            )
    return arrays


def _array(given: Any) -> np.ndarray[Any, Any]:
    """Returns an array, with floating-point numbers in the type that Keras gives them too."""
    array = np.asarray(given)
    return array.astype(keras.config.floatx()) if array.dtype == np.float64 else array


def of_sequence(data: keras.utils.PyDataset, name: str, *, shuffle: bool) -> tf.data.Dataset:
    """Returns the batches of a sequence as Keras takes them, in their order or in a shuffled one."""
    for hook in ("on_epoch_begin", "on_epoch_end"):
        if getattr(type(data), hook) is not getattr(keras.utils.PyDataset, hook):
            raise SettingsError(
                f"{name} has {hook}, which a resumed run cannot call as before; leave it "
                "out, or give a tf.data.Dataset"
            )
    count = data.num_batches
    with plugins.calling(f"{name}[0] failed", SettingsError):
        first = keras.tree.lists_to_tuples(data[0])
    specs = tf.nest.map_structure(
        lambda one: tf.TensorSpec([None, *one.shape[1:]], one.dtype), tf.nest.map_structure(_array, first)
    )
    types = [spec.dtype for spec in tf.nest.flatten(specs)]

    def batch(number: Any) -> list[np.ndarray[Any, Any]]:
        return [_array(one) for one in tf.nest.flatten(data[int(number)])]

    def fetched(number: tf.Tensor) -> Any:
        found = tf.numpy_function(batch, [number], types)
        for part, spec in zip(found, tf.nest.flatten(specs), strict=True):
            part.set_shape(spec.shape)
        return tf.nest.pack_sequence_as(specs, found)

    numbers = tf.data.Dataset.range(count) if count is not None else tf.data.Dataset.counter()
    if shuffle and count:
        numbers = numbers.shuffle(count)
    return numbers.map(
        tf.autograph.experimental.do_not_convert(fetched), num_parallel_calls=max(1, data.workers)
    )
