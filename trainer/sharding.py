"""Sharding: which shards a worker reads, and which example is trained in which step.

An epoch has one global order that does not depend on the number of replicas. The shards of a split form S
streams: stream s reads the shards with i mod S = s, one after the other, in an order of its own. Up to 64
shards are a stream each; of more shards, 64 streams at most bound the open files. Record p of the epoch comes
from stream p mod S, round-robin: shards differ by at most one record with the longer ones first, and so do
streams where S divides the number of shards. Replica r of W takes the records with p mod W = r, and a step
takes the next W x B records. So two replicas of batch B train on the same examples in the same step as one
replica of batch 2B, and every example is used exactly once in an epoch, also if it is interrupted and resumed
on another number of replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shardline.trainer.base.errors import SettingsError

# Most streams of a split, and a number of them that divides the shards but is too small to read quickly.
_MOST_STREAMS, _FEW_STREAMS = 64, 8


class ShardPolicy(NamedTuple):
    """Shard policy ("file", "data" or "chief") and the reason for it, for the log."""

    name: str
    reason: str


@dataclass(frozen=True)
class WorkerShards:
    """Shards that one input worker reads, and its streams in round-robin order, by numbers in the split.

    The worker keeps one record of `keep_every`, starting with number `keep_offset`.
    """

    indices: range
    streams: range
    keep_every: int = 1
    keep_offset: int = 0


def stream_count(shards: int, readers: int = 1) -> int:
    """Returns the number of streams of a split that was written for a number of input workers.

    It divides the number of shards, so that workers read shards of their own, and is a multiple of `readers`
    and of many other numbers of workers. If few or no numbers divide, it is the largest.
    """
    if shards <= _MOST_STREAMS:
        return shards
    divisors = [n for n in range(1, max(_MOST_STREAMS, readers) + 1) if shards % n == 0]
    best = max(divisors, key=lambda n: (n % readers == 0, sum(n % other == 0 for other in divisors), n))
    return best if best >= _FEW_STREAMS else _MOST_STREAMS


def shard_policy(shards: int, streams: int, workers: int) -> ShardPolicy:
    """Chooses how shards in a number of streams are assigned to a number of input workers."""
    counts = f"{shards} shard{'s' * (shards != 1)}, {workers} input worker{'s' * (workers != 1)}"
    if shards % streams == 0 and streams % workers == 0:
        return ShardPolicy("file", f"{counts}: each reads whole shards of its own")
    return ShardPolicy("data", f"{counts}: each reads all shards and keeps its share")


def worker_shards(shards: int, streams: int, workers: int, worker: int) -> WorkerShards:
    """Assigns shards to an input worker: those that it reads, and the records that it keeps."""
    if shard_policy(shards, streams, workers).name == "data":
        return WorkerShards(range(shards), range(streams), keep_every=workers, keep_offset=worker)
    return WorkerShards(range(worker, shards, workers), range(worker, streams, workers))


@dataclass(frozen=True)
class StepSizes(Sequence[int]):
    """Examples of each of `steps` steps: `full`, and `last` in the last one."""

    steps: int
    full: int
    last: int

    def __len__(self) -> int:
        """Returns the number of steps."""
        return self.steps

    def __getitem__(self, at: Any) -> Any:
        """Returns the examples of a step, from 0, or of several that follow each other."""
        steps = range(self.steps)[at]
        if isinstance(steps, int):
            return self.last if steps == self.steps - 1 else self.full
        return StepSizes(len(steps), self.full, self[steps[-1]] if steps else self.full)


@dataclass(frozen=True)
class EpochPlan:
    """Steps of an epoch over the records of a split, of which the first `start` are trained already."""

    records: int
    replicas: int
    per_replica_batch_size: int
    start: int = 0

    def __post_init__(self) -> None:
        if self.records < self.replicas:
            raise SettingsError(
                f"{self.records} examples are too few for {self.replicas} replicas; each needs at least one "
                "per step: use fewer replicas or more data"
            )

    @property
    def global_batch_size(self) -> int:
        """Examples in a full step."""
        return self.replicas * self.per_replica_batch_size

    @property
    def steps(self) -> int:
        """Remaining steps of the epoch.

        A remainder of fewer examples than replicas joins the step before it; without one it is left out.
        """
        remaining = self.records - self.start
        return max(0, (remaining + self.global_batch_size - self.replicas) // self.global_batch_size)

    @property
    def first_step(self) -> int:
        """Number of the first remaining step within the epoch, from 0."""
        return replace(self, start=0).steps - self.steps if self.start else 0

    @property
    def step_sizes(self) -> StepSizes:
        """Examples of each remaining step, over all replicas."""
        return StepSizes(self.steps, self.global_batch_size, self.records - self._last_step)

    def batch_sizes(self, replica: int) -> StepSizes:
        """Returns the number of examples that one replica takes in each remaining step."""
        done, whole = (share(bound, self.replicas, replica) for bound in (self._last_step, self.records))
        return StepSizes(self.steps, self.per_replica_batch_size, whole - done)

    @property
    def _last_step(self) -> int:
        """The first record of the last step in the order of the epoch."""
        return self.start + (self.steps - 1) * self.global_batch_size


class RunPlan(NamedTuple):
    """Remaining steps of an epoch of any data.

    Attributes:
        start: Examples of the epoch that are trained already.
        first_step: Number of the first remaining step within the epoch, from 0.
        step_sizes: Examples of each remaining step, over all replicas.
    """

    start: int
    first_step: int
    step_sizes: Sequence[int]


def share(records: int, parts: int, part: int) -> int:
    """Returns how many of the first `records` numbers 0, 1, ... leave the remainder `part` mod `parts`."""
    return (records + parts - 1 - part) // parts
