"""Tables of TOML settings files, read and checked as fields of dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from shardline.trainer.base import files
from shardline.trainer.base.deserialize import read_fields
from shardline.trainer.base.errors import SettingsError

T = TypeVar("T")

#: The settings of a project, in its directory: the default there.
PROJECT_SETTINGS = Path("settings.toml")


def read_settings_file(path: Path, kind: str = "settings") -> dict[str, Any]:
    """Returns the content of a settings file; SettingsError when it is missing or not TOML.

    A file of another `kind` has only tables [KIND.NAME].
    """
    example = Path(f"{path}.example")
    if example.is_file():
        advice = f"copy {example} to it, and edit it"
    elif kind == "settings":
        advice = "check the path, or create a project with one: 'shardline new DIR'"
    else:
        advice = f"it has tables [{kind}.NAME] (TOML)"
    return read_toml(path, f"no {kind} file {path}; {advice}")


def read_toml(path: Path, missing: str) -> dict[str, Any]:
    """Returns the content of a TOML file; SettingsError, with the message `missing` without a file."""
    if not path.exists() and not path.is_symlink():
        raise SettingsError(missing)
    return files.read_toml(path, SettingsError)


@contextmanager
def error_prefix(prefix: str) -> Iterator[None]:
    """Prefixes the message of a SettingsError with the file or table."""
    try:
        yield
    except SettingsError as error:
        raise SettingsError(f"{prefix}{error}") from None


def project_settings(path: Path | None = None) -> Path | None:
    """Returns the settings file, by default that of the project in this directory; None without either."""
    return path or (PROJECT_SETTINGS if PROJECT_SETTINGS.is_file() else None)


def read_tables(path: Path, table: str, kind: type[Any]) -> dict[str, Any]:
    """Returns the tables [TABLE.NAME] of a file that has no others, by NAME.

    Their keys are the fields of the dataclass `kind`, except `display_name`, which is NAME. Raises
    SettingsError when the file is missing or not TOML, or a key is unknown, missing or mistyped.
    """
    content = read_settings_file(path, table)
    with error_prefix(f"{path}: "):
        tables = content.pop(table, {})
        if content:
            raise SettingsError(f"unknown key {next(iter(content))}; write tables [{table}.NAME]")
        if not isinstance(tables, dict) or not all(isinstance(item, dict) for item in tables.values()):
            raise SettingsError(f"{table} must be tables: [{table}.NAME]")
        return {
            key: read_fields(kind, item, f"{table}.{key}.", leave_out=("display_name",))
            for key, item in tables.items()
        }


def read_dataclass(name: str, kind: Callable[..., T], table: dict[str, Any]) -> T:
    """Returns a table as the dataclass `kind`."""
    values = read_fields(kind, table, f"{name}.")  # type: ignore[arg-type]  # a dataclass
    with error_prefix(f"{name}."):
        return kind(**values)


def check_tables(tables: Mapping[str, Any], prefix: str = "") -> None:
    """Checks that the values are tables; SettingsError when one is not."""
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise SettingsError(f"{prefix}{name} must be a table: [{prefix}{name}]")
