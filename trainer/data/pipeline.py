"""Input pipeline of a dataset directory: shards of a split to batches of inputs and labels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import tensorflow as tf

from shardline.trainer.base import files
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.checkpoint import BEGINNING, Position
from shardline.trainer.data import transforms
from shardline.trainer.data.examples import Memory, check_targets, load_examples, parse_batch
from shardline.trainer.distribute import distribute_dataset
from shardline.trainer.keras_compat.datasets import no_autograph
from shardline.trainer.keras_compat.tensorflow_internals import without_autotuning
from shardline.trainer.manifest import Manifest, check_files
from shardline.trainer.sharding import EpochPlan, RunPlan, WorkerShards, share, worker_shards

#: A batch of undecoded examples: "example", string (batch,), or if they are in memory "position", int64
#: (batch,); and for an augmented split "seed", int64 (batch, 2).
RawBatch = dict[str, tf.Tensor]

#: Data of a Keras step: (x, y) or (x, y, sample_weight), or the result of a transformation.
Data: TypeAlias = Any

# Shuffle buffer, over all shards: records, and bytes. Preprocessing assigns examples to shards at random, so
# a window over each shard is enough.
_SHUFFLE_RECORDS, _SHUFFLE_BYTES = 16_384, 256 << 20

# Records prefetched (large ones of all streams, small ones in batches after the shuffle), and bytes of all
# read buffers. A remote file system is fastest with large reads, but all buffers together should fit the
# processor's cache: every record is copied out of its buffer.
_PREFETCH_RECORDS, _READ_BYTES = 1024, 16 << 20
_SMALLEST_READ, _LARGEST_READ = 256 << 10, 8 << 20

# Decoded batches that wait for a step.
_PREFETCH_BATCHES = 2

# Bytes of a record from which on parallel reading is worth it; threads that read.
_LARGE_RECORD, _READ_THREADS = 4096, 32

_NAMED_SHARDS = 4  # in a message

# More than the records of a stream, and more epochs than are ever trained.
_STREAM_STRIDE, _UNLIMITED_EPOCHS = 2**32, 2**40


@dataclass(frozen=True)
class InputPipeline:
    """One split of a dataset directory, ready to be distributed.

    Attributes:
        plan: Steps and batch sizes of one epoch.
        shuffle_seed: Seed of each epoch's order and of the augmentation; None keeps the shards' order.
        augmentation: Function applied to each example; None for none.
        class_weights: Weight of each class's examples in the loss; () for elements without weights.
        transform: Function from a batch to the model's data; None for the batch itself.
        in_memory: Whether each worker decodes its examples once, before the first batch, and keeps them.
        forms: Forms of labels that differ from `DEFAULT_FORMS`, by name. A transformation gets targets as
            they are stored.
        order: Names of the labels in the order of a model's list of outputs; () for a dict.
    """

    #: As of `adapters.BatchSequence`.
    is_per_process = has_sizes = False
    padded = None

    directory: Path
    manifest: Manifest
    split: str
    plan: EpochPlan
    shuffle_seed: int | None = None
    augmentation: transforms.Augmentation | None = None
    class_weights: Sequence[float] = ()
    transform: transforms.Transform | None = None
    in_memory: bool = False
    forms: Mapping[str, transforms.LabelForm] = field(default_factory=dict)
    order: Sequence[str] = ()
    epochs: int = _UNLIMITED_EPOCHS

    @property
    def element_spec(self) -> Data:
        """Types and shapes of the result of `decode`: a tf.TensorSpec for each tensor, of any batch size.

        Raises SettingsError if a transformation makes examples that vary in size.
        """
        raw = {"example": tf.TensorSpec([None], tf.string)}
        if self.augmentation is not None:
            raw["seed"] = tf.TensorSpec([None, 2], tf.int64)
        made = tf.function(self.decode, autograph=False).get_concrete_function(raw).structured_outputs
        for part in tf.nest.flatten(made):
            if not isinstance(part, tf.TensorSpec | tf.Tensor) or not part.shape[1:].is_fully_defined():
                found = transforms.describe_structure(made)
                raise SettingsError(
                    f"transform makes batches of {found}, whose examples vary in size; "
                    "give all one size, as by padding (to_tensor(shape=[None, 64]) of a ragged tensor)"
                )
        return tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape, part.dtype), made)

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.plan.steps

    @functools.cached_property
    def first_batch(self) -> Data:
        """The first batch."""
        return next(iter(self.raw_batches().map(no_autograph(self.decode)).take(1)))

    @property
    def description(self) -> str:
        """The split and the dataset's fingerprint."""
        return f"{self.split} of {self.manifest.fingerprint}"

    @property
    def digest(self) -> tuple[str, str]:
        """The description, without a checksum."""
        return self.description, ""

    @property
    def fixed(self) -> dict[str, int]:
        """Counts that a resumed run cannot change; the number of replicas may change `steps` by one."""
        return {"steps_per_epoch": -(-self.plan.records // self.plan.global_batch_size)}

    def epoch(self, at: Position) -> RunPlan:
        """Returns the remaining steps of the epoch of a position."""
        plan = replace(self.plan, start=at.examples)
        return RunPlan(plan.start, plan.first_step, plan.step_sizes)

    def source(self, plan: RunPlan, step: int, process: int, processes: int) -> str:
        """Returns the names of the shards of a process's examples in a step."""
        files = [shard.file for shard in self.manifest.splits[self.split].shards]
        first = plan.start + sum(plan.step_sizes[:step])
        positions = range(first, first + plan.step_sizes[step])
        streams = self.manifest.streams(self.split)
        own = {p % streams for p in positions if p % processes == process}
        # Of streams that differ by more than a record, any may be among the last ones of an epoch.
        used = [index for index in range(len(files)) if index % streams in own or len(files) % streams]
        names = ", ".join(files[index] for index in used[:_NAMED_SHARDS])
        return names + (f" and {len(used) - _NAMED_SHARDS} more shards" if len(used) > _NAMED_SHARDS else "")

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

        It begins at a position and ends with the last epoch; elements are those of `decode`.
        """

        def batches() -> tf.data.Dataset:
            data = self.worker_dataset(workers, worker, range(at.epoch, self.epochs), at.examples)
            # Repeated: before every step TensorFlow would ask all workers, in an exchange of its own, whether
            # a finite dataset still has data (input_lib.py, `_calculate_replicas_with_values`).
            return data.repeat()

        return distribute_dataset(strategy, batches)

    def raw_batches(self, at: Position = BEGINNING) -> tf.data.Dataset:
        """Returns the undecoded batches of all replicas, one after the other: the input of `decode`."""
        batches = self._batches(1, 0, self._shards(1, 0), range(at.epoch, self.epochs), at.examples)
        return without_autotuning(batches.prefetch(_PREFETCH_BATCHES))

    def worker_dataset(self, workers: int, worker: int, epochs: range, start: int = 0) -> tf.data.Dataset:
        """Returns the batches of one of `workers` input workers: those of its replicas, step by step."""
        shards = self._shards(workers, worker)
        own = self._paths()[shards.indices.start : shards.indices.stop : shards.indices.step]
        memory = load_examples(own, self.manifest) if self.in_memory else None
        batches = self._batches(workers, worker, shards, epochs, start, in_memory=self.in_memory)
        decode = no_autograph(lambda raw: self.decode(raw, memory))
        decoded = batches.map(decode, num_parallel_calls=tf.data.AUTOTUNE)
        return without_autotuning(decoded.prefetch(_PREFETCH_BATCHES))

    def decode(self, raw: RawBatch, memory: Memory | None = None) -> Data:
        """Decodes, checks, augments and weights a batch, from `memory` if it has positions.

        Returns (x, y), or (x, y, sample_weight) with class weights. x is uint8 (batch, height, width,
        channels), or for a table a dict of its columns, each (batch,); y is the label in its form, or a dict
        or tuple of several; sample_weight is float32 (batch,). A transformation returns its own structure.
        """
        if memory is None:
            x, y = parse_batch(raw["example"], self.manifest.inputs, self.manifest.labels)
        else:
            x, y = tf.nest.map_structure(lambda values: tf.gather(values, raw["position"]), memory)
        y = check_targets(y, self.manifest.labels, self.split)
        if self.augmentation is not None:
            augment = self.augmentation
            same = tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape[1:], part.dtype), (x, y))
            x, y = tf.map_fn(lambda example: augment(*example), (x, y, raw["seed"]), fn_output_signature=same)
        if self.transform is not None:
            return self.transform(x, y)
        formed = transforms.form_targets(y, self.manifest.labels, self.forms)
        if self.order:
            return x, tuple(formed[name] for name in self.order)
        if self.class_weights:
            return x, formed, tf.gather(tf.constant(self.class_weights, tf.float32), y)
        return x, formed

    @property
    def _is_large(self) -> bool:
        """Whether streams are read in parallel, which matters for remote shards.

        Handing a small record from thread to thread costs more than reading it.
        """
        split = self.manifest.splits[self.split]
        return split.bytes > _LARGE_RECORD * split.records

    def _paths(self) -> list[str]:
        return [str(self.directory / shard.file) for shard in self.manifest.splits[self.split].shards]

    def _shards(self, workers: int, worker: int) -> WorkerShards:
        shards = self.manifest.splits[self.split].shards
        check_files(self.directory, shards)
        assigned = worker_shards(len(shards), self.manifest.streams(self.split), workers, worker)
        # The next epoch is read while one is trained.
        opened = 1 if self.in_memory else min(2, self.epochs) * len(assigned.streams)
        files.check_open_files(opened, "shards of the dataset")
        return assigned

    def _batches(
        self,
        workers: int,
        worker: int,
        shards: WorkerShards,
        epochs: range,
        start: int,
        *,
        in_memory: bool = False,
    ) -> tf.data.Dataset:
        """Returns one worker's undecoded batches over several epochs, the first of them from `start` on."""

        def batches_of_epochs(epochs: range, start: int) -> tf.data.Dataset:
            plan = replace(self.plan, start=start)
            # Replicas worker, worker + workers, ... are on this worker and take its elements in turn.
            local = [plan.batch_sizes(replica) for replica in range(worker, plan.replicas, workers)]
            size, count = plan.per_replica_batch_size, plan.steps * len(local)
            last = [sizes[-1] for sizes in local] if count else []
            # Full batches, of which there may be millions, and those of the last step.
            sizes = tf.concat([tf.fill([max(1, count) - len(last)], tf.constant(size, tf.int64)), last], 0)
            done = share(start, workers, worker)
            prefetched = max(_PREFETCH_BATCHES, 0 if self._is_large else _PREFETCH_RECORDS // size)

            @no_autograph  # type: ignore[untyped-decorator]
            def batches(epoch: tf.Tensor) -> tf.data.Dataset:
                records = self._records(shards, epoch, in_memory=in_memory).skip(done)
                steps = records.batch(size).rebatch(sizes).take(count)
                return steps.map(no_autograph(functools.partial(self._raw, epoch)))

            @no_autograph  # type: ignore[untyped-decorator]
            def every_other(first: tf.Tensor) -> tf.data.Dataset:
                following = tf.data.Dataset.range(first, epochs.stop, 2)
                return following.flat_map(batches).prefetch(prefetched)

            # Even and odd epochs take turns: one is prefetched while the other is trained.
            firsts = tf.data.Dataset.range(epochs.start, min(epochs.start + 2, epochs.stop))
            return firsts.interleave(every_other, cycle_length=2, block_length=max(1, count))

        if not start:
            return batches_of_epochs(epochs, 0)
        return batches_of_epochs(epochs[:1], start).concatenate(batches_of_epochs(epochs[1:], 0))

    def _records(self, shards: WorkerShards, epoch: tf.Tensor, *, in_memory: bool) -> tf.data.Dataset:
        """Returns this worker's examples of one epoch, with an augmentation each after its number."""
        split, streams = self.manifest.splits[self.split], self.manifest.streams(self.split)
        buffer = min(_SHUFFLE_RECORDS, _SHUFFLE_BYTES * split.records // max(1, split.bytes))
        paths, read_bytes = tf.constant(self._paths()), _READ_BYTES // streams
        kept = [shard.records * (at in shards.indices) for at, shard in enumerate(split.shards)]
        ends = tf.constant([*itertools.accumulate(kept)], tf.int64)  # in memory
        # By stream and epoch: the order is the same on any number of workers.
        seeded = functools.partial(fold_in, self.shuffle_seed or 0, 3, 0, epoch)

        @no_autograph  # type: ignore[untyped-decorator]
        def positions(end: tf.Tensor, records: tf.Tensor) -> tf.data.Dataset:
            return tf.data.Dataset.range(end - records, end)

        @no_autograph  # type: ignore[untyped-decorator]
        def examples(stream: tf.Tensor) -> tf.data.Dataset:
            own = tf.range(stream, len(split.shards), streams, tf.int64)
            if self.shuffle_seed is not None and streams < len(split.shards):
                own = tf.random.experimental.stateless_shuffle(own, tf.stack([seeded(stream), 0]))
            if in_memory:
                bounds = (tf.gather(ends, own), tf.gather(tf.constant(kept, tf.int64), own))
                records = tf.data.Dataset.from_tensor_slices(bounds).flat_map(positions)
            else:
                records = tf.data.TFRecordDataset(
                    tf.gather(paths, own), buffer_size=min(max(read_bytes, _SMALLEST_READ), _LARGEST_READ)
                )
                if self._is_large:
                    records = records.prefetch(max(1, _PREFETCH_RECORDS // streams))
            if self.augmentation is not None:
                records = records.enumerate(start=stream * _STREAM_STRIDE)
            if self.shuffle_seed is None:
                return records
            window = max(1, buffer // streams)
            return records.shuffle(window, seed=seeded(stream), reshuffle_each_iteration=False)

        own = shards.streams
        records = tf.data.Dataset.range(own.start, own.stop, own.step).interleave(
            examples,
            cycle_length=len(own),
            block_length=1,
            # Not AUTOTUNE, which is limited to the number of cores: these threads only wait.
            num_parallel_calls=min(len(own), _READ_THREADS) if self._is_large and not in_memory else None,
        )
        return records.shard(shards.keep_every, shards.keep_offset) if shards.keep_every > 1 else records

    def _raw(self, epoch: tf.Tensor, *batch: tf.Tensor) -> RawBatch:
        """Returns a batch of `_records` by name, with seeds of the augmentation by run, epoch and example."""
        *numbers, examples = batch
        name = "example" if examples.dtype == tf.string else "position"
        if not numbers:
            return {name: examples}
        by_epoch = tf.fill(tf.shape(numbers[0]), fold_in(self.shuffle_seed or 0, 1, epoch))
        return {name: examples, "seed": tf.stack([by_epoch, numbers[0]], axis=1)}


def fold_in(seed: int, kind: int, *numbers: int | tf.Tensor) -> tf.Tensor:
    """Returns a seed, a scalar int64, unique to a kind and some numbers, which a sum of them would not be."""
    mixed = tf.constant([seed % 2**63, kind], tf.int64)
    for number in numbers:
        mixed = tf.random.experimental.stateless_fold_in(mixed, tf.cast(number, tf.int64))
    return tf.random.stateless_uniform([], mixed, minval=None, maxval=None, dtype=tf.int64)
