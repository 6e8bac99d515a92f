"""Given: what a program gives as its data, made a stream of batches: a dataset, a function, or arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from shardline.trainer.data.passes import ArrayPasses, DatasetPasses
from shardline.trainer.data.stream import Stream
from shardline.trainer.errors import SettingsError

_BATCH_SIZE = 32


@dataclass(frozen=True)
class Given:
    """How data is read: by how many replicas and processes, in which order, with which weights.

    Attributes:
        worker: Number of this process among `workers`.
        replicas: Replicas that share a batch.
        batch_size: Examples of a batch of arrays; None for 32.
        class_weight: Weight of each class in the loss; None for none.
    """

    worker: int
    workers: int
    replicas: int
    seed: int
    batch_size: int | None = None
    class_weight: Mapping[int, float] | None = None

    def read(
        self, data: Any, name: str, *, steps: int | None, shuffle: bool = False, again: bool = False
    ) -> Stream:
        """Returns the stream of what the argument `name` gave; a SettingsError says that it is no data."""
        if steps is not None and (type(steps) is not int or steps < 1):
            raise SettingsError(f"the steps of {name} must be a whole number of at least 1, not {steps!r}")
        own = 0
        if callable(data) and not isinstance(data, tf.data.Dataset):
            context = tf.distribute.InputContext(self.workers, self.worker, self.replicas)
            data, own = data(context), max(1, self.replicas // self.workers)
            if not isinstance(data, tf.data.Dataset):
                raise SettingsError(f"{name}(context) returned {type(data).__name__}, not a tf.data.Dataset")
        # A function's processes each read something else, in another order.
        seed = self.seed + self.worker * bool(own)
        if isinstance(data, tf.data.Dataset):
            if self.batch_size is not None and not own:
                raise SettingsError(f"batch_size is for arrays, and {name} is a dataset, which has its own")
            found: Any = DatasetPasses(self._weighted(data), name, seed)
        else:
            arrays = self._weighted_arrays(_arrays(data, name))
            size = _BATCH_SIZE if self.batch_size is None else self.batch_size
            if type(size) is not int or size < self.replicas:
                raise SettingsError(
                    f"batch_size must be at least {self.replicas}, one for each replica, not {size!r}"
                )
            found = ArrayPasses(arrays, batch_size=size, shuffle=shuffle, seed=seed)
        return Stream(found, name=name, replicas=self.replicas, steps=steps or 0, again=again, own=own)

    def divided(self, data: Any, validation_data: Any, share: float) -> tuple[Any, Any]:
        """Returns arrays without a share of their end, and that: what `validation_split` asks for."""
        if validation_data is not None:
            raise SettingsError("validation_split and validation_data exclude each other; give one of them")
        if isinstance(data, tf.data.Dataset) or callable(data):
            raise SettingsError("validation_split is for arrays; give validation_data, such as data.take(n)")
        if not 0 < share < 1:
            raise SettingsError(f"validation_split must be between 0 and 1, not {share}")
        arrays = _arrays(data, "train_data")
        count = len(tf.nest.flatten(arrays)[0])
        at = int(count * (1 - share))
        return (
            tf.nest.map_structure(lambda array: array[:at], arrays),
            tf.nest.map_structure(lambda array: array[at:], arrays),
        )

    def _weighted(self, data: tf.data.Dataset) -> tf.data.Dataset:
        if self.class_weight is None:
            return data
        spec = data.element_spec
        if not isinstance(spec, tuple) or len(spec) != 2 or isinstance(spec[1], dict | tuple):
            raise SettingsError(
                "class_weight needs data of pairs (x, y) with one label each, and no sample_weight"
            )
        weigh = tf.autograph.experimental.do_not_convert(lambda x, y: (x, y, self._weights(y)))
        return data.map(weigh)

    def _weighted_arrays(self, arrays: Any) -> Any:
        if self.class_weight is None:
            return arrays
        if not isinstance(arrays, tuple) or len(arrays) != 2 or isinstance(arrays[1], dict | tuple):
            raise SettingsError(
                "class_weight needs data of pairs (x, y) with one label each, and no sample_weight"
            )
        return (*arrays, self._weights(tf.convert_to_tensor(arrays[1])).numpy())

    def _weights(self, labels: tf.Tensor) -> tf.Tensor:
        """Returns the weight of each label's class, as Keras does: 1 for a class that is not named."""
        assert self.class_weight is not None
        if len(labels.shape) > 1 and labels.shape[-1] != 1:
            labels = tf.argmax(labels, axis=-1)
        labels = tf.cast(tf.reshape(labels, [-1]), tf.int64)
        classes = max(self.class_weight, default=0) + 1
        table = tf.constant([float(self.class_weight.get(one, 1.0)) for one in range(classes)])
        return tf.where(labels < classes, tf.gather(table, tf.minimum(labels, classes - 1)), 1.0)


def _arrays(data: Any, name: str) -> Any:
    """Returns arrays of as many examples, as NumPy has them."""
    if isinstance(data, str | Path) or data is None:
        raise SettingsError(
            f"{name} is {data!r}; give a tf.data.Dataset, a function of an input context, or arrays (x, y); "
            "a dataset directory is trained on by 'shardline train'"
        )
    structure = tuple(data) if isinstance(data, list) else data
    arrays = tf.nest.map_structure(np.asarray, structure)
    counts = {len(array) if array.ndim else 0 for array in tf.nest.flatten(arrays)}
    if len(counts) != 1 or 0 in counts:
        raise SettingsError(
            f"{name} has arrays of {sorted(counts)} examples; give as many in each, at least one"
        )
    if any(array.dtype == object for array in tf.nest.flatten(arrays)):
        raise SettingsError(
            f"{name} has an array of Python objects; give numbers or texts, each of one shape"
        )
    return arrays
