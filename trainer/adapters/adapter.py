"""Data that a program gives - a dataset, a function, arrays, a directory - made a stream of batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from shardline.trainer.adapters.batches import BatchSequence
from shardline.trainer.adapters.epochs import ArrayEpochs, DatasetEpochs
from shardline.trainer.base import files, plugins
from shardline.trainer.base.errors import DatasetError, SettingsError
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.pipeline import InputPipeline
from shardline.trainer.data.sharding import EpochPlan

#: Batches of what a program gives.
Batches: TypeAlias = BatchSequence | InputPipeline

_BATCH_SIZE = 32
# Split that an argument of `fit` or `evaluate` takes of a dataset directory.
_SPLITS = {"train_data": "train", "validation_data": "validation", "data": "test"}


@dataclass(frozen=True)
class DataAdapter:
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

    def __post_init__(self) -> None:
        """Checks the weights of classes."""
        if not isinstance(self.class_weight, Mapping | None):
            raise SettingsError(f"class_weight must be a dict of weights by class, not {self.class_weight!r}")
        for one, weight in (self.class_weight or {}).items():
            number = isinstance(weight, int | float | np.number)
            if not isinstance(one, int | np.integer) or one < 0 or not number or not 0 <= weight < math.inf:
                raise SettingsError(
                    "class_weight must be a dict of weights by the numbers of classes, such as "
                    f"{{0: 1.0, 1: 5.0}}, and has {one!r}: {weight!r}"
                )

    def read(
        self,
        data: Any,
        name: str,
        *,
        steps: int | None,
        shuffle: bool = False,
        again: bool = False,
        pads: bool = False,
    ) -> Batches:
        """Returns the stream of what the argument `name` gave; a SettingsError says that it is no data."""
        if isinstance(data, str | Path):
            return self._directory(data, name, steps, again=again)
        if isinstance(data, keras.utils.PyDataset):
            data = of_sequence(data, name, shuffle=shuffle)
        steps, own, seed = int(steps or 0), 0, self.seed
        if callable(data):
            own, seed = max(1, self.replicas // self.workers), self.seed + self.worker
            context = tf.distribute.InputContext(self.workers, self.worker, self.replicas)
            with plugins.calling(f"{name}(context), a function of an input context, failed", SettingsError):
                data = data(context)
            if not isinstance(data, tf.data.Dataset):
                raise SettingsError(f"{name}(context) returned {type(data).__name__}, not a tf.data.Dataset")
        elif isinstance(data, tf.data.Dataset):
            policy = data.options().experimental_distribute.auto_shard_policy.name
            if self.workers > 1 and policy not in ("AUTO", "DATA"):
                raise SettingsError(
                    f"{name} asks for AutoShardPolicy.{policy}, and each process trains on its part of every "
                    "batch; leave the policy out, or give a function of an input context, whose dataset is "
                    "each process's own"
                )
        if isinstance(data, tf.data.Dataset):
            if self.batch_size is not None and not own:
                raise SettingsError(f"batch_size is for arrays, and {name} is a dataset, which has its own")
            if again and steps and data.cardinality() == tf.data.UNKNOWN_CARDINALITY:
                data = _not_ending(data, name, steps * max(1, own))
            found: Any = DatasetEpochs(self._weighted(data), name, seed)
        else:
            arrays = self._weighted(checked_arrays(data, name))
            found = ArrayEpochs(arrays, batch_size=self._size(), shuffle=shuffle, seed=seed)
        if again and steps and 0 <= found.cardinality <= steps * max(1, own):
            steps = 0  # all of it, and nothing twice
        return BatchSequence(
            found, name=name, replicas=self.replicas, steps=steps, again=again, own=own, pads=pads
        )

    def _directory(self, data: str | Path, name: str, steps: int | None, *, again: bool) -> InputPipeline:
        """Returns the batches of the split that an argument takes of a dataset directory."""
        if steps is not None:
            raise SettingsError(
                f"{name} is a dataset directory, of which an epoch is one pass; leave the number of steps out"
            )
        directory, batch_size = files.local_path(data), self._size()
        if batch_size % self.replicas:
            raise SettingsError(
                f"batch_size must be a multiple of {self.replicas}, the number of replicas, where {name} is "
                f"a dataset directory, not {batch_size}"
            )
        manifest, split = manifests.load(directory), _SPLITS[name]
        manifest.info()  # images that differ in size are refused
        if split not in manifest.splits:
            raise DatasetError(
                f"{name} takes the {split} split of {directory}, which has only {', '.join(manifest.splits)}"
            )
        if self.class_weight is not None and not manifest.is_classes:
            raise SettingsError("class_weight needs one label of kind class; weigh in the model's loss")
        by_class, classes = self.class_weight, range(len(manifest.class_names))
        weights = [] if by_class is None else [by_class.get(one, 1.0) for one in classes]
        plan = EpochPlan(manifest.splits[split].records, self.replicas, batch_size // self.replicas)
        feed = InputPipeline(directory, manifest, split, plan, class_weights=weights)
        return replace(feed, epochs=1) if again else replace(feed, shuffle_seed=self.seed)

    def _size(self) -> int:
        size = _BATCH_SIZE if self.batch_size is None else int(self.batch_size)
        if size < self.replicas:
            raise SettingsError(
                f"batch_size must be at least {self.replicas}, one for each replica, not {size}"
            )
        return size

    def divided(self, data: Any, share: float) -> tuple[Any, Any]:
        """Returns arrays without a share of their end, and that: what `validation_split` asks for."""
        if isinstance(data, tf.data.Dataset | keras.utils.PyDataset | str | Path) or callable(data):
            raise SettingsError("validation_split is for arrays; give validation_data, such as data.take(n)")
        if not isinstance(share, float | np.floating) or not 0 < share < 1:
            raise SettingsError(f"validation_split must be a number between 0 and 1, not {share!r}")
        arrays = checked_arrays(data, "train_data")
        at = math.floor(len(tf.nest.flatten(arrays)[0]) * (1.0 - share))
        first, rest = slice(at), slice(at, None)
        parts = [tf.nest.map_structure(lambda array, own=own: array[own], arrays) for own in (first, rest)]
        return parts[0], parts[1]

    def _weighted(self, data: Any) -> Any:
        """Returns a dataset of pairs, or two arrays, with the weight of each label's class, if any."""
        if self.class_weight is None:
            return data
        pair = data.element_spec if isinstance(data, tf.data.Dataset) else data
        if not isinstance(pair, tuple) or len(pair) != 2 or isinstance(pair[1], dict | tuple):
            raise SettingsError(
                "class_weight needs data of pairs (x, y) with one label each, and no sample_weight"
            )
        if isinstance(data, tf.data.Dataset):
            return data.map(tf.autograph.experimental.do_not_convert(lambda x, y: (x, y, self._weights(y))))
        return (*data, self._weights(tf.convert_to_tensor(data[1])).numpy())

    def _weights(self, labels: tf.Tensor) -> tf.Tensor:
        """Returns the weight of each label's class, as Keras does: 1 for a class that is not named."""
        assert self.class_weight is not None
        if len(labels.shape) > 1 and labels.shape[-1] != 1:
            labels = tf.argmax(labels, axis=-1)
        labels = tf.reshape(labels, [-1])
        labels = tf.cast(tf.round(labels) if labels.dtype.is_floating else labels, tf.int64)
        classes = max(self.class_weight, default=0) + 1
        table = tf.constant([float(self.class_weight.get(one, 1.0)) for one in range(classes)])
        named = (labels >= 0) & (labels < classes)
        return tf.where(named, tf.gather(table, tf.clip_by_value(labels, 0, classes - 1)), 1.0)


def _not_ending(data: tf.data.Dataset, name: str, count: int) -> tf.data.Dataset:
    """Returns the first batches of a dataset; reading fails, rather than begins anew, where it has fewer."""
    specs = tf.nest.flatten(data.element_spec)
    if any(not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None for spec in specs):
        return data

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def end(_: tf.Tensor) -> Any:
        words = f"{name} ends before the {count:,} batches that are to be evaluated; give fewer steps"
        with tf.control_dependencies([tf.debugging.Assert(tf.constant(False), [words])]):
            none = [tf.identity(tf.zeros([side or 0 for side in spec.shape], spec.dtype)) for spec in specs]
        return tf.nest.pack_sequence_as(data.element_spec, none)

    return data.concatenate(tf.data.Dataset.range(1).map(end)).take(count)


def whole_number(name: str, value: Any, *, least: int = 1) -> int:
    """Returns a number that an argument has to be; a SettingsError for any other value."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= least:
        return int(value)
    raise SettingsError(f"{name} must be a whole number of at least {least}, not {value!r}")


def check_numbers(**given: int | None) -> None:
    """Checks arguments that are whole numbers of at least 1, or None."""
    for name, value in given.items():
        if value is not None:
            whole_number(name, value)


def checked_arrays(data: Any, name: str) -> Any:
    """Returns arrays of as many examples, as NumPy has them, with numbers in the precision of Keras."""
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
