"""Worker pools of a training job, the cluster that they form, and their WorkerPoolSpecs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardline.trainer.base.errors import SettingsError
from shardline.trainer.cluster.cluster import ACCELERATORS_VARIABLE

#: Prefixes of machine types with TPUs.
_TPU_FAMILIES = ("cloud-tpu", "ct5lp-", "ct6e-", "tpu7x-")


@dataclass(frozen=True, kw_only=True)
class WorkerPool:
    """Replicas with the same machine and the same container.

    The fields are the keys of [train], which settings/vertex.toml.example explains.
    """

    machine_type: str
    replica_count: int = 1
    accelerator_type: str = ""
    accelerator_count: int = 0
    boot_disk_size_gb: int = 100
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.machine_type.startswith(_TPU_FAMILIES) or self.accelerator_type.startswith("TPU"):
            raise SettingsError(
                f"machine_type {self.machine_type} has TPUs, on which Shardline does not train; "
                "use CPUs or GPUs"
            )

    @property
    def accelerators(self) -> str:
        """Accelerators of each replica, "1 NVIDIA_TESLA_T4"; "" for none."""
        return f"{self.accelerator_count} {self.accelerator_type}" if self.accelerator_type else ""

    def spec(self, container: Mapping[str, Any], reduction_servers: int = 0) -> dict[str, Any]:
        """Returns the platform's WorkerPoolSpec.

        `container` has image_uri, command and args where they are not the image's own, and env by name, which
        overrides the pool's. A variable tells the trainer its accelerators and the job's number of
        `reduction_servers`.
        """
        told = [self.accelerators, f"{reduction_servers} reduction servers" if reduction_servers else ""]
        variables = {**self.env, **container.get("env", {})}
        if any(told):
            variables[ACCELERATORS_VARIABLE] = ", ".join(filter(None, told))
        env = [{"name": name, "value": value} for name, value in variables.items()]
        machine: dict[str, Any] = {"machine_type": self.machine_type}
        if self.accelerator_type or self.accelerator_count:
            machine["accelerator_type"] = self.accelerator_type
            machine["accelerator_count"] = self.accelerator_count
        return {
            "container_spec": {**container, "env": env},
            "machine_spec": machine,
            "replica_count": self.replica_count,
            "disk_spec": {"boot_disk_size_gb": self.boot_disk_size_gb},
        }


#: The platform's own program for a Reduction Server.
REDUCTION_SERVER_IMAGE = "us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"

#: A slot without replicas. The API skips an empty pool, but the launcher drops empty objects and zeros from
#: its payload, which would move later pools to other roles. To the launcher the text "0" is neither; its
#: client reads it as a number (int64 is text in JSON), and a WorkerPoolSpec of zeros is the empty message.
EMPTY_POOL: Mapping[str, Any] = {"replica_count": "0"}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines of a training job, by role.

    The platform knows a role by the index of the pool: 0 is the chief, 1 workers, 2 parameter servers or
    Reduction Server, 3 evaluators.

    Attributes:
        chief: One replica.
        workers: Further replicas that train.
        parameter_servers: Replicas that hold the variables (ParameterServerStrategy).
        reduction_server: Replicas that add up the gradients of GPU workers; in the parameter servers' slot.
        evaluator: Replicas that evaluate checkpoints during the training.
    """

    chief: WorkerPool
    workers: WorkerPool | None = None
    parameter_servers: WorkerPool | None = None
    reduction_server: WorkerPool | None = None
    evaluator: WorkerPool | None = None

    def __post_init__(self) -> None:
        if self.parameter_servers and self.reduction_server:
            raise SettingsError(
                "parameter_servers and reduction_server share one worker pool; leave one of them out"
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
    def pools(self) -> tuple[WorkerPool | None, ...]:
        """The pools by index, None for an empty slot, without empty slots at the end."""
        server = self.parameter_servers or self.reduction_server
        slots = [self.chief, self.workers, server, self.evaluator]
        while slots[-1] is None:
            slots.pop()
        return tuple(slots)

    def specs(self, container: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the platform's worker_pool_specs.

        `container` is the container_spec of the program that all replicas but a Reduction Server run.
        """
        servers = self.reduction_server.replica_count if self.reduction_server else 0
        return [
            dict(EMPTY_POOL)
            if pool is None
            else pool.spec({"image_uri": REDUCTION_SERVER_IMAGE})
            if pool is self.reduction_server
            else pool.spec(container, servers)
            for pool in self.pools
        ]
