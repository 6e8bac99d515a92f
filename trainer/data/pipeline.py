"""Input pipeline of a dataset directory: shards of a split to batches of inputs and labels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import tensorflow as tf

from shardline.trainer.base.errors import SettingsError
from shardline.trainer.checkpoint.state import Position
from shardline.trainer.cluster import strategy as strategies
from shardline.trainer.data.decode import parse_batch
from shardline.trainer.data.examples import Memory, check_targets, load
from shardline.trainer.data.manifest import Manifest, check_files
from shardline.trainer.data.sharding import EpochPlan, RunPlan, WorkerShards, share, worker_shards
from shardline.trainer.data.transforms import (
    Augmentation,
    LabelForm,
    Transform,
    describe_structure,
    form_targets,
)
from shardline.trainer.keras_compat.tensorflow_internals import without_autotuning

#: A batch of undecoded examples: "example", string (batch,), or if they are in memory "position", int64
#: (batch,); and for an augmented split "seed", int64 (batch, 2).
RawBatch = dict[str, tf.Tensor]

#: Data of a Keras step: (x, y) or (x, y, sample_weight), or the result of a transformation.
Data: TypeAlias = Any

#: Location of a shard: path, first position in memory, number of records.
ShardLocation = dict[str, tf.Tensor]

# Shuffle buffer, over all shards: records, and bytes. Preprocessing assigns examples to shards at random, so
# a window over each shard is enough.
_SHUFFLE_RECORDS, _SHUFFLE_BYTES = 16_384, 256 << 20

# Prefetch and read buffers, over all shards: records, and bytes. A remote file system is fastest with large
# reads, but all buffers together should fit the processor's cache: every record is copied out of its buffer.
_PREFETCH_RECORDS, _READ_BYTES = 1024, 16 << 20
_SMALLEST_READ, _LARGEST_READ = 256 << 10, 8 << 20

# Batches of the next epoch that are read, besides its shuffle buffer, while an epoch is trained.
_PREFETCH_BATCHES = 2

# Bytes of a record from which on parallel reading is worth it; shards opened at once.
_LARGE_RECORD, _OPEN_SHARDS = 4096, 32

# Converting these functions, which branch on no tensor, would take longer than tracing them.
_no_autograph = tf.autograph.experimental.do_not_convert

_NAMED_SHARDS = 4  # in a message

# More than the records of a shard, and more epochs than are ever trained.
_SHARD_STRIDE, _UNLIMITED_EPOCHS = 2**32, 2**40


_BEGINNING = Position()


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
    is_per_process = has_sizes = reads_again = False
    padded = None

    directory: Path
    manifest: Manifest
    split: str
    plan: EpochPlan
    shuffle_seed: int | None = None
    augmentation: Augmentation | None = None
    class_weights: Sequence[float] = ()
    transform: Transform | None = None
    in_memory: bool = False
    forms: Mapping[str, LabelForm] = field(default_factory=dict)
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
                raise SettingsError(
                    f"transform makes batches of {describe_structure(made)}, whose examples vary in size; "
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
        return next(iter(self.raw_batches().map(_no_autograph(self.decode)).take(1)))

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
        used = sorted({p % len(files) for p in positions if p % processes == process})
        names = ", ".join(files[index] for index in used[:_NAMED_SHARDS])
        return names + (f" and {len(used) - _NAMED_SHARDS} more shards" if len(used) > _NAMED_SHARDS else "")

    def distribute(
        self,
        strategy: tf.distribute.Strategy,
        worker: int,
        workers: int,
        at: Position = _BEGINNING,
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

        return strategies.distribute(strategy, batches)

    def raw_batches(self, at: Position = _BEGINNING) -> tf.data.Dataset:
        """Returns the undecoded batches of all replicas, one after the other: the input of `decode`."""
        batches = self._batches(1, 0, self._shards(1, 0), range(at.epoch, self.epochs), at.examples)
        return without_autotuning(batches.prefetch(_PREFETCH_BATCHES))

    def worker_dataset(self, workers: int, worker: int, epochs: range, start: int = 0) -> tf.data.Dataset:
        """Returns the batches of one of `workers` input workers: those of its replicas, step by step."""
        shards = self._shards(workers, worker)
        memory = load(shards.files, self.manifest) if self.in_memory else None
        batches = self._batches(workers, worker, shards, epochs, start, in_memory=self.in_memory)
        decode = _no_autograph(lambda raw: self.decode(raw, memory))
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
        formed = form_targets(y, self.manifest.labels, self.forms)
        if self.order:
            return x, tuple(formed[name] for name in self.order)
        if self.class_weights:
            return x, formed, tf.gather(tf.constant(self.class_weights, tf.float32), y)
        return x, formed

    def _shards(self, workers: int, worker: int) -> WorkerShards:
        shards = self.manifest.splits[self.split].shards
        check_files(self.directory, shards)
        paths = [str(self.directory / shard.file) for shard in shards]
        return worker_shards(paths, workers, worker)

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
            local = range(worker, plan.replicas, workers)
            sizes = [size for step in zip(*map(plan.batch_sizes, local), strict=True) for size in step]
            done = share(start, workers, worker)

            @_no_autograph  # type: ignore[untyped-decorator]
            def batches(epoch: tf.Tensor) -> tf.data.Dataset:
                records = self._records(shards, epoch, in_memory=in_memory).skip(done)
                steps = records.batch(plan.per_replica_batch_size).rebatch(sizes or [1]).take(len(sizes))
                return steps.map(_no_autograph(functools.partial(self._raw, epoch)))

            @_no_autograph  # type: ignore[untyped-decorator]
            def every_other(first: tf.Tensor) -> tf.data.Dataset:
                following = tf.data.Dataset.range(first, epochs.stop, 2)
                return following.flat_map(batches).prefetch(_PREFETCH_BATCHES)

            # Even and odd epochs take turns: one is prefetched while the other is trained.
            firsts = tf.data.Dataset.range(epochs.start, min(epochs.start + 2, epochs.stop))
            return firsts.interleave(every_other, cycle_length=2, block_length=max(1, len(sizes)))

        if not start:
            return batches_of_epochs(epochs, 0)
        return batches_of_epochs(epochs[:1], start).concatenate(batches_of_epochs(epochs[1:], 0))

    def _records(self, shards: WorkerShards, epoch: tf.Tensor, *, in_memory: bool) -> tf.data.Dataset:
        """Returns this worker's examples of one epoch, with an augmentation each after its number."""
        split = self.manifest.splits[self.split]
        count, stored = len(split.shards), split.bytes
        buffer = min(_SHUFFLE_RECORDS, _SHUFFLE_BYTES * split.records // max(1, stored))
        window = max(1, buffer // count)
        # By shard and epoch: the order is the same on any number of workers.
        seeded = functools.partial(_fold_in, self.shuffle_seed or 0, 0, epoch)

        @_no_autograph  # type: ignore[untyped-decorator]
        def examples(index: tf.Tensor, location: ShardLocation) -> tf.data.Dataset:
            if in_memory:
                records = tf.data.Dataset.range(location["start"], location["start"] + location["records"])
            else:
                records = tf.data.TFRecordDataset(
                    location["path"],
                    buffer_size=min(max(_READ_BYTES // count, _SMALLEST_READ), _LARGEST_READ),
                ).prefetch(max(1, _PREFETCH_RECORDS // count))
            if self.augmentation is not None:
                records = records.enumerate(start=index * _SHARD_STRIDE)
            if self.shuffle_seed is None:
                return records
            return records.shuffle(window, seed=seeded(index), reshuffle_each_iteration=False)

        lengths = [split.shards[index].records for index in shards.indices]
        starts = [0, *itertools.accumulate(lengths)][:-1]
        locations = {
            "path": list(shards.files),
            "start": tf.constant(starts, tf.int64),
            "records": tf.constant(lengths, tf.int64),
        }
        files = tf.data.Dataset.from_tensor_slices((tf.constant(shards.indices, tf.int64), locations))
        # Handing a small record from thread to thread costs more than reading it; shards of large records are
        # opened in parallel, which matters for remote ones.
        large = not in_memory and stored > _LARGE_RECORD * split.records
        records = files.interleave(
            examples,
            cycle_length=len(shards.files),
            block_length=1,
            # Not AUTOTUNE, which is limited to the number of cores: these threads only wait.
            num_parallel_calls=min(len(shards.files), _OPEN_SHARDS) if large else None,
        )
        return records.shard(shards.keep_every, shards.keep_offset) if shards.keep_every > 1 else records

    def _raw(self, epoch: tf.Tensor, *batch: tf.Tensor) -> RawBatch:
        """Returns a batch of `_records` by name, with seeds of the augmentation by run, epoch and example."""
        *numbers, examples = batch
        name = "example" if examples.dtype == tf.string else "position"
        if not numbers:
            return {name: examples}
        by_epoch = tf.fill(tf.shape(numbers[0]), _fold_in(self.shuffle_seed or 0, epoch))
        return {name: examples, "seed": tf.stack([by_epoch, numbers[0]], axis=1)}


def _fold_in(seed: int, *numbers: int | tf.Tensor) -> tf.Tensor:
    """Returns a seed, a scalar int64, unique to some numbers, which a sum of them would not be."""
    mixed = tf.constant([seed % 2**63, len(numbers)], tf.int64)
    for number in numbers:
        mixed = tf.random.experimental.stateless_fold_in(mixed, tf.cast(number, tf.int64))
    return tf.random.stateless_uniform([], mixed, minval=None, maxval=None, dtype=tf.int64)
