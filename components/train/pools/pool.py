"""One worker pool: replicas with the same machine and the same container."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardline.components.train.pools.texts import check_text
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
