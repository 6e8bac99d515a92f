"""Given: what a program gives as its data, made a stream of batches: a dataset, a function, or arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from shardline.trainer import files, plugins, progress
from shardline.trainer.data.arrays import checked_arrays, of_sequence
from shardline.trainer.data.passes import ArrayPasses, DatasetPasses
from shardline.trainer.data.shards import ShardStream
from shardline.trainer.data.stream import Stream
from shardline.trainer.errors import SettingsError
from shardline.trainer.tensorflow_internals import shard_by_policy

#: Batches of what a program gives.
Batches: TypeAlias = Stream | ShardStream

_BATCH_SIZE = 32
# What each process reads by an AutoShardPolicy; by all others the replicas' parts of each batch.
_BY_POLICY = {"FILE": "its own files", "HINT": "its own shard", "OFF": "all, in an order of its own"}


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
        steps = int(steps or 0)
        part = self._own_part(data, name)
        own = max(1, self.replicas // self.workers) if part else 0
        data, seed = part or (data, self.seed)
        if isinstance(data, tf.data.Dataset):
            if self.batch_size is not None and not own:
                raise SettingsError(f"batch_size is for arrays, and {name} is a dataset, which has its own")
            if again and steps and data.cardinality() == tf.data.UNKNOWN_CARDINALITY:
                data = _not_ending(data, name, steps * max(1, own))
            found: Any = DatasetPasses(self._weighted(data), name, seed)
        else:
            arrays = self._weighted_arrays(checked_arrays(data, name))
            found = ArrayPasses(arrays, batch_size=self._size(), shuffle=shuffle, seed=seed)
        if again and steps and 0 <= found.cardinality <= steps * max(1, own):
            steps = 0  # all of it, and nothing twice
        return Stream(found, name=name, replicas=self.replicas, steps=steps, again=again, own=own, pads=pads)

    def _directory(self, directory: str | Path, name: str, steps: int | None, *, again: bool) -> ShardStream:
        if steps is not None:
            raise SettingsError(
                f"{name} is a dataset directory, of which an epoch is one pass; leave the number of steps out"
            )
        return ShardStream(
            files.local_path(directory),
            name,
            replicas=self.replicas,
            batch_size=self._size(),
            seed=None if again else self.seed,
            class_weight=self.class_weight,
        )

    def _own_part(self, data: Any, name: str) -> tuple[tf.data.Dataset, int] | None:
        """Returns what this process reads by itself, in batches of a replica, and the seed for it.

        None says that each process reads all of the data.
        """
        if isinstance(data, tf.data.Dataset):
            policy = data.options().experimental_distribute.auto_shard_policy.name
            if self.workers == 1 or policy not in _BY_POLICY:
                return None
            progress.say(
                "train",
                f"{name}: AutoShardPolicy.{policy} is kept: each process reads {_BY_POLICY[policy]}, and the "
                "steps are not those of one process",
            )
            try:
                part = shard_by_policy(data, self.workers, self.worker, self.replicas)
            except (tf.errors.OpError, ValueError) as error:
                raise SettingsError(
                    f"{name} cannot be sharded by AutoShardPolicy.{policy}: {error}"
                ) from error
            # All have the files in one order, of which each takes its own; without shards they must differ.
            return part, self.seed + self.worker * (policy == "OFF")
        if not callable(data):
            return None
        context = tf.distribute.InputContext(self.workers, self.worker, self.replicas)
        with plugins.calling(f"{name}(context), a function of an input context, failed", SettingsError):
            made = data(context)
        if not isinstance(made, tf.data.Dataset):
            raise SettingsError(f"{name}(context) returned {type(made).__name__}, not a tf.data.Dataset")
        return made, self.seed + self.worker

    def _size(self) -> int:
        """Returns the size of a global batch, which is not the data's own."""
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
        count = len(tf.nest.flatten(arrays)[0])
        at = math.floor(count * (1.0 - share))
        if at in (0, count):
            raise SettingsError(f"validation_split {share} of {count} examples leaves none of one part")
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
        labels = tf.reshape(labels, [-1])
        labels = tf.cast(tf.round(labels) if labels.dtype.is_floating else labels, tf.int64)
        classes = max(self.class_weight, default=0) + 1
        table = tf.constant([float(self.class_weight.get(one, 1.0)) for one in range(classes)])
        named = (labels >= 0) & (labels < classes)
        return tf.where(named, tf.gather(table, tf.clip_by_value(labels, 0, classes - 1)), 1.0)


def _not_ending(data: tf.data.Dataset, name: str, count: int) -> tf.data.Dataset:
    """Returns the first batches of a dataset; reading fails, rather than begins anew, where it has fewer."""

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def end(_: tf.Tensor) -> Any:
        words = f"{name} ends before the {count:,} batches that are to be evaluated; give fewer steps"
        with tf.control_dependencies([tf.debugging.Assert(tf.constant(False), [words])]):
            return tf.nest.map_structure(
                lambda spec: tf.identity(tf.zeros([side or 0 for side in spec.shape], spec.dtype)),
                data.element_spec,
            )

    if any(
        not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None
        for spec in tf.nest.flatten(data.element_spec)
    ):
        return data
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
