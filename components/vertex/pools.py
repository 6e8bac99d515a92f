"""Worker pools of a training job, the cluster that they form, and their WorkerPoolSpecs.

A `WorkerPool` has a field for each key of the CustomJob API's WorkerPoolSpec (`_PATHS`). A `Cluster` assigns
pools to roles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardline.components.vertex.forms import (
    MACHINE_TYPE,
    MAX_VARIABLES,
    PLATFORM_VARIABLE,
    VARIABLE,
    check_accelerators,
    check_text,
)
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.cluster.cluster import ACCELERATORS_VARIABLE, REDUCTION_SERVERS_VARIABLE

BOOT_DISK_TYPES = ("pd-ssd", "pd-standard", "hyperdisk-balanced")
#: Prefixes of machine types with TPUs.
TPU_FAMILIES = ("cloud-tpu", "ct5lp-", "ct6e-", "tpu7x-")
RESERVATION_AFFINITY_TYPES = ("NO_RESERVATION", "ANY_RESERVATION", "SPECIFIC_RESERVATION")


@dataclass(frozen=True, kw_only=True)
class NfsMount:
    """A directory of a file server, mounted on every replica of a pool as /mnt/nfs/`mount_point`."""

    server: str
    path: str
    mount_point: str

    def __post_init__(self) -> None:
        if not self.server or not self.mount_point:
            raise SettingsError("an NFS mount needs server, path and mount_point")
        if not self.path.startswith("/"):
            raise SettingsError(f"path of an NFS mount starts with '/', got {self.path!r}")


@dataclass(frozen=True, kw_only=True)
class WorkerPool:
    """Replicas with the same machine and the same container.

    The fields are the keys of [train], which settings/vertex.toml.example explains; `image_uri` "" is the
    component's own image.
    """

    machine_type: str
    replica_count: int = 1
    accelerator_type: str = ""
    accelerator_count: int = 0
    reservation_affinity_type: str = ""
    reservation_affinity_key: str = ""
    reservation_affinity_values: tuple[str, ...] = ()
    boot_disk_size_gb: int = 100
    image_uri: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    nfs_mounts: tuple[NfsMount, ...] = ()

    def __post_init__(self) -> None:
        if self.replica_count < 1:
            raise SettingsError(f"replica_count must be at least 1, got {self.replica_count}")
        if not MACHINE_TYPE.fits(self.machine_type):
            raise SettingsError(f"machine_type must be {MACHINE_TYPE.description}, got {self.machine_type!r}")
        check_accelerators(self.accelerator_type, self.accelerator_count)
        if self.machine_type.startswith(TPU_FAMILIES) or self.accelerator_type.startswith("TPU"):
            raise SettingsError(
                f"machine_type {self.machine_type} has TPUs, on which Shardline does not train; "
                "use CPUs or GPUs"
            )
        if self.boot_disk_size_gb < 100:
            raise SettingsError(f"boot_disk_size_gb must be at least 100, got {self.boot_disk_size_gb}")
        kind = self.reservation_affinity_type
        if kind not in ("", *RESERVATION_AFFINITY_TYPES):
            raise SettingsError(
                f"reservation_affinity_type is one of {', '.join(RESERVATION_AFFINITY_TYPES)}, got {kind!r}"
            )
        reservation = self.reservation_affinity_key, self.reservation_affinity_values
        if not (all(reservation) if kind == "SPECIFIC_RESERVATION" else not any(reservation)):
            raise SettingsError(
                "SPECIFIC_RESERVATION, and no other type, needs reservation_affinity_key, "
                "compute.googleapis.com/reservation-name, and reservation_affinity_values, its resource name"
            )
        if len(self.env) > MAX_VARIABLES - 2:  # and our own
            most = MAX_VARIABLES - 2
            raise SettingsError(f"env: a container has room for {most} variables, got {len(self.env)}")
        for name, value in self.env.items():
            if not VARIABLE.fits(name):
                raise SettingsError(f"env: {name!r} is not the name of an environment variable")
            if PLATFORM_VARIABLE.fits(name):
                raise SettingsError(f"env: {name} is set by the platform; leave it out")
            check_text(f"env.{name}", value)
        for name in ("accelerator_type", "image_uri", "reservation_affinity_key"):
            check_text(name, getattr(self, name))

    @property
    def machine(self) -> tuple[str, str, int]:
        """Machine type, accelerator type and accelerator count."""
        return self.machine_type, self.accelerator_type, self.accelerator_count

    @property
    def accelerators(self) -> str:
        """Accelerators of each replica, "1 NVIDIA_TESLA_T4"; "" for none."""
        return f"{self.accelerator_count} {self.accelerator_type}" if self.accelerator_type else ""

    def spec(self, container: Mapping[str, Any], reduction_servers: int = 0) -> dict[str, Any]:
        """Returns the platform's WorkerPoolSpec.

        `container` has image_uri, command and args where they are not the image's own, and env by name, which
        overrides the pool's. Variables tell the trainer its accelerators and the job's number of
        `reduction_servers`.
        """
        own = {
            ACCELERATORS_VARIABLE: self.accelerators,
            REDUCTION_SERVERS_VARIABLE: str(reduction_servers or ""),
        }
        shared = container.get("env", {})
        variables = {**self.env, **shared, **{name: value for name, value in own.items() if value}}
        env = [{"name": name, "value": value} for name, value in variables.items()]
        pool: dict[str, Any] = {"container_spec": {**container, "env": env}}
        for path, name in _PATHS.items():
            value = getattr(self, name)
            if not value or name == "env":
                continue
            if isinstance(value, tuple):
                value = [vars(item).copy() if isinstance(item, NfsMount) else item for item in value]
            *tables, key = path.split(".")
            node = pool
            for table in tables:
                node = node.setdefault(table, {})
            node[key] = value
        return pool


#: Fields by the path of their key in a WorkerPoolSpec.
_PATHS = {
    "machine_spec.machine_type": "machine_type",
    "machine_spec.accelerator_type": "accelerator_type",
    "machine_spec.accelerator_count": "accelerator_count",
    "machine_spec.reservation_affinity.reservation_affinity_type": "reservation_affinity_type",
    "machine_spec.reservation_affinity.key": "reservation_affinity_key",
    "machine_spec.reservation_affinity.values": "reservation_affinity_values",
    "replica_count": "replica_count",
    "container_spec.image_uri": "image_uri",
    "container_spec.env": "env",
    "disk_spec.boot_disk_size_gb": "boot_disk_size_gb",
    "nfs_mounts": "nfs_mounts",
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
