"""One worker pool: replicas with the same machine and the same container.

The cluster of a training job: who is in which worker pool.

Worker pools as the platform writes them (worker_pool_specs), read into a cluster and thereby checked.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardline.components.vertex.forms import check_text
from shardline.trainer.errors import SettingsError

BOOT_DISK_TYPES = ("pd-ssd", "pd-standard", "hyperdisk-balanced")
RESERVATION_AFFINITY_TYPES = ("NO_RESERVATION", "ANY_RESERVATION", "SPECIFIC_RESERVATION")

_MOST_VARIABLES = 100
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLATFORM_VARIABLE = re.compile(r"TF_CONFIG|CLUSTER_SPEC|(AIP|CLOUD_ML)_\w+")
_MACHINE_TYPE = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)+")


@dataclass(frozen=True, kw_only=True)
class NfsMount:
    """A directory of a file server that every replica of a pool sees.

    Attributes:
        server: IP address of the server.
        path: Directory that the server exports, from "/".
        mount_point: Name below /mnt/nfs under which the replicas see it.
    """

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

    Attributes:
        machine_type: Compute Engine machine type.
        replica_count: Number of replicas.
        accelerator_type: Vertex AI accelerator type; "" for none.
        accelerator_count: Accelerators on each machine.
        reservation_affinity_type: One of `RESERVATION_AFFINITY_TYPES`; "" for the platform's default.
        reservation_affinity_key: Label key of a specific reservation.
        reservation_affinity_values: Resource names of specific reservations.
        boot_disk_type: One of `BOOT_DISK_TYPES`; "" for the machine's default.
        boot_disk_size_gb: Size of the boot disk in GB.
        image_uri: Container image; "" for the component's own.
        env: Environment variables of the container.
        nfs_mounts: Directories of file servers.
    """

    machine_type: str
    replica_count: int = 1
    accelerator_type: str = ""
    accelerator_count: int = 0
    reservation_affinity_type: str = ""
    reservation_affinity_key: str = ""
    reservation_affinity_values: tuple[str, ...] = ()
    boot_disk_type: str = "pd-ssd"
    boot_disk_size_gb: int = 100
    image_uri: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    nfs_mounts: tuple[NfsMount, ...] = ()

    def __post_init__(self) -> None:
        if self.replica_count < 1:
            raise SettingsError(f"replica_count must be at least 1, got {self.replica_count}")
        if not _MACHINE_TYPE.fullmatch(self.machine_type):
            raise SettingsError(
                "machine_type must be a Compute Engine machine type as in n1-standard-8, "
                f"got {self.machine_type!r}"
            )
        if self.accelerator_count < 0 or bool(self.accelerator_type) != (self.accelerator_count > 0):
            raise SettingsError(
                "accelerator_type and accelerator_count go together, got "
                f"{self.accelerator_type!r} and {self.accelerator_count}"
            )
        if self.boot_disk_type not in ("", *BOOT_DISK_TYPES):
            raise SettingsError(
                f"boot_disk_type is one of {', '.join(BOOT_DISK_TYPES)}, got {self.boot_disk_type!r}"
            )
        if self.boot_disk_size_gb < 100:
            raise SettingsError(f"boot_disk_size_gb must be at least 100, got {self.boot_disk_size_gb}")
        if self.boot_disk_size_gb > 100 and not self.boot_disk_type:
            raise SettingsError("boot_disk_size_gb goes with a boot_disk_type; give one")
        self._check_reservation()
        self._check_variables()
        for name in ("accelerator_type", "image_uri", "reservation_affinity_key"):
            check_text(name, getattr(self, name))

    @property
    def machine(self) -> tuple[str, str, int]:
        """What kind of machine it is: machine type, accelerator type, accelerator count."""
        return self.machine_type, self.accelerator_type, self.accelerator_count

    def spec(self, container: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the platform's WorkerPoolSpec.

        Args:
            container: image_uri, and command and args where they are not the image's own.
        """
        machine: dict[str, Any] = {"machine_type": self.machine_type}
        if self.accelerator_type:
            machine["accelerator_type"] = self.accelerator_type
            machine["accelerator_count"] = self.accelerator_count
        if self.reservation_affinity_type:
            machine["reservation_affinity"] = self._reservation
        image = {"image_uri": self.image_uri} if self.image_uri else {}
        env = [{"name": name, "value": value} for name, value in self.env.items()]
        pool: dict[str, Any] = {
            "machine_spec": machine,
            "replica_count": self.replica_count,
            "container_spec": {**container, **image, "env": env},
        }
        if self.boot_disk_type:
            pool["disk_spec"] = {
                "boot_disk_type": self.boot_disk_type,
                "boot_disk_size_gb": self.boot_disk_size_gb,
            }
        if self.nfs_mounts:
            pool["nfs_mounts"] = [vars(mount).copy() for mount in self.nfs_mounts]
        return pool

    @property
    def _reservation(self) -> dict[str, Any]:
        chosen: dict[str, Any] = {"reservation_affinity_type": self.reservation_affinity_type}
        if self.reservation_affinity_key:
            chosen |= {
                "key": self.reservation_affinity_key,
                "values": list(self.reservation_affinity_values),
            }
        return chosen

    def _check_reservation(self) -> None:
        kind = self.reservation_affinity_type
        if kind not in ("", *RESERVATION_AFFINITY_TYPES):
            raise SettingsError(
                f"reservation_affinity_type is one of {', '.join(RESERVATION_AFFINITY_TYPES)}, got {kind!r}"
            )
        specific = kind == "SPECIFIC_RESERVATION"
        given = self.reservation_affinity_key, self.reservation_affinity_values
        if specific and not all(given):
            raise SettingsError(
                "SPECIFIC_RESERVATION needs reservation_affinity_key, "
                "compute.googleapis.com/reservation-name, and reservation_affinity_values, "
                "the reservation's resource name"
            )
        if not specific and any(given):
            raise SettingsError(
                "reservation_affinity_key and reservation_affinity_values go with "
                f"reservation_affinity_type SPECIFIC_RESERVATION, not {kind!r}"
            )

    def _check_variables(self) -> None:
        if len(self.env) > _MOST_VARIABLES:
            raise SettingsError(
                f"env: a container has at most {_MOST_VARIABLES} variables, got {len(self.env)}"
            )
        for name, value in self.env.items():
            if not _VARIABLE.fullmatch(name):
                raise SettingsError(f"env: {name!r} is no name of an environment variable")
            if _PLATFORM_VARIABLE.fullmatch(name):
                raise SettingsError(f"env: {name} is set by the platform; leave it out")
            check_text(f"env.{name}", value)


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


_SLOTS = ("chief", "workers", "parameter_servers", "evaluator")
#: The keys that are read, by the path of the table they stand in.
_KEYS = {
    "": ("machine_spec", "replica_count", "container_spec", "disk_spec", "nfs_mounts"),
    "machine_spec": ("machine_type", "accelerator_type", "accelerator_count", "reservation_affinity"),
    "machine_spec.reservation_affinity": ("reservation_affinity_type", "key", "values"),
    "container_spec": ("image_uri", "env"),
    "disk_spec": ("boot_disk_type", "boot_disk_size_gb"),
}
_MOUNT = ("server", "path", "mount_point")


def read_specs(specs: Sequence[Any]) -> Cluster:
    """Reads worker pools.

    A pool has machine_spec and replica_count, and disk_spec, nfs_mounts, and image_uri and env in
    container_spec where they differ from the defaults. Its program is the trainer. An empty pool keeps the
    slots of those behind it.

    Args:
        specs: One to four WorkerPoolSpecs of the CustomJob API, with its snake_case names.

    Raises:
        SettingsError: When a key is unknown or mistyped, or the pools make no cluster.
    """
    if not isinstance(specs, list) or not 1 <= len(specs) <= len(_SLOTS):
        count = f"{len(specs)}" if isinstance(specs, list) else repr(specs)
        raise SettingsError(f"worker_pool_specs must be a list of 1 to {len(_SLOTS)} pools, got {count}")
    pools: dict[str, WorkerPool] = {}
    for index, spec in enumerate(specs):
        pool = _read_pool(f"worker_pool_specs[{index}]", spec)
        if pool is not None:
            is_reduction = index == 2 and pool.image_uri == REDUCTION_SERVER_IMAGE
            pools["reduction_server" if is_reduction else _SLOTS[index]] = pool
    if "chief" not in pools:
        raise SettingsError("worker_pool_specs[0] is the chief and cannot be empty")
    return Cluster(**pools)


def _read_pool(name: str, spec: Any) -> WorkerPool | None:
    tables = {
        path: _table(f"{name}.{path}".rstrip("."), _below(spec, path), keys) for path, keys in _KEYS.items()
    }
    top, machine, container = tables[""], tables["machine_spec"], tables["container_spec"]
    count = _whole(f"{name}.replica_count", top.get("replica_count", 0))
    if not count:
        if set(top) - {"replica_count"}:
            raise SettingsError(f"{name}.replica_count must be at least 1; {{}} leaves the pool empty")
        return None
    affinity = tables["machine_spec.reservation_affinity"]
    if "machine_type" not in machine:
        raise SettingsError(f"{name}.machine_spec.machine_type is missing")
    disk = tables["disk_spec"]
    values: dict[str, Any] = {
        "machine_type": _text(f"{name}.machine_type", machine["machine_type"]),
        "accelerator_type": _text(f"{name}.accelerator_type", machine.get("accelerator_type", "")),
        "accelerator_count": _whole(f"{name}.accelerator_count", machine.get("accelerator_count", 0)),
        "boot_disk_type": _text(
            f"{name}.boot_disk_type", disk.get("boot_disk_type", "pd-ssd" if disk else "")
        ),
        "boot_disk_size_gb": _whole(f"{name}.boot_disk_size_gb", disk.get("boot_disk_size_gb", 100)),
        "image_uri": _text(f"{name}.image_uri", container.get("image_uri", "")),
    }
    try:
        return WorkerPool(
            replica_count=count,
            reservation_affinity_type=_text(f"{name}.type", affinity.get("reservation_affinity_type", "")),
            reservation_affinity_key=_text(f"{name}.key", affinity.get("key", "")),
            reservation_affinity_values=tuple(_texts(f"{name}.values", affinity.get("values", []))),
            env=dict(_variable(item) for item in _list("env", container.get("env", []))),
            nfs_mounts=tuple(_mount(item) for item in _list("nfs_mounts", top.get("nfs_mounts", []))),
            **values,
        )
    except SettingsError as error:
        raise SettingsError(str(error) if name in str(error) else f"{name}: {error}") from None


def _variable(item: Any) -> tuple[str, str]:
    table = _table("env", item, ("name", "value"))
    return _text("name of env", table.get("name")), _text("value of env", table.get("value", ""))


def _mount(item: Any) -> NfsMount:
    table = _table("nfs_mounts", item, _MOUNT)
    return NfsMount(**{key: _text(f"{key} of nfs_mounts", table.get(key, "")) for key in _MOUNT})


def _below(spec: Any, path: str) -> Any:
    for key in filter(None, path.split(".")):
        spec = spec.get(key, {}) if isinstance(spec, Mapping) else {}
    return spec


def _table(name: str, value: Any, keys: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SettingsError(f"{name} must be a JSON object, got {value!r}")
    for key in value:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(keys)}"
            raise SettingsError(f"unknown key {name}.{key}; {hint}")
    return value


def _whole(name: str, value: Any) -> int:
    # Numbers travel as doubles, and an int64 may be text.
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not float(value).is_integer():
        raise SettingsError(f"{name} must be a whole number, got {value!r}")
    return int(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise SettingsError(f"{name} must be text, got {value!r}")
    return value


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise SettingsError(f"{name} must be a JSON array, got {value!r}")
    return value


def _texts(name: str, value: Any) -> list[str]:
    return [_text(name, item) for item in _list(name, value)]
