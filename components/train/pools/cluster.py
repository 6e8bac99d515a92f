"""The cluster of a training job: who is in which worker pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardline.components.train.pools.pool import WorkerPool
from shardline.trainer.errors import SettingsError

#: The platform's own program for a Reduction Server.
REDUCTION_SERVER_IMAGE = "us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"

#: A slot without replicas. The API skips a pool that is "an empty value", but the launcher takes empty
#: objects and zeros out of its payload, which moves the pools behind them to other roles. The text "0" is
#: neither empty nor zero to the launcher; its client then reads it as the number (int64 is text in
#: JSON), and a WorkerPoolSpec whose only field is 0 is the empty message, of no bytes.
EMPTY_POOL: Mapping[str, Any] = {"replica_count": "0"}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines of a training job, by role.

    The platform knows a role by the index of the pool: 0 is the chief, 1 workers, 2 parameter servers or
    Reduction Server, 3 evaluators.

    Attributes:
        chief: One replica.
        workers: Replicas that train beside the chief.
        parameter_servers: Replicas that hold the variables (ParameterServerStrategy).
        reduction_server: Replicas that add up the gradients of GPU workers; in the parameter servers' slot.
        evaluator: Replicas that evaluate checkpoints beside the training.
    """

    chief: WorkerPool
    workers: WorkerPool | None = None
    parameter_servers: WorkerPool | None = None
    reduction_server: WorkerPool | None = None
    evaluator: WorkerPool | None = None

    def __post_init__(self) -> None:
        if self.chief.replica_count != 1:
            raise SettingsError(
                f"the chief is one replica, got replica_count {self.chief.replica_count}; "
                "further replicas are workers"
            )
        if self.parameter_servers and self.reduction_server:
            raise SettingsError(
                "parameter_servers and reduction_server share one worker pool; leave one of them out"
            )
        if self.parameter_servers and not self.workers:
            raise SettingsError("parameter_servers need workers; raise replica_count to 2 or more")
        if self.reduction_server and not (self.workers and self.workers.accelerator_count):
            raise SettingsError(
                "reduction_server adds up the gradients of workers with GPUs; there are no such workers"
            )

    @classmethod
    def of(cls, pool: WorkerPool) -> Cluster:
        """Returns a chief and, where the pool has more than one replica, workers, all alike."""
        rest = pool.replica_count - 1
        return cls(
            chief=replace(pool, replica_count=1),
            workers=replace(pool, replica_count=rest) if rest else None,
        )

    @property
    def replica_count(self) -> int:
        """Replicas that train: the chief and the workers."""
        return self.chief.replica_count + (self.workers.replica_count if self.workers else 0)

    @property
    def is_synchronous(self) -> bool:
        """Whether the replicas train in step, so that none goes on without the others."""
        return self.parameter_servers is None

    @property
    def pools(self) -> tuple[WorkerPool | None, ...]:
        """The pools by index, None for a slot that is left empty, without empty slots at the end."""
        server = self.parameter_servers or self.reduction_server
        slots = [self.chief, self.workers, server, self.evaluator]
        while slots[-1] is None:
            slots.pop()
        return tuple(slots)

    def specs(self, container: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the platform's worker_pool_specs.

        Args:
            container: The container_spec of the program that all replicas but a Reduction Server run.
        """
        server = {"image_uri": REDUCTION_SERVER_IMAGE}
        return [
            dict(EMPTY_POOL)
            if pool is None
            else pool.spec(server if pool is self.reduction_server else container)
            for pool in self.pools
        ]
