"""Data adapter: the data argument of a call (dataset, function, arrays, directory) as batches of replicas."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from shardline.trainer import manifest as manifests
from shardline.trainer.base import files, plugins, progress
from shardline.trainer.base.errors import DatasetError, SettingsError
from shardline.trainer.checkpoint import BEGINNING, Position
from shardline.trainer.data.pipeline import InputPipeline, fold_in
from shardline.trainer.distribute import distribute_dataset
from shardline.trainer.keras_compat import datasets
from shardline.trainer.keras_compat.tensorflow_internals import numpy_function, without_autotuning
from shardline.trainer.sharding import EpochPlan, RunPlan, StepSizes

_PREFETCH_BATCHES = 2
# Cardinality of an infinite dataset; more epochs than are ever trained.
_INFINITE, _UNLIMITED_EPOCHS = -1, 2**40


class ArrayEpochs:
    """Epochs over arrays of equal length: batches of `batch_size`, shuffled or in order."""

    def __init__(self, arrays: Any, *, batch_size: int, shuffle: bool, seed: int) -> None:
        with tf.device("CPU:0"):
            self._arrays = tf.nest.map_structure(tf.convert_to_tensor, arrays)
        self._shuffle = shuffle
        self._seed = seed
        count = int(tf.nest.flatten(self._arrays)[0].shape[0])
        self.examples: tuple[int, int] | None = (count, batch_size)
        self.cardinality = -(-count // batch_size)
        self.random_ops, self.unseeded = list[str](), list[str]()
        self.watch: datasets.Watch = lambda done, total: None
        self.element_spec = tf.nest.map_structure(
            lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), self._arrays
        )

    def dataset(self, number: tf.Tensor, first: int = 0, count: int = -1) -> tf.data.Dataset:
        """Returns `count` (-1: all) batches, from `first` on, of epoch `number`, int64 (), while traced."""
        examples, size = self.examples or (0, 1)
        order = tf.range(examples, dtype=tf.int64)
        if self._shuffle:
            order = tf.random.experimental.stateless_shuffle(
                order, tf.stack([fold_in(self._seed, 0, number), 0])
            )

        @datasets.no_autograph  # type: ignore[untyped-decorator]
        def batch(first: tf.Tensor) -> Any:
            chosen = order[first : first + size]
            return tf.nest.map_structure(lambda array: tf.gather(array, chosen), self._arrays)

        return tf.data.Dataset.range(first * size, examples, size).take(count).map(batch)

    def count_batches(self) -> int | None:
        """Returns the batches of an epoch."""
        return self.cardinality

    def after(self, epochs: int, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Returns batches unchanged: the number of an epoch decides its order."""
        return batches


#: Source of either kind.
EpochSource: TypeAlias = ArrayEpochs | datasets.DatasetEpochs


class BatchSequence:
    """Batches of some data, repeated without end, in epochs of `steps` steps.

    Attributes:
        steps: Steps of an epoch.
        exact: Whether `sizes` are exact; else each is that of a full batch.
    """

    #: Whether `distribute` can yield the size of the global batch with each part.
    has_sizes = True

    def __init__(
        self,
        source: EpochSource,
        *,
        name: str,
        replicas: int,
        steps: int = 0,
        times: int = 1,
        restart: bool = False,
        local_replicas: int = 0,
        pad: bool = False,
    ) -> None:
        """Checks the source of the data argument `name`, and counts its batches.

        Args:
            source: Batches of each epoch.
            name: Name of the data argument, for messages.
            replicas: Replicas that share a batch.
            steps: Steps of an epoch; 0 for all of the data, which must then have an end (SettingsError).
            times: How often the data is repeated in all of it; -1 for without end.
            restart: Whether every epoch begins at the first batch, and may leave out the last ones.
            local_replicas: Replicas of this process, each of which takes a batch of its own, if each process
                has its own data; else 0.
            pad: Whether fewer examples than replicas are padded with copies of the last.
        """
        self._source, self._name = source, name
        self._replicas, self._local_replicas = replicas, local_replicas
        #: Whether each process has batches of its own.
        self.is_per_process = local_replicas > 0
        if any(part.shape.rank == 0 for part in tf.nest.flatten(source.element_spec)):
            raise SettingsError(
                f"{name} yields single values, {_describe_spec(source.element_spec)}; make batches of them, "
                ".batch(64)"
            )
        if source.random_ops:
            progress.report(
                "train",
                f"warning: {name} draws random numbers ({', '.join(source.random_ops)}), which processes and "
                "resumed runs do not draw alike; use tf.random.stateless_uniform and its like, or layers",
            )
        self.exact = source.examples is not None and not local_replicas
        count = source.examples[0] if source.examples else 0
        #: Number of examples before the padding; None without padding.
        self.padded = count if pad and self.exact and count < replicas else None
        if _INFINITE in (source.cardinality, times) and not steps:
            raise SettingsError(f"{name} has no end; give steps_per_epoch (of a validation validation_steps)")
        # Sizes of all batches of the data, 0 for an unknown one; empty if their number is unknown.
        self._sizes = self._count_batch_sizes(counted=not steps)
        if not self._sizes and not steps:
            raise SettingsError(f"{name} has no batches; give at least one example")
        self._batches_per_step = max(1, local_replicas)
        self.steps = steps or times * len(self._sizes) // self._batches_per_step
        if restart and self._sizes:
            self._sizes = self._sizes[: self.steps * self._batches_per_step]
        self._restart = restart
        # Whether the number of replicas decides which batch is the last: see `next_step`.
        self._whole = self.exact and not steps and times == 1

    @property
    def element_spec(self) -> Any:
        """Types and shapes of a batch."""
        return self._source.element_spec

    @functools.cached_property
    def first_batch(self) -> Any:
        """The first batch."""
        count = -1 if len(self._sizes) == 1 else 1
        first = tf.data.Dataset.range(1).flat_map(
            datasets.no_autograph(lambda number: self._epoch(number, count=count))
        )
        for batch in _in_order(first).take(1):
            return batch
        raise SettingsError(f"{self._name} has no batches; give at least one example")

    @property
    def description(self) -> str:
        """Types, shapes and number of examples of the data."""
        known = f", {self._source.examples[0]} examples" if self._source.examples else ""
        return f"{_describe_spec(self.element_spec)}{known}"

    @property
    def digest(self) -> tuple[str, str]:
        """Description, and checksum of the first batch, equal on all processes; "" where they may differ."""
        if self._local_replicas:
            return "", ""
        if self._source.unseeded:
            return self.description, ""
        checksum = 0
        for part in map(np.asarray, tf.nest.flatten(self.first_batch, expand_composites=True)):
            content = repr(part.tolist()).encode() if part.dtype == object else part.tobytes()
            checksum = zlib.crc32(content, checksum)
        return self.description, f"{checksum:08x}"

    def sizes(self, epoch: int) -> Sequence[int]:
        """Returns the examples of each step of an epoch over all replicas; of a full batch where unknown."""
        count, replicas = self.steps, self._replicas - self._replicas % self._batches_per_step
        if self._local_replicas or not self._sizes or self._sizes == StepSizes(len(self._sizes), 0, 0):
            full = self._full_batch * (replicas if self._local_replicas else 1)
            return StepSizes(count, full, full)
        if len(self._sizes) == count:
            return self._sizes
        first = 0 if self._restart else epoch * count
        known = (self._sizes[step % len(self._sizes)] for step in range(first, first + count))
        return [size or self._full_batch for size in known]

    @property
    def fixed(self) -> dict[str, int]:
        """Counts that a resumed run cannot change; the number of replicas may change `steps` by one."""
        if self._whole:
            return {"steps_per_epoch": self._source.cardinality}
        return {"steps_per_epoch": self.steps, "batches": len(self._sizes)}

    def epoch(self, at: Position) -> RunPlan:
        """Returns the remaining steps of the epoch of a position."""
        sizes, done = self.sizes(at.epoch), at.steps - at.epoch * self.steps
        if self._whole:  # by the examples before it
            done = min(-(-at.examples // self._full_batch), len(sizes))
        return RunPlan(at.examples, done, sizes[done:])

    def source(self, plan: RunPlan, step: int, process: int, processes: int) -> str:
        """Names the batch of a step."""
        return f"batch {plan.first_step + step + 1:,} of the epoch"

    def watch(self, watch: datasets.Watch) -> None:
        """Sets what is called while data before a resume is read again, by a thread of the data."""
        self._source.watch = watch

    def batches(self, start: int = 0) -> tf.data.Dataset:
        """Returns the batches from number `start` on, counted over all epochs, without end."""
        in_epoch = len(self._sizes)
        endless = self._source.cardinality == _INFINITE
        if start and not in_epoch and not endless:
            in_epoch = self._source.count_batches() or 0
        first, rest = divmod(start, in_epoch) if in_epoch else (0, start)
        if start:
            progress.report("train", f"skipping {start:,} batch{'es' * (start > 1)} of {self._name}")
        whole = datasets.no_autograph(lambda number: self._epoch(number))
        if not in_epoch and not endless:  # an epoch may have fewer batches than are skipped
            all_batches = tf.data.Dataset.range(_UNLIMITED_EPOCHS).flat_map(whole)
            return _in_order(datasets.elements(all_batches, start, -1, self._source.watch))
        now = tf.data.Dataset.range(first, first + 1)
        batches = now.flat_map(datasets.no_autograph(lambda number: self._epoch(number, rest)))
        if not endless or self._restart:
            others = tf.data.Dataset.range(first + 1, _UNLIMITED_EPOCHS)
            batches = batches.concatenate(others.flat_map(whole))
        return _in_order(self._source.after(first, batches))

    def _epoch(self, number: tf.Tensor, first: int = 0, count: int = -1) -> tf.data.Dataset:
        """Returns `count` (-1: all) batches of an epoch, from number `first` on."""
        known, batches = self._source.examples, self._source.dataset(number, first, count)
        if known and not self._local_replicas and self._sizes and self._sizes[-1] > known[1]:
            batches = _merge_last_two(batches, len(self._sizes) + 1, self.element_spec, first)
        return batches.take(self.steps * self._batches_per_step - first) if self._restart else batches

    def raw_batches(self, at: Position = BEGINNING) -> tf.data.Dataset:
        """Returns the batches of single steps, for the parameter server strategy."""
        return self.batches(at.epoch * self.steps + self.epoch(at).first_step)

    def decode(self, batch: Any) -> Any:
        """Returns the batch unchanged."""
        return batch

    def distribute(
        self,
        strategy: tf.distribute.Strategy,
        worker: int,
        workers: int,
        at: Position = BEGINNING,
        *,
        sized: bool = False,
    ) -> tf.data.Dataset:
        """Returns the distributed dataset of what each replica of a process takes in a step.

        With `sized` each element is a pair: the part of a batch, and float32 (), the examples of the batch.
        """
        local = max(1, strategy.num_replicas_in_sync // workers)

        def with_size(*parts: Any) -> Any:
            batch = _repack(parts)
            return batch, tf.cast(_count_rows(batch) * self._replicas, tf.float32)

        def worker_batches() -> tf.data.Dataset:
            steps = at.epoch * self.steps + self.epoch(at).first_step
            batches = self.batches(steps * self._batches_per_step)
            if self._local_replicas or self._replicas == 1:
                # Replicas with per-process data are assumed to have equally large batches.
                parts = batches.map(datasets.no_autograph(with_size)) if sized else batches
            else:
                replicas = range(worker * local, (worker + 1) * local)
                parts = batches.flat_map(
                    datasets.no_autograph(lambda *batch: self._replica_parts(_repack(batch), replicas, sized))
                )
            return without_autotuning(parts.prefetch(_PREFETCH_BATCHES * local))

        return distribute_dataset(strategy, worker_batches)

    def _replica_parts(self, batch: Any, replicas: range, sized: bool) -> tf.data.Dataset:
        if self.padded:
            rows = tf.minimum(tf.range(self._replicas), self.padded - 1)
            batch = tf.nest.map_structure(lambda part: tf.gather(part, rows), batch)
        count = _count_rows(batch)
        if not self.exact and self._replicas > 1:
            tf.debugging.Assert(
                count >= self._replicas,
                [f"{self._name} has a batch of fewer examples than there are replicas"],
            )

        def part(replica: tf.Tensor) -> Any:
            begin, end = (at * count // self._replicas for at in (replica, replica + 1))
            rows = tf.nest.map_structure(lambda values: values[begin:end], batch)
            return (rows, tf.cast(count, tf.float32)) if sized else rows

        return tf.data.Dataset.range(replicas.start, replicas.stop).map(datasets.no_autograph(part))

    @functools.cached_property
    def _full_batch(self) -> int:
        if self._source.examples:
            return self._source.examples[1]
        return int(tf.nest.flatten(self.element_spec)[0].shape[0] or _count_rows(self.first_batch))

    def _count_batch_sizes(self, *, counted: bool) -> Sequence[int]:
        if self._source.examples:
            count, size = self._source.examples
            steps = -(-count // size)
            last = count - (steps - 1) * size
            if 0 < count < self._replicas and not self._local_replicas and not self.padded:
                raise SettingsError(
                    f"{self._name} has {count} example{'s' * (count > 1)} for {self._replicas} replicas, and "
                    "each needs one in every step: use fewer replicas or more data"
                )
            if steps > 1 and last < min(size, self._replicas) and not self._local_replicas:
                steps, last = steps - 1, size + last
            return StepSizes(steps, size, last)
        if self._source.cardinality >= 0 or not counted:
            return StepSizes(max(0, self._source.cardinality), 0, 0)
        progress.report(
            "train",
            f"counting the batches of {self._name}, which does not know their number; give steps_per_epoch, "
            "or of a validation validation_steps, to leave this out",
        )
        first = tf.data.Dataset.range(1).flat_map(datasets.no_autograph(self._source.dataset))
        counts = first.map(datasets.no_autograph(lambda *batch: _count_rows(_repack(batch))))
        return [int(rows) for rows in counts]


def _in_order(batches: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = True
    return batches.with_options(options)


def _repack(batch: tuple[Any, ...]) -> Any:
    return batch if len(batch) > 1 else batch[0]


def _count_rows(batch: Any) -> tf.Tensor:
    return tf.cast(tf.shape(tf.nest.flatten(batch)[0])[0], tf.int64)


def _describe_spec(spec: Any) -> str:
    parts = tf.nest.flatten(spec)
    return ", ".join(f"{part.dtype.name} {tuple(part.shape)}" for part in parts)


def _merge_last_two(batches: tf.data.Dataset, count: int, spec: Any, first: int) -> tf.data.Dataset:
    empty = tf.nest.map_structure(
        lambda part: tf.zeros([0, *(side or 0 for side in part.shape[1:])], part.dtype), spec
    )

    @datasets.no_autograph  # type: ignore[untyped-decorator]
    def step(held: Any, numbered: Any) -> Any:
        number, batch = numbered
        whole = tf.nest.map_structure(lambda *both: tf.concat(both, 0), held, batch)
        is_held = tf.equal(number, count - 2)
        kept = tf.nest.map_structure(lambda part: part[: tf.where(is_held, tf.shape(part)[0], 0)], whole)
        return kept, (is_held, whole)

    scanned = batches.enumerate(first).scan(empty, step)
    return scanned.filter(datasets.no_autograph(lambda is_held, _: tf.logical_not(is_held))).map(
        datasets.no_autograph(lambda _, batch: batch)
    )


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
        if not isinstance(self.class_weight, Mapping | None):
            raise SettingsError(f"class_weight must be a dict of weights by class, not {self.class_weight!r}")
        for index, weight in (self.class_weight or {}).items():
            is_index = isinstance(index, int | np.integer) and index >= 0
            if not is_index or not isinstance(weight, int | float | np.number) or not 0 <= weight < math.inf:
                raise SettingsError(
                    "class_weight must be a dict of weights by class index, such as "
                    f"{{0: 1.0, 1: 5.0}}, and has {index!r}: {weight!r}"
                )

    def read_batches(
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
        steps, times, local_replicas, seed = int(steps or 0), 1, 0, self.seed
        if callable(data):
            local_replicas, seed = max(1, self.replicas // self.workers), self.seed + self.worker
            context = tf.distribute.InputContext(self.workers, self.worker, self.replicas)
            with plugins.calling(f"{name}(context), a function of an input context, failed", SettingsError):
                data = data(context)
            if not isinstance(data, tf.data.Dataset):
                raise SettingsError(f"{name}(context) returned {type(data).__name__}, not a tf.data.Dataset")
        elif isinstance(data, tf.data.Dataset) and self.workers > 1:
            _check_shard_policy(data, name)
        if isinstance(data, tf.data.Dataset):
            if self.batch_size is not None and not local_replicas:
                raise SettingsError(f"batch_size is for arrays, and {name} is a dataset, which has its own")
            if restart and steps and data.cardinality() == tf.data.UNKNOWN_CARDINALITY:
                data = _fail_past_end(data, name, steps * max(1, local_replicas))
            data, times = (data, 1) if restart else datasets.without_repeat(data)
            weighted = self._with_class_weights(datasets.without_prefetch(data))
            source: Any = datasets.DatasetEpochs(weighted, name)
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
            times=times,
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
            return data.map(datasets.no_autograph(lambda x, y: (x, y, self._weigh_labels(y))))
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


def _check_shard_policy(data: tf.data.Dataset, name: str) -> None:
    policy = data.options().experimental_distribute.auto_shard_policy.name
    if policy not in ("AUTO", "DATA"):
        raise SettingsError(
            f"{name} asks for AutoShardPolicy.{policy}, and each process trains on its part of every batch; "
            "leave the policy out, or give a function of an input context, whose dataset is its own"
        )


def _fail_past_end(data: tf.data.Dataset, name: str, count: int) -> tf.data.Dataset:
    specs = tf.nest.flatten(data.element_spec)
    if any(not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None for spec in specs):
        return data

    @datasets.no_autograph  # type: ignore[untyped-decorator]
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
        parts = numpy_function(batch, [number], types)
        for part, spec in zip(parts, tf.nest.flatten(specs), strict=True):
            part.set_shape(spec.shape)
        return tf.nest.pack_sequence_as(specs, parts)

    numbers = tf.data.Dataset.range(count) if count is not None else tf.data.Dataset.counter()
    if seed is not None and count:
        numbers = numbers.shuffle(count, seed=seed)
    return numbers.map(datasets.no_autograph(fetch), num_parallel_calls=max(1, data.workers))
