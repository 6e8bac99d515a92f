"""Settings files (TOML): their tables, whose keys are the fields of a dataclass, and are checked as such."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from shardline.trainer.base import files
from shardline.trainer.base.deserialize import read_fields
from shardline.trainer.base.errors import SettingsError

T = TypeVar("T")


def read_settings_file(path: Path, kind: str = "settings") -> dict[str, Any]:
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
def error_prefix(words: str) -> Iterator[None]:
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
    content = read_settings_file(path).get(table, {})
    with error_prefix(f"{path}: "):
        check_tables({table: content})
        return read_fields(kind, content, f"{table}.", leave_out=leave_out, whole=False)


def read_tables(path: Path, table: str, kind: type[Any], *, name: str = "display_name") -> dict[str, Any]:
    """Returns the tables [TABLE.NAME] of a file that holds nothing else, by their names.

    Their keys are the fields of the dataclass `kind`, of which `name` is the table's own name. Raises
    SettingsError when the file is missing or no TOML, or a key is unknown, missing or mistyped.
    """
    content = read_settings_file(path, table)
    with error_prefix(f"{path}: "):
        tables = content.pop(table, {})
        if content:
            raise SettingsError(f"unknown key {next(iter(content))}; write tables [{table}.NAME]")
        if not isinstance(tables, dict) or not all(isinstance(item, dict) for item in tables.values()):
            raise SettingsError(f"{table} must be tables: [{table}.NAME]")
        return {
            key: read_fields(kind, item, f"{table}.{key}.", leave_out=(name,)) for key, item in tables.items()
        }


def read_dataclass(name: str, kind: Callable[..., T], table: dict[str, Any]) -> T:
    """Returns the dataclass that a table is."""
    found = read_fields(kind, table, f"{name}.")  # type: ignore[arg-type]  # a dataclass
    with error_prefix(f"{name}."):
        return kind(**found)


def check_tables(tables: Mapping[str, Any], prefix: str = "") -> None:
    """Checks that what stands under these names are tables; SettingsError when one is not."""
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise SettingsError(f"{prefix}{name} must be a table: [{prefix}{name}]")
