"""Compile-time settings: image, machines and job, one TOML file per environment."""

from __future__ import annotations

import datetime
import difflib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from components.conclude.settings import NotifySettings
from components.register.deploy import BatchPrediction, Deploy
from components.register.upload import ModelUpload
from components.train.pools.cluster import Cluster
from components.train.pools.job import CustomJobSettings
from components.train.pools.pool import NfsMount, WorkerPool
from trainer.errors import SettingsError

_T = TypeVar("_T")

#: The tables below [train], beside its own keys: the pools that differ from these, and the job.
_POOLS = ("chief", "workers", "parameter_servers", "reduction_server", "evaluator")
_OWN_MACHINE = ("parameter_servers", "reduction_server")

_POOL_KEYS = {item.name: item for item in fields(WorkerPool)}
_JOB_KEYS = {item.name: item for item in fields(CustomJobSettings) if item.name != "cluster"}
_MOUNT_KEYS = {item.name: item for item in fields(NfsMount)}
#: What parameter servers do not take over from [train]: they need no accelerators.
_MACHINE_KEYS = {name for name in _POOL_KEYS if name.startswith(("machine", "accelerator", "reservation"))}

#: What TOML gives for each type of a key, and what the type is called in a message.
_TYPES: dict[str, tuple[Any, str]] = {
    "str": (str, "str"),
    "int": (int, "int"),
    "int | None": (int, "int"),
    "datetime.datetime | None": (datetime.datetime, "a date and time"),
    "bool": (bool, "bool"),
    "bool | None": (bool, "bool"),
    "tuple[str, ...]": (list, "a list of str"),
    "tuple[NfsMount, ...]": (list, "a list of tables"),
    "Mapping[str, str]": (dict, "a table of str"),
    "Mapping[str, Any]": (dict, "a table"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that is fixed when the pipeline is compiled; all else is a pipeline parameter.

    Attributes:
        image: Container image of all components and of the trainer.
        train: The custom job of the training step: its machines, and how the platform runs it.
        pools_at_run_time: Whether the machines of the training step are a parameter of each run,
            worker_pool_specs, instead.
        model_upload: How a blessed model is uploaded to the Model Registry; None uploads nothing.
        deploy: How an uploaded model is deployed; None deploys nothing.
        batch_predict: What is predicted with an uploaded model; None predicts nothing.
        notify: Who is told how a run came out.
    """

    image: str
    train: CustomJobSettings
    pools_at_run_time: bool = False
    model_upload: ModelUpload | None = None
    deploy: Deploy | None = None
    batch_predict: BatchPrediction | None = None
    notify: NotifySettings = field(default_factory=NotifySettings)

    def __post_init__(self) -> None:
        if not self.image:
            raise SettingsError("image is empty; give the container image that all components run in")
        if self.model_upload is None and (self.deploy or self.batch_predict):
            table = "deploy" if self.deploy else "batch_predict"
            raise SettingsError(f"{table} needs a model in the Model Registry; add a table [model_upload]")


#: The tables that are one dataclass each.
_KINDS: dict[str, type[Any]] = {
    "model_upload": ModelUpload,
    "deploy": Deploy,
    "batch_predict": BatchPrediction,
    "notify": NotifySettings,
}
_TABLES = ("train", *_KINDS)
#: Tables that are of no concern to the compiler: `read_table`.
_RUN_TABLES = ("vertex",)
_OWN_KEYS = {item.name: item for item in fields(Settings) if item.name not in _TABLES}


def load(path: Path) -> Settings:
    """Reads a settings file; settings/vertex.toml.example shows all of its keys.

    Raises:
        SettingsError: When the file is missing or no TOML, or a key is unknown, missing, mistyped or out
            of range.
    """
    content = _read(path)
    for name in _RUN_TABLES:
        content.pop(name, None)
    try:
        tables = {name: content.pop(name) for name in _TABLES if name in content}
        for name, table in tables.items():
            if not isinstance(table, dict):
                raise SettingsError(f"{name} must be a table: [{name}]")
        own = _values(content, _OWN_KEYS, "", also=_TABLES, required=("image",))
        read = {name: _read_one(name, kind, tables[name]) for name, kind in _KINDS.items() if name in tables}
        return Settings(**own, train=_read_job(tables.get("train", {})), **read)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None


def read_table(path: Path, table: str, kind: type[Any], *, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """Reads one table of a settings file that is of no concern to the compiler.

    Args:
        path: The file; it may hold nothing else.
        table: Name of the table; a file without it is as one with an empty table.
        kind: Dataclass whose fields are the table's keys.
        leave_out: Fields that are no keys.

    Raises:
        SettingsError: When the file is missing or no TOML, or a key is unknown or mistyped.
    """
    content = _read(path).get(table, {})
    known = {item.name: item for item in fields(kind) if item.name not in leave_out}
    try:
        if not isinstance(content, dict):
            raise SettingsError(f"{table} must be a table: [{table}]")
        return _values(content, known, f"{table}.")
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None


def read_tables(path: Path, table: str, kind: type[Any], *, name: str = "display_name") -> dict[str, Any]:
    """Reads a file that holds one table of each name, [TABLE.NAME], and nothing else.

    Args:
        path: The file.
        table: What the tables have in common.
        kind: Dataclass whose fields are the tables' keys; those without a default must be there.
        name: The field that is the table's own name.

    Returns:
        The values by the tables' names.

    Raises:
        SettingsError: When the file is missing or no TOML, or a key is unknown, missing or mistyped.
    """
    content = _read(path)
    known = {item.name: item for item in fields(kind) if item.name != name}
    required = _required(known)
    try:
        tables = content.pop(table, {})
        if content:
            raise SettingsError(f"unknown key {next(iter(content))}; write tables [{table}.NAME]")
        if not isinstance(tables, dict) or not all(isinstance(item, dict) for item in tables.values()):
            raise SettingsError(f"{table} must be tables: [{table}.NAME]")
        return {
            key: _values(item, known, f"{table}.{key}.", required=required) for key, item in tables.items()
        }
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"no settings file {path}; settings/local.toml is one to start from") from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot read settings file {path}: {error}") from None


def _read_job(train: dict[str, Any]) -> CustomJobSettings:
    tables = {name: train.pop(name) for name in (*_POOLS, "job") if name in train}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise SettingsError(f"train.{name} must be a table: [train.{name}]")
    shared = _values(train, _POOL_KEYS, "train.", also=(*_POOLS, "job"), required=("replica_count",))
    total = shared.pop("replica_count")
    if total < 1:
        raise SettingsError(f"train.replica_count must be at least 1, got {total}")
    counts = {"chief": 1, **({"workers": total - 1} if total > 1 else {})}
    pools = {
        name: _read_pool(name, tables.get(name, {}), shared, counts.get(name))
        for name in _POOLS
        if name in counts or name in tables
    }
    job = _values(tables.get("job", {}), _JOB_KEYS, "train.job.")
    return _named("train.job.", CustomJobSettings, cluster=_named("train.", Cluster, **pools), **job)


def _read_pool(name: str, table: dict[str, Any], shared: dict[str, Any], count: int | None) -> WorkerPool:
    prefix = f"train.{name}."
    own = _values(table, _POOL_KEYS, prefix)
    if name in ("chief", "workers"):
        if "replica_count" in own:
            raise SettingsError(f"{prefix}replica_count follows from train.replica_count; leave it out")
        if count is None:
            raise SettingsError("train.workers: there are none; raise train.replica_count to 2 or more")
        own["replica_count"] = count
    if name == "reduction_server":
        shared = {}
    elif name in _OWN_MACHINE:
        shared = {key: value for key, value in shared.items() if key not in _MACHINE_KEYS}
    merged = {**shared, **own, "env": {**shared.get("env", {}), **own.get("env", {})}}
    if "machine_type" not in merged:
        raise SettingsError(f"{prefix if name in _OWN_MACHINE else 'train.'}machine_type is missing")
    return _named(prefix, WorkerPool, **merged)


def _read_one(name: str, kind: Callable[..., _T], table: dict[str, Any]) -> _T:
    """Returns the dataclass that a table is."""
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]  # one of _KINDS
    values = _values(table, known, f"{name}.", required=_required(known))
    try:
        return kind(**values)
    except SettingsError as error:
        raise SettingsError(f"{name}.{error}") from None


def _required(known: Mapping[str, Field[Any]]) -> tuple[str, ...]:
    return tuple(
        key for key, item in known.items() if item.default is MISSING and item.default_factory is MISSING
    )


def _values(
    table: Mapping[str, Any],
    known: Mapping[str, Field[Any]],
    prefix: str,
    *,
    also: tuple[str, ...] = (),
    required: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Returns the values of a table, each of its key's type.

    Args:
        table: As TOML gives it.
        known: Its keys.
        prefix: The table's own name, for messages.
        also: Keys that are read elsewhere, for messages.
        required: Keys that must be there.
    """
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, [*known, *also], n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"there are {', '.join([*known, *also])}"
            raise SettingsError(f"unknown key {prefix}{key}; {hint}")
    for key in required:
        if key not in table:
            raise SettingsError(f"{prefix}{key} is missing")
    return {key: _value(f"{prefix}{key}", value, str(known[key].type)) for key, value in table.items()}


def _value(name: str, value: Any, wanted: str) -> Any:
    kind, words = _TYPES[wanted]
    of_text = wanted in ("tuple[str, ...]", "Mapping[str, str]")
    if type(value) is not kind or (of_text and not _are_texts(value)):
        raise SettingsError(f"{name} must be of type {words}, got {value!r}")
    if wanted == "tuple[NfsMount, ...]":
        return tuple(_read_mount(f"{name}[{index}]", value[index]) for index in range(len(value)))
    return tuple(value) if isinstance(value, list) else value


def _are_texts(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value
    return all(isinstance(item, str) for item in items)


def _read_mount(name: str, table: Any) -> NfsMount:
    if not isinstance(table, dict):
        raise SettingsError(f"{name} must be a table with {', '.join(_MOUNT_KEYS)}, got {table!r}")
    values = _values(table, _MOUNT_KEYS, f"{name}.", required=tuple(_MOUNT_KEYS))
    return _named(f"{name}.", NfsMount, **values)


def _named(prefix: str, kind: Callable[..., _T], **values: Any) -> _T:
    """Makes a value; a message of its own begins with the table in which it is written."""
    try:
        return kind(**values)
    except SettingsError as error:
        raise SettingsError(f"{prefix}{error}" if prefix.count(".") > 1 else str(error)) from None
