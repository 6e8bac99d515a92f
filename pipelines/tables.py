"""Tables of settings files (TOML): their keys are the fields of a dataclass, and are checked as such."""

from __future__ import annotations

import datetime
import difflib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar

from shardline.components.vertex.pools import NfsMount
from shardline.trainer.errors import SettingsError

_T = TypeVar("_T")

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


_MOUNT_KEYS = {item.name: item for item in fields(NfsMount)}


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
    content = read_file(path).get(table, {})
    known = {item.name: item for item in fields(kind) if item.name not in leave_out}
    try:
        if not isinstance(content, dict):
            raise SettingsError(f"{table} must be a table: [{table}]")
        return values(content, known, f"{table}.")
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
    content = read_file(path)
    known = {item.name: item for item in fields(kind) if item.name != name}
    required = required_keys(known)
    try:
        tables = content.pop(table, {})
        if content:
            raise SettingsError(f"unknown key {next(iter(content))}; write tables [{table}.NAME]")
        if not isinstance(tables, dict) or not all(isinstance(item, dict) for item in tables.values()):
            raise SettingsError(f"{table} must be tables: [{table}.NAME]")
        return {
            key: values(item, known, f"{table}.{key}.", required=required) for key, item in tables.items()
        }
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None


def read_file(path: Path) -> dict[str, Any]:
    """Returns the content of a settings file.

    Raises:
        SettingsError: When it is missing or no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"no settings file {path}; settings/local.toml is one to start from") from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot read settings file {path}: {error}") from None


def read_one(name: str, kind: Callable[..., _T], table: dict[str, Any]) -> _T:
    """Returns the dataclass that a table is."""
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]  # one of _KINDS
    found = values(table, known, f"{name}.", required=required_keys(known))
    try:
        return kind(**found)
    except SettingsError as error:
        raise SettingsError(f"{name}.{error}") from None


def required_keys(known: Mapping[str, Field[Any]]) -> tuple[str, ...]:
    """Returns the keys that have no default."""
    return tuple(
        key for key, item in known.items() if item.default is MISSING and item.default_factory is MISSING
    )


def values(
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
    found = values(table, _MOUNT_KEYS, f"{name}.", required=tuple(_MOUNT_KEYS))
    return named(f"{name}.", NfsMount, **found)


def named(prefix: str, kind: Callable[..., _T], **arguments: Any) -> _T:
    """Makes a value; a message of its own begins with the table in which it is written."""
    try:
        return kind(**arguments)
    except SettingsError as error:
        raise SettingsError(f"{prefix}{error}" if prefix.count(".") > 1 else str(error)) from None
