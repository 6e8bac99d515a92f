"""Sharding: which shards a worker reads, and which example is trained in which step.

An epoch has one global order that does not depend on the number of replicas. Record p of the epoch comes
from shard p mod N, round-robin, because the shards of a split differ by at most one record with the longer
ones first. Replica r of W takes the records with p mod W = r, and a step takes the next W x B records. So
two replicas of batch B train on the same examples in the same step as one replica of batch 2B, and every
example is used exactly once in an epoch, also if it is interrupted and resumed on another number of replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from shardline.trainer.base.errors import SettingsError


class ShardPolicy(NamedTuple):
    """Shard policy ("file", "data" or "chief") and the reason for it, for the log."""

    name: str
    reason: str


@dataclass(frozen=True)
class WorkerShards:
    """Shards that one input worker reads, in round-robin order, and the index of each in the split.

    The worker keeps one record of `keep_every`, starting with number `keep_offset`.
    """

    files: tuple[str, ...]
    indices: tuple[int, ...]
    keep_every: int = 1
    keep_offset: int = 0


def shard_policy(shards: int, workers: int) -> ShardPolicy:
    """Chooses how a number of shards is assigned to a number of input workers."""
    counts = f"{shards} shard{'s' * (shards != 1)}, {workers} input worker{'s' * (workers != 1)}"
    if shards % workers == 0:
        return ShardPolicy("file", f"{counts}: each reads whole shards of its own")
    return ShardPolicy("data", f"{counts}: each reads all shards and keeps its share")


def worker_shards(files: Sequence[str], workers: int, worker: int) -> WorkerShards:
    """Assigns shards to an input worker: those that it opens, and the records that it keeps."""
    indices = tuple(range(len(files)))
    if shard_policy(len(files), workers).name == "data":
        return WorkerShards(tuple(files), indices, keep_every=workers, keep_offset=worker)
    own = indices[worker::workers]
    return WorkerShards(tuple(files[i] for i in own), own)


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
    def step_sizes(self) -> tuple[int, ...]:
        """Examples of each remaining step, over all replicas."""
        return tuple(end - start for start, end in pairwise(self._bounds()))

    def batch_sizes(self, replica: int) -> list[int]:
        """Returns the number of examples that one replica takes in each remaining step."""
        taken = [share(bound, self.replicas, replica) for bound in self._bounds()]
        return [after - before for before, after in pairwise(taken)]

    def _bounds(self) -> list[int]:
        """Returns the first record of each step in the order of the epoch, and the end of the last step."""
        begins = [self.start + step * self.global_batch_size for step in range(self.steps)]
        return [*begins, self.records] if begins else []


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
