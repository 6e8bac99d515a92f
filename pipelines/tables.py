"""Tables of TOML settings files, read and checked as fields of dataclasses."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardline.trainer.base import files
from shardline.trainer.base.errors import SettingsError, ShardlineError

#: The settings of a project, in its directory: the default there.
PROJECT_SETTINGS = Path("settings.toml")
#: Beside them, the parameters of its runs.
PROJECT_PARAMETERS = "params.toml"


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


def project_settings(path: Path | None = None) -> Path | None:
    """Returns the settings file, by default that of the project in this directory; None without either."""
    return path or (PROJECT_SETTINGS if PROJECT_SETTINGS.is_file() else None)


def split_pairs(
    texts: Iterable[str], option: str, error: type[ShardlineError] = SettingsError, form: str = "NAME=VALUE"
) -> dict[str, str]:
    """Splits texts of the form NAME=VALUE; raises `error` for another form or a name that occurs twice."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise error(f"{option} takes {form}, got {text!r}")
        if name in found:
            raise error(f"{option} {name} is set twice: {found[name]!r} and {value!r}")
        found[name] = value
    return found
