"""Which example is trained in which step: pure arithmetic over the manifest's counts.

An epoch has one global order that does not depend on the number of replicas. Record p of the epoch comes
from shard p mod N, round-robin, because the shards of a split differ by at most one record with the longer
ones first. Replica r of W takes the records with p mod W = r, and a step takes the next W x B records. So
two replicas of batch B train on the same examples in the same step as one replica of batch 2B, and every
example is used exactly once in an epoch.

Where W divides N, a worker's records are whole shards, and it opens only those (policy FILE); elsewhere it
reads all shards and keeps its own records (policy DATA). Both give the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from trainer.errors import SettingsError


@dataclass(frozen=True)
class EpochPlan:
    """The steps of one pass over a split.

    Attributes:
        records: Examples in the split.
        replicas: Replicas that share each step.
        per_replica_batch_size: Examples of a replica in a full step.
    """

    records: int
    replicas: int
    per_replica_batch_size: int

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
        """Steps in the epoch.

        The last one may be smaller, but never leaves a replica without an example: a rest of fewer
        examples than replicas joins the step before it.
        """
        return max(1, (self.records + self.global_batch_size - self.replicas) // self.global_batch_size)

    def batch_sizes(self, replica: int) -> list[int]:
        """Returns the number of examples that one replica takes in each step of the epoch."""
        ends = [step * self.global_batch_size for step in range(self.steps)] + [self.records]
        taken = [(end + self.replicas - 1 - replica) // self.replicas for end in ends]
        return [after - before for before, after in pairwise(taken)]


@dataclass(frozen=True)
class WorkerShards:
    """What one input worker reads.

    Attributes:
        policy: "file" when the worker's records are whole shards, else "data".
        files: Names of the shards to open, in round-robin order.
        indices: Position of each of them in the split.
        keep_every: Of the records read, keep one in this many ...
        keep_offset: ... starting with this one.
    """

    policy: str
    files: tuple[str, ...]
    indices: tuple[int, ...]
    keep_every: int = 1
    keep_offset: int = 0


def worker_shards(files: Sequence[str], workers: int, worker: int) -> WorkerShards:
    """Decides which shards an input worker opens and which of their records it keeps."""
    every = range(len(files))
    if len(files) % workers:
        return WorkerShards("data", tuple(files), tuple(every), keep_every=workers, keep_offset=worker)
    mine = tuple(every[worker::workers])
    return WorkerShards("file", tuple(files[i] for i in mine), mine)
