"""Which example is trained in which step: pure arithmetic over the manifest's counts.

An epoch has one global order that does not depend on the number of replicas. Record p of the epoch comes
from shard p mod N, round-robin, because the shards of a split differ by at most one record with the longer
ones first. Replica r of W takes the records with p mod W = r, and a step takes the next W x B records. So
two replicas of batch B train on the same examples in the same step as one replica of batch 2B, and every
example is used exactly once in an epoch, also where the epoch is interrupted and goes on with another
number of replicas or another batch size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from shardline.trainer.errors import SettingsError


@dataclass(frozen=True)
class EpochPlan:
    """The steps of one pass over a split, or of the rest of one.

    Attributes:
        records: Examples in the split.
        replicas: Replicas that share each step.
        per_replica_batch_size: Examples of a replica in a full step.
        start: Examples of the epoch that are trained already.
    """

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
        """Steps that are left in the epoch.

        The last one may be smaller, but never leaves a replica without an example: a rest of fewer
        examples than replicas joins the step before it. Where there is no step before it, because the
        epoch goes on with more replicas than it began with, the rest is left out.
        """
        left = self.records - self.start
        return max(0, (left + self.global_batch_size - self.replicas) // self.global_batch_size)

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Examples of each step that is left, over all replicas."""
        return tuple(end - start for start, end in pairwise(self._bounds()))

    def batch_sizes(self, replica: int) -> list[int]:
        """Returns the number of examples that one replica takes in each step that is left."""
        taken = [share(bound, self.replicas, replica) for bound in self._bounds()]
        return [after - before for before, after in pairwise(taken)]

    def _bounds(self) -> list[int]:
        """Returns where each step begins in the order of the epoch, and where the last one ends."""
        begins = [self.start + step * self.global_batch_size for step in range(self.steps)]
        return [*begins, self.records] if begins else []


def share(records: int, parts: int, part: int) -> int:
    """Returns how many of the first `records` numbers 0, 1, ... leave the remainder `part` mod `parts`."""
    return (records + parts - 1 - part) // parts
