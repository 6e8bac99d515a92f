"""Batch sequence: a program's own batches in one order on all processes, readable from any step on.

Each process reads all batches and keeps its replicas' parts of them: replica r of R takes the rows of a batch
of n from r * n // R on. So N processes train on the same examples as one. The dataset of a function of an
input context is per process, as in `tf.distribute`.
"""

from __future__ import annotations

import functools
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import tensorflow as tf

from shardline.trainer.adapters.epochs import EpochSource
from shardline.trainer.base import progress
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.checkpoint.state import Position
from shardline.trainer.cluster import strategy as strategies
from shardline.trainer.keras_compat.tensorflow_internals import without_autotuning

_PREFETCH_BATCHES = 2
# Cardinality of an infinite dataset; more epochs than are ever trained.
_INFINITE, _UNLIMITED_EPOCHS = -1, 2**40

_BEGINNING = Position()

_no_autograph = tf.autograph.experimental.do_not_convert


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
        few = pad and self.exact and source.examples is not None and source.examples[0] < replicas
        #: Number of examples before the padding; None without padding.
        self.padded = source.examples[0] if few and source.examples else None
        if source.cardinality == _INFINITE and not steps:
            raise SettingsError(f"{name} has no end; give steps_per_epoch (of a validation validation_steps)")
        # Sizes of all batches of the data, 0 for an unknown one; empty if their number is unknown.
        self._sizes = self._count_batch_sizes(counted=not steps)
        if not self._sizes and not steps:
            raise SettingsError(f"{name} has no batches; give at least one example")
        self._batches_per_step = max(1, local_replicas)
        self.steps = steps or len(self._sizes) // self._batches_per_step
        if restart and self._sizes:
            self._sizes = self._sizes[: self.steps * self._batches_per_step]
        self._restart = restart
        # Whether the number of replicas decides which batch is the last: see `next_step`.
        self._whole = self.exact and not steps

    @property
    def element_spec(self) -> Any:
        """Types and shapes of a batch."""
        return self._source.element_spec

    @functools.cached_property
    def first_batch(self) -> Any:
        """The first batch."""
        for batch in self.batches().take(1):
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
        if self._local_replicas or not self._sizes:
            return [self._full_batch * (replicas if self._local_replicas else 1)] * count
        first = 0 if self._restart else epoch * count
        known = (self._sizes[step % len(self._sizes)] for step in range(first, first + count))
        return [size or self._full_batch for size in known]

    @property
    def fixed(self) -> dict[str, int]:
        """Counts that a resumed run cannot change; the number of replicas may change `steps` by one."""
        if self._whole:
            return {"steps_per_epoch": self._source.cardinality}
        return {"steps_per_epoch": self.steps, "batches": len(self._sizes)}

    def next_step(self, at: Position) -> int:
        """Returns the number of a position's next step within its epoch, by the examples before it."""
        if not self._whole:
            return at.steps - at.epoch * self.steps
        return bisect_left(list(accumulate(self.sizes(at.epoch), initial=0)), at.examples)

    def batches(self, start: int = 0) -> tf.data.Dataset:
        """Returns the batches from number `start` on, counted over all epochs, without end."""
        in_epoch, endless = len(self._sizes), self._source.cardinality == _INFINITE
        first, rest = divmod(start, in_epoch) if in_epoch else (0, start)

        def one_epoch(number: tf.Tensor) -> tf.data.Dataset:
            known, batches = self._source.examples, self._source.dataset(number)
            if known and not self._local_replicas and in_epoch and self._sizes[-1] > known[1]:
                batches = _merge_last_two(batches, in_epoch + 1, self.element_spec)
            return batches.take(self.steps * self._batches_per_step) if self._restart else batches

        numbers = tf.data.Dataset.range(first, 1 if endless and not self._restart else _UNLIMITED_EPOCHS)
        batches = numbers.flat_map(_no_autograph(one_epoch)).skip(rest)
        if first and self._source.drawing:
            # To begin an epoch draws its order, so those before are begun, and if need be read.
            whole, nothing = min(first, self._source.read_whole), tf.data.Dataset.range(0)
            if whole:
                text = f"reading epochs of {self._name} again, {whole} of {first}, for the order of the next"
                progress.report("train", text)

            def begin(number: tf.Tensor) -> tf.data.Dataset:
                drawing = [data.map(_no_autograph(lambda *_: number)) for data in self._source.drawing]
                begun = tf.data.Dataset.choose_from_datasets([nothing, *drawing], nothing)
                return begun.flat_map(_no_autograph(self._source.dataset))  # no batches

            past = tf.data.Dataset.range(whole).flat_map(_no_autograph(self._source.dataset))
            past = past.concatenate(tf.data.Dataset.range(whole, first).flat_map(_no_autograph(begin)))
            batches = past.filter(_no_autograph(lambda *_: False)).concatenate(batches)
        options = tf.data.Options()
        options.deterministic = True
        return batches.with_options(options)

    def raw_batches(self, at: Position = _BEGINNING) -> tf.data.Dataset:
        """Returns the batches of single steps, the input of `decode`, for the parameter server strategy."""
        return self.batches(at.epoch * self.steps + self.next_step(at))

    def decode(self, batch: Any) -> Any:
        """Returns the batch unchanged."""
        return batch

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

        With `sized` each element is a pair: the part of a batch, and float32 (), the examples of the batch.
        """
        local = max(1, strategy.num_replicas_in_sync // workers)

        def with_size(*parts: Any) -> Any:
            batch = _repack(parts)
            return batch, tf.cast(_count_rows(batch) * self._replicas, tf.float32)

        def worker_batches() -> tf.data.Dataset:
            steps = at.epoch * self.steps + self.next_step(at)
            batches = self.batches(steps * self._batches_per_step)
            if self._local_replicas or self._replicas == 1:
                # Replicas with per-process data are assumed to have equally large batches.
                parts = batches.map(_no_autograph(with_size)) if sized else batches
            else:
                replicas = range(worker * local, (worker + 1) * local)
                parts = batches.flat_map(
                    _no_autograph(lambda *batch: self._replica_parts(_repack(batch), replicas, sized))
                )
            return without_autotuning(parts.prefetch(_PREFETCH_BATCHES * local))

        if strategies.has_one_cpu(strategy):
            return worker_batches()
        return strategy.distribute_datasets_from_function(lambda context: worker_batches())

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

        return tf.data.Dataset.range(replicas.start, replicas.stop).map(_no_autograph(part))

    @functools.cached_property
    def _full_batch(self) -> int:
        if self._source.examples:
            return self._source.examples[1]
        return int(tf.nest.flatten(self.element_spec)[0].shape[0] or _count_rows(self.first_batch))

    def _count_batch_sizes(self, *, counted: bool) -> list[int]:
        if self._source.examples:
            count, size = self._source.examples
            sizes = [size] * (count // size) + [count % size] * (count % size > 0)
            if 0 < count < self._replicas and not self._local_replicas and not self.padded:
                raise SettingsError(
                    f"{self._name} has {count} example{'s' * (count > 1)} for {self._replicas} replicas, and "
                    "each needs one in every step: use fewer replicas or more data"
                )
            if len(sizes) > 1 and sizes[-1] < min(size, self._replicas) and not self._local_replicas:
                sizes[-2:] = [sizes[-2] + sizes[-1]]
            return sizes
        if self._source.cardinality >= 0 or not counted:
            return [0] * max(0, self._source.cardinality)
        progress.report(
            "train",
            f"counting the batches of {self._name}, which does not know their number; give steps_per_epoch, "
            "or of a validation validation_steps, to leave this out",
        )
        first = tf.data.Dataset.range(1).flat_map(_no_autograph(self._source.dataset))
        return [int(rows) for rows in first.map(_no_autograph(lambda *batch: _count_rows(_repack(batch))))]


def _repack(batch: tuple[Any, ...]) -> Any:
    return batch if len(batch) > 1 else batch[0]


def _count_rows(batch: Any) -> tf.Tensor:
    return tf.cast(tf.shape(tf.nest.flatten(batch)[0])[0], tf.int64)


def _describe_spec(spec: Any) -> str:
    parts = tf.nest.flatten(spec)
    return ", ".join(f"{part.dtype.name} {tuple(part.shape)}" for part in parts)


def _merge_last_two(batches: tf.data.Dataset, count: int, spec: Any) -> tf.data.Dataset:
    """Merges the last of `count` batches, too small for the replicas, into the one before it."""
    empty = tf.nest.map_structure(
        lambda part: tf.zeros([0, *(side or 0 for side in part.shape[1:])], part.dtype), spec
    )

    @_no_autograph  # type: ignore[untyped-decorator]
    def step(held: Any, numbered: Any) -> Any:
        number, batch = numbered
        whole = tf.nest.map_structure(lambda *both: tf.concat(both, 0), held, batch)
        is_held = tf.equal(number, count - 2)
        kept = tf.nest.map_structure(lambda part: part[: tf.where(is_held, tf.shape(part)[0], 0)], whole)
        return kept, (is_held, whole)

    scanned = batches.enumerate().scan(empty, step)
    return scanned.filter(_no_autograph(lambda is_held, _: tf.logical_not(is_held))).map(
        _no_autograph(lambda _, batch: batch)
    )
