"""Data adapter: the data argument of a call (dataset, function, arrays, directory) as batches of replicas."""

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
from shardline.trainer.base import files, plugins, progress
from shardline.trainer.base.errors import DatasetError, SettingsError
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.pipeline import InputPipeline
from shardline.trainer.data.sharding import EpochPlan
from shardline.trainer.keras_compat.tensorflow_internals import without_prefetch

#: Batches of a data argument.
Batches: TypeAlias = BatchSequence | InputPipeline

_BATCH_SIZE = 32
# Split of a dataset directory that each data argument of `fit` or `evaluate` reads.
_SPLITS = {"train_data": "train", "validation_data": "validation", "data": "test"}


@dataclass(frozen=True)
class DataAdapter:
    """Adapter of data arguments to the processes that read them, and the replicas that share a batch.

    This process is number `worker`, from 0, of `workers`. `batch_size` is that of a global batch of arrays or
    of a directory; None for 32. `class_weight` is the weight of each class in the loss.
    """

    worker: int
    workers: int
    replicas: int
    seed: int
    batch_size: int | None = None
    class_weight: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        """Checks the class weights."""
        if not isinstance(self.class_weight, Mapping | None):
            raise SettingsError(f"class_weight must be a dict of weights by class, not {self.class_weight!r}")
        for index, weight in (self.class_weight or {}).items():
            is_index = isinstance(index, int | np.integer) and index >= 0
            if not is_index or not isinstance(weight, int | float | np.number) or not 0 <= weight < math.inf:
                raise SettingsError(
                    "class_weight must be a dict of weights by class index, such as "
                    f"{{0: 1.0, 1: 5.0}}, and has {index!r}: {weight!r}"
                )

    def read(
        self,
        data: Any,
        name: str,
        *,
        steps: int | None,
        shuffle: bool = False,
        restart: bool = False,
        pad: bool = False,
    ) -> Batches:
        """Returns the batches of the data argument `name`, in epochs as of `BatchSequence`.

        It is a dataset, a function of an input context, arrays, which may be shuffled, a PyDataset, or the
        path of a dataset directory. Raises SettingsError if it is not, or does not fit the other arguments.
        """
        if isinstance(data, str | Path):
            return self._read_directory(data, name, steps, restart=restart)
        if isinstance(data, keras.utils.PyDataset):
            data = pydataset_batches(data, name, seed=self.seed if shuffle else None)
        steps, local_replicas, seed = int(steps or 0), 0, self.seed
        if callable(data):
            local_replicas, seed = max(1, self.replicas // self.workers), self.seed + self.worker
            context = tf.distribute.InputContext(self.workers, self.worker, self.replicas)
            with plugins.calling(f"{name}(context), a function of an input context, failed", SettingsError):
                data = data(context)
            if not isinstance(data, tf.data.Dataset):
                raise SettingsError(f"{name}(context) returned {type(data).__name__}, not a tf.data.Dataset")
        elif isinstance(data, tf.data.Dataset) and self.workers > 1:
            _check_policy(data, name)
        if isinstance(data, tf.data.Dataset):
            if self.batch_size is not None and not local_replicas:
                raise SettingsError(f"batch_size is for arrays, and {name} is a dataset, which has its own")
            if restart and steps and data.cardinality() == tf.data.UNKNOWN_CARDINALITY:
                data = _fail_past_end(data, name, steps * max(1, local_replicas))
            source: Any = DatasetEpochs(self._with_class_weights(without_prefetch(data)), name)
        else:
            arrays = self._with_class_weights(to_arrays(data, name))
            source = ArrayEpochs(arrays, batch_size=self._global_batch_size(), shuffle=shuffle, seed=seed)
        if source.unseeded and self.worker == 0 and (self.workers > 1 or not restart):
            others = "" if self.workers == 1 or local_replicas else " each process shuffles on its own, and"
            progress.report(
                "train",
                f"warning: {name} has no seed ({', '.join(source.unseeded)}):{others} a resumed run reads "
                "another order, in which examples of an epoch may be twice or missing; give it a seed "
                "and deterministic order",
            )
        if restart and steps and 0 <= source.cardinality <= steps * max(1, local_replicas):
            steps = 0  # all of the data, once
        return BatchSequence(
            source,
            name=name,
            replicas=self.replicas,
            steps=steps,
            restart=restart,
            local_replicas=local_replicas,
            pad=pad,
        )

    def _read_directory(
        self, data: str | Path, name: str, steps: int | None, *, restart: bool
    ) -> InputPipeline:
        if steps is not None:
            raise SettingsError(
                f"{name} is a dataset directory, whose epoch is all of it; leave out the number of steps"
            )
        directory, batch_size = files.local_path(data), self._global_batch_size()
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
        weights = [] if by_class is None else [by_class.get(index, 1.0) for index in classes]
        plan = EpochPlan(manifest.splits[split].records, self.replicas, batch_size // self.replicas)
        pipeline = InputPipeline(directory, manifest, split, plan, class_weights=weights)
        return replace(pipeline, epochs=1) if restart else replace(pipeline, shuffle_seed=self.seed)

    def _global_batch_size(self) -> int:
        size = _BATCH_SIZE if self.batch_size is None else int(self.batch_size)
        if size < self.replicas:
            raise SettingsError(
                f"batch_size must be at least {self.replicas}, one for each replica, not {size}"
            )
        return size

    def split_validation(self, data: Any, share: float) -> tuple[Any, Any]:
        """Splits arrays as `validation_split` does: all but a share at the end, and that share."""
        if isinstance(data, tf.data.Dataset | keras.utils.PyDataset | str | Path) or callable(data):
            raise SettingsError("validation_split is for arrays; give validation_data, such as data.take(n)")
        if not isinstance(share, float | np.floating) or not 0 < share < 1:
            raise SettingsError(f"validation_split must be a number between 0 and 1, not {share!r}")
        arrays = to_arrays(data, "train_data")
        at = math.floor(len(tf.nest.flatten(arrays)[0]) * (1.0 - share))
        first = tf.nest.map_structure(lambda array: array[:at], arrays)
        return first, tf.nest.map_structure(lambda array: array[at:], arrays)

    def _with_class_weights(self, data: Any) -> Any:
        """Adds the class weight of each label to a dataset of pairs or to two arrays, if any are set."""
        if self.class_weight is None:
            return data
        pair = data.element_spec if isinstance(data, tf.data.Dataset) else data
        if not isinstance(pair, tuple) or len(pair) != 2 or isinstance(pair[1], dict | tuple):
            raise SettingsError(
                "class_weight needs data of pairs (x, y) with one label each, and no sample_weight"
            )
        if isinstance(data, tf.data.Dataset):
            return data.map(
                tf.autograph.experimental.do_not_convert(lambda x, y: (x, y, self._weigh_labels(y)))
            )
        return (*data, self._weigh_labels(tf.convert_to_tensor(data[1])).numpy())

    def _weigh_labels(self, labels: tf.Tensor) -> tf.Tensor:
        assert self.class_weight is not None
        if len(labels.shape) > 1 and labels.shape[-1] != 1:
            labels = tf.argmax(labels, axis=-1)
        labels = tf.reshape(labels, [-1])
        labels = tf.cast(tf.round(labels) if labels.dtype.is_floating else labels, tf.int64)
        classes = max(self.class_weight, default=0) + 1
        table = tf.constant([float(self.class_weight.get(index, 1.0)) for index in range(classes)])
        named = (labels >= 0) & (labels < classes)
        return tf.where(named, tf.gather(table, tf.clip_by_value(labels, 0, classes - 1)), 1.0)


def _check_policy(data: tf.data.Dataset, name: str) -> None:
    policy = data.options().experimental_distribute.auto_shard_policy.name
    if policy not in ("AUTO", "DATA"):
        raise SettingsError(
            f"{name} asks for AutoShardPolicy.{policy}, and each process trains on its part of every batch; "
            "leave the policy out, or give a function of an input context, whose dataset is its own"
        )


def _fail_past_end(data: tf.data.Dataset, name: str, count: int) -> tf.data.Dataset:
    """Returns the first `count` batches of a dataset; reading fails if it has fewer."""
    specs = tf.nest.flatten(data.element_spec)
    if any(not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None for spec in specs):
        return data

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def fail(_: tf.Tensor) -> Any:
        message = f"{name} ends before the {count:,} batches that are to be evaluated; give fewer steps"
        with tf.control_dependencies([tf.debugging.Assert(tf.constant(False), [message])]):
            empty = [tf.identity(tf.zeros([side or 0 for side in spec.shape], spec.dtype)) for spec in specs]
        return tf.nest.pack_sequence_as(data.element_spec, empty)

    return data.concatenate(tf.data.Dataset.range(1).map(fail)).take(count)


def check_whole_number(name: str, value: Any, *, least: int = 1) -> int:
    """Returns a whole number of at least `least`; any other value is a SettingsError."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= least:
        return int(value)
    raise SettingsError(f"{name} must be a whole number of at least {least}, not {value!r}")


def check_counts(**arguments: int | None) -> None:
    """Checks arguments that are whole numbers of at least 1, or None."""
    for name, value in arguments.items():
        if value is not None:
            check_whole_number(name, value)


def to_arrays(data: Any, name: str) -> Any:
    """Returns NumPy arrays of equal length, with floats in the precision of Keras."""
    structure = keras.tree.lists_to_tuples(data)  # tf.data makes one tensor of a list
    leaves = tf.nest.flatten(structure)
    for leaf in leaves:
        if not hasattr(leaf, "__array__") or isinstance(leaf, np.generic):
            verb = "is" if leaf is data else "holds"
            raise SettingsError(
                f"{name} {verb} a {type(leaf).__name__}, which is no array; pass arrays (x, y), made by "
                "np.asarray(...), or a tf.data.Dataset, of a generator by tf.data.Dataset.from_generator(...)"
            )
    arrays = tf.nest.map_structure(_to_array, structure)
    counts = [len(array) if array.ndim else 0 for array in tf.nest.flatten(arrays)]
    if len(set(counts)) != 1 or 0 in counts:
        raise SettingsError(
            f"{name} has arrays of {' and '.join(map(str, counts)) or 'no'} examples; pass as many in each, "
            "at least one"
        )
    for array in tf.nest.flatten(arrays):
        if array.dtype == object and not all(isinstance(value, str | bytes) for value in array.flat):
            raise SettingsError(
                f"{name} has an array of Python objects that are not all text; pass numbers or texts, each "
                "of one shape, such as array.astype(str)"
            )
    return arrays


def _to_array(values: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(values)
    return array.astype(keras.config.floatx()) if array.dtype == np.float64 else array


def pydataset_batches(data: keras.utils.PyDataset, name: str, *, seed: int | None) -> tf.data.Dataset:
    """Returns the batches of a `keras.utils.PyDataset` as a dataset, shuffled with a seed, or in order."""
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
        lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype),
        tf.nest.map_structure(_to_array, first),
    )
    types = [spec.dtype for spec in tf.nest.flatten(specs)]

    def batch(number: Any) -> list[np.ndarray[Any, Any]]:
        return [_to_array(part) for part in tf.nest.flatten(data[int(number)])]

    def fetch(number: tf.Tensor) -> Any:
        parts = tf.numpy_function(batch, [number], types)
        for part, spec in zip(parts, tf.nest.flatten(specs), strict=True):
            part.set_shape(spec.shape)
        return tf.nest.pack_sequence_as(specs, parts)

    numbers = tf.data.Dataset.range(count) if count is not None else tf.data.Dataset.counter()
    if seed is not None and count:
        numbers = numbers.shuffle(count, seed=seed)
    return numbers.map(
        tf.autograph.experimental.do_not_convert(fetch), num_parallel_calls=max(1, data.workers)
    )
