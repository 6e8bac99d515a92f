"""Tables of settings files (TOML): their keys are the fields of a dataclass, and are checked as such."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar

from shardline.components.parameters import check_keys
from shardline.components.vertex.pools import NfsMount
from shardline.trainer import files
from shardline.trainer.errors import SettingsError

T = TypeVar("T")
Keys = Mapping[str, Field[Any]]

#: What TOML gives for each type of a key, and what the type is called in a message.
_TYPES: dict[str, tuple[Any, str]] = {
    "str": (str, "str"),
    "int": (int, "int"),
    "int | None": (int, "int"),
    "datetime.datetime | None": (datetime.datetime, "a date and time"),
    "bool": (bool, "bool"),
    "bool | None": (bool, "bool"),
    "tuple[str, ...]": (list, "a list of str"),
    "tuple[int, ...]": (list, "a list of int"),
    "tuple[NfsMount, ...]": (list, "a list of tables"),
    "Mapping[str, str]": (dict, "a table of str"),
    "Mapping[str, Any]": (dict, "a table"),
}


def keys_of(kind: type[Any], *leave_out: str) -> dict[str, Field[Any]]:
    """Returns the keys of the table that a dataclass describes, without some of its fields."""
    return {item.name: item for item in fields(kind) if item.name not in leave_out}


def read_file(path: Path, kind: str = "settings") -> dict[str, Any]:
    """Returns the content of a settings file; SettingsError when it is missing or no TOML.

    One of another `kind` holds nothing but tables [KIND.NAME].
    """
    missing = (
        f"no settings file {path}; give its path from here, or let 'shardline new DIR' write a project "
        "with one"
        if kind == "settings"
        else f"no {kind} file {path}; it has tables [{kind}.NAME] (TOML)"
    )
    return read_toml(path, missing)


def read_toml(path: Path, missing: str) -> dict[str, Any]:
    """Returns the content of a TOML file; SettingsError when it is none, `missing` when there is no file."""
    if not path.exists() and not path.is_symlink():
        raise SettingsError(missing)
    return files.read_toml(path, SettingsError)


@contextmanager
def begun_with(words: str) -> Iterator[None]:
    """Puts the file or table in question in front of a SettingsError's message."""
    try:
        yield
    except SettingsError as error:
        raise SettingsError(f"{words}{error}") from None


def read_table(path: Path, table: str, kind: type[Any], *, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns a table of a settings file that is of no concern to the compiler; empty where it is missing.

    The table's keys are the fields of the dataclass `kind`, except those in `leave_out`. Raises SettingsError
    when the file is missing or no TOML, or a key is unknown or mistyped.
    """
    content = read_file(path).get(table, {})
    with begun_with(f"{path}: "):
        check_tables({table: content})
        return values(content, keys_of(kind, *leave_out), f"{table}.")


def read_tables(path: Path, table: str, kind: type[Any], *, name: str = "display_name") -> dict[str, Any]:
    """Returns the tables [TABLE.NAME] of a file that holds nothing else, by their names.

    Their keys are the fields of the dataclass `kind`, of which `name` is the table's own name. Raises
    SettingsError when the file is missing or no TOML, or a key is unknown, missing or mistyped.
    """
    content = read_file(path, table)
    with begun_with(f"{path}: "):
        tables = content.pop(table, {})
        if content:
            raise SettingsError(f"unknown key {next(iter(content))}; write tables [{table}.NAME]")
        if not isinstance(tables, dict) or not all(isinstance(item, dict) for item in tables.values()):
            raise SettingsError(f"{table} must be tables: [{table}.NAME]")
        known = keys_of(kind, name)
        return {key: values(item, known, f"{table}.{key}.", whole=True) for key, item in tables.items()}


def read_one(name: str, kind: Callable[..., T], table: dict[str, Any]) -> T:
    """Returns the dataclass that a table is."""
    found = values(table, keys_of(kind), f"{name}.", whole=True)  # type: ignore[arg-type]  # a dataclass
    with begun_with(f"{name}."):
        return kind(**found)


def check_tables(tables: Mapping[str, Any], prefix: str = "") -> None:
    """Checks that what stands under these names are tables; SettingsError when one is not."""
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise SettingsError(f"{prefix}{name} must be a table: [{prefix}{name}]")


def values(
    table: Mapping[str, Any], known: Keys, prefix: str, *, also: tuple[str, ...] = (), whole: bool = False
) -> dict[str, Any]:
    """Returns the values of a table, each of its key's type.

    `prefix` is the table's own name and `also` are keys that are read elsewhere, both for messages. Where
    `whole`, keys without a default must be there. Raises SettingsError when a key is unknown, missing or
    mistyped.
    """
    check_keys(table, [*known, *also], prefix)
    for key, item in known.items():
        if whole and key not in table and item.default is MISSING and item.default_factory is MISSING:
            raise SettingsError(f"{prefix}{key} is missing")
    return {key: _value(f"{prefix}{key}", value, str(known[key].type)) for key, value in table.items()}


def _value(name: str, value: Any, wanted: str) -> Any:
    kind, words = _TYPES[wanted]
    inner = {"tuple[str, ...]": str, "Mapping[str, str]": str, "tuple[int, ...]": int}.get(wanted)
    if kind is int and type(value) is int and not -(2**63) <= value < 2**63:
        raise SettingsError(f"{name} is beyond the whole numbers of TOML, 64 bits: {value}")
    if type(value) is not kind or (inner and not _are_all(inner, value)):
        raise SettingsError(f"{name} must be of type {words}, got {value!r}")
    if wanted == "tuple[NfsMount, ...]":
        return tuple(_read_mount(f"{name}[{index}]", item) for index, item in enumerate(value))
    return tuple(value) if isinstance(value, list) else value


def _are_all(kind: type[Any], value: Any) -> bool:
    return all(type(item) is kind for item in (value.values() if isinstance(value, dict) else value))


def _read_mount(name: str, table: Any) -> NfsMount:
    if not isinstance(table, dict):
        raise SettingsError(f"{name} must be a table with {', '.join(keys_of(NfsMount))}, got {table!r}")
    return read_one(name, NfsMount, table)
