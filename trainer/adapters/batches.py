"""Stream: a program's own batches as one sequence, the same for every process, to be read from any place.

Each process reads all batches and keeps its replicas' parts of them: replica r of R takes the rows from
r * n // R on of a batch of n. So N processes train on what one would. Data of a function of an input context
is each process's own, as `tf.distribute` has it.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from shardline.trainer.adapters.epochs import Passes
from shardline.trainer.base import progress
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.checkpoint.state import Position
from shardline.trainer.cluster import strategy as strategies
from shardline.trainer.keras_compat.tensorflow_internals import without_autotuning

_AHEAD_BATCHES = 2
# TensorFlow's number of the elements of a dataset without end; more passes than are ever made.
_ENDLESS, _MANY = -1, 2**40

_BEGINNING = Position()

_as_is = tf.autograph.experimental.do_not_convert


class BatchSequence:
    """Batches of some data, pass after pass without end, in epochs of `steps` steps.

    Attributes:
        steps: Steps of an epoch.
        exact: Whether `sizes` are known, and not just what a full batch has.
    """

    #: Whether what `distribute` gives can name the examples of the whole.
    gives_sizes = True

    def __init__(
        self,
        passes: Passes,
        *,
        name: str,
        replicas: int,
        steps: int = 0,
        again: bool = False,
        own: int = 0,
        pads: bool = False,
    ) -> None:
        """Takes the passes that the argument `name` gave.

        Args:
            passes: Of batches that all replicas share.
            name: The argument's name, for messages.
            replicas: How many share a batch.
            steps: Steps of an epoch; 0 for a pass.
            again: Whether every epoch begins with a new pass, of which it may leave a rest out.
            own: How many replicas of this process take a batch each, where the batches are its own; else 0.
            pads: Whether fewer examples than there are replicas are followed by copies of the last.

        Raises:
            SettingsError: The data has no end and no `steps`, no batches, or batches that are too small.
        """
        self._passes, self._name, self._replicas, self._own = passes, name, replicas, own
        #: Whether the batches are each process's own.
        self.is_own = own > 0
        if any(part.shape.rank == 0 for part in tf.nest.flatten(passes.element_spec)):
            raise SettingsError(
                f"{name} yields single values, {_text(passes.element_spec)}; make batches of them, .batch(64)"
            )
        if passes.random:
            progress.report(
                "train",
                f"warning: {name} draws random numbers ({', '.join(passes.random)}), which processes and "
                "resumed runs do not draw alike; use tf.random.stateless_uniform and its like, or layers",
            )
        self.exact = passes.examples is not None and not own
        few = pads and self.exact and passes.examples is not None and passes.examples[0] < replicas
        #: Examples that are followed by copies; None where none are.
        self.padded = passes.examples[0] if few and passes.examples else None
        if passes.cardinality == _ENDLESS and not steps:
            raise SettingsError(f"{name} has no end; give steps_per_epoch (of a validation validation_steps)")
        # Of each batch of a pass; () where a pass has no end, or as many as come.
        self._sizes = self._pass_sizes(counted=not steps)
        if not self._sizes and not steps:
            raise SettingsError(f"{name} has no batches; give at least one example")
        self._own_batches = max(1, own)
        self.steps = steps or len(self._sizes) // self._own_batches
        if again and self._sizes:
            self._sizes = self._sizes[: self.steps * self._own_batches]
        self._again = again

    @property
    def element_spec(self) -> Any:
        """Types and shapes of a batch."""
        return self._passes.element_spec

    @functools.cached_property
    def first(self) -> Any:
        """The first batch."""
        for batch in self.batches().take(1):
            return batch
        raise SettingsError(f"{self._name} has no batches; give at least one example")

    @property
    def described(self) -> str:
        """What the data is, in words: types, shapes and how much of it."""
        known = f", {self._passes.examples[0]} examples" if self._passes.examples else ""
        return f"{_text(self.element_spec)}{known}"

    @property
    def digest(self) -> tuple[str, str]:
        """What is the same on all processes, in words and as a checksum of the first batch's content."""
        if self._own:
            return "", ""
        checksum = 0
        for part in map(np.asarray, tf.nest.flatten(self.first, expand_composites=True)):
            content = repr(part.tolist()).encode() if part.dtype == object else part.tobytes()
            checksum = zlib.crc32(content, checksum)
        return self.described, f"{checksum:08x}"

    def sizes(self, epoch: int) -> Sequence[int]:
        """Returns the examples of each step of an epoch over all replicas, or where unknown of a full one."""
        count, replicas = self.steps, self._replicas - self._replicas % self._own_batches
        if self._own or not self._sizes:
            return [self._full_batch * (replicas if self._own else 1)] * count
        first = 0 if self._again else epoch * count
        known = (self._sizes[step % len(self._sizes)] for step in range(first, first + count))
        return [size or self._full_batch for size in known]

    def batches(self, start: int = 0) -> tf.data.Dataset:
        """Returns the batches from a number on, counted over all passes, without end."""
        in_pass, endless = len(self._sizes), self._passes.cardinality == _ENDLESS
        first, rest = divmod(start, in_pass) if in_pass else (0, start)

        def one_pass(number: tf.Tensor) -> tf.data.Dataset:
            # The same batches in each epoch, wherever a run begins.
            found, known = (
                self._passes.dataset(tf.zeros_like(number) if self._again else number),
                self._passes.examples,
            )
            if known and not self._own and in_pass and self._sizes[-1] > known[1]:
                found = _last_two_joined(found, in_pass + 1, self.element_spec)
            return found.take(self.steps * self._own_batches) if self._again else found

        numbers = tf.data.Dataset.range(first, 1 if endless and not self._again else _MANY)
        found = numbers.flat_map(_as_is(one_pass)).skip(rest)
        options = tf.data.Options()
        options.deterministic = True
        return found.with_options(options)

    def one_by_one(self, at: Position = _BEGINNING) -> tf.data.Dataset:
        """Returns the batches of single steps, for workers that step by themselves: what `decode` takes."""
        return self.batches(at.steps)

    def decode(self, batch: Any) -> Any:
        """Returns what the model takes of such a batch: itself."""
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
        """Returns what the replicas of a process take in each step from a position on, distributed.

        With `sized` each is a pair: the part of a batch, and float32 (), the examples of the whole.
        """
        local = max(1, strategy.num_replicas_in_sync // workers)

        def with_size(*parts: Any) -> Any:
            batch = _joined(parts)
            return batch, tf.cast(_rows(batch) * self._replicas, tf.float32)

        def of_worker() -> tf.data.Dataset:
            batches = self.batches(at.steps * self._own_batches)
            if self._own or self._replicas == 1:
                # Of a process's own the size is that of all, if each replica has as many examples.
                parts = batches.map(_as_is(with_size)) if sized else batches
            else:
                replicas = range(worker * local, (worker + 1) * local)
                parts = batches.flat_map(_as_is(lambda *batch: self._parts(_joined(batch), replicas, sized)))
            ahead = self._passes.ahead
            return without_autotuning(
                parts.prefetch(ahead if ahead < 0 else max(ahead, _AHEAD_BATCHES) * local)
            )

        if strategies.has_one_cpu(strategy):
            return of_worker()
        return strategy.distribute_datasets_from_function(lambda context: of_worker())

    def _parts(self, batch: Any, replicas: range, sized: bool) -> tf.data.Dataset:
        """Returns the parts of a batch for some replicas, one after the other."""
        if self.padded:
            rows = tf.minimum(tf.range(self._replicas), self.padded - 1)
            batch = tf.nest.map_structure(lambda one: tf.gather(one, rows), batch)
        count = _rows(batch)
        if not self.exact and self._replicas > 1:
            tf.debugging.Assert(
                count >= self._replicas,
                [f"{self._name} has a batch of fewer examples than there are replicas"],
            )

        def part(replica: tf.Tensor) -> Any:
            begin, end = (at * count // self._replicas for at in (replica, replica + 1))
            own = tf.nest.map_structure(lambda one: one[begin:end], batch)
            return (own, tf.cast(count, tf.float32)) if sized else own

        return tf.data.Dataset.range(replicas.start, replicas.stop).map(_as_is(part))

    @functools.cached_property
    def _full_batch(self) -> int:
        if self._passes.examples:
            return self._passes.examples[1]
        return int(tf.nest.flatten(self.element_spec)[0].shape[0] or _rows(self.first))

    def _pass_sizes(self, *, counted: bool) -> list[int]:
        if self._passes.examples:
            count, size = self._passes.examples
            sizes = [size] * (count // size) + [count % size] * (count % size > 0)
            if 0 < count < self._replicas and not self._own and not self.padded:
                raise SettingsError(
                    f"{self._name} has {count} example{'s' * (count > 1)} for {self._replicas} replicas, and "
                    "each needs one in every step: use fewer replicas or more data"
                )
            if len(sizes) > 1 and sizes[-1] < min(size, self._replicas) and not self._own:
                sizes[-2:] = [sizes[-2] + sizes[-1]]
            return sizes
        if self._passes.cardinality >= 0 or not counted:
            return [0] * max(0, self._passes.cardinality)
        progress.report(
            "train",
            f"counting the batches of {self._name}, which does not know their number; give steps_per_epoch, "
            "or of a validation validation_steps, to leave this out",
        )
        first = tf.data.Dataset.range(1).flat_map(_as_is(self._passes.dataset))
        return [int(rows) for rows in first.map(_as_is(lambda *batch: _rows(_joined(batch))))]


def _joined(batch: tuple[Any, ...]) -> Any:
    """Returns a batch as it is, of which tf.data hands a function the parts."""
    return batch if len(batch) > 1 else batch[0]


def _rows(batch: Any) -> tf.Tensor:
    return tf.cast(tf.shape(tf.nest.flatten(batch)[0])[0], tf.int64)


def _text(spec: Any) -> str:
    parts = tf.nest.flatten(spec)
    return ", ".join(f"{part.dtype.name} {tuple(part.shape)}" for part in parts)


def _last_two_joined(batches: tf.data.Dataset, count: int, spec: Any) -> tf.data.Dataset:
    """Returns batches of which the last has too few examples, and becomes part of the one before it."""
    none = tf.nest.map_structure(
        lambda one: tf.zeros([0, *(side or 0 for side in one.shape[1:])], one.dtype), spec
    )

    @_as_is  # type: ignore[untyped-decorator]
    def step(held: Any, numbered: Any) -> Any:
        number, batch = numbered
        whole = tf.nest.map_structure(lambda *both: tf.concat(both, 0), held, batch)
        is_held = tf.equal(number, count - 2)
        kept = tf.nest.map_structure(lambda one: one[: tf.where(is_held, tf.shape(one)[0], 0)], whole)
        return kept, (is_held, whole)

    scanned = batches.enumerate().scan(none, step)
    return scanned.filter(_as_is(lambda is_held, _: tf.logical_not(is_held))).map(
        _as_is(lambda _, batch: batch)
    )
