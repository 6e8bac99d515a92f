"""Worker pools as the platform writes them (worker_pool_specs), read into a cluster and thereby checked."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from shardline.components.train.pools.cluster import REDUCTION_SERVER_IMAGE, Cluster
from shardline.components.train.pools.pool import NfsMount, WorkerPool
from shardline.trainer.errors import SettingsError

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
