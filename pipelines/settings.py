"""Compile-time settings: image and machines, one TOML file per environment."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any

from components.train.worker_pools import Cluster
from trainer.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that is fixed when the pipeline is compiled; all else is a pipeline parameter.

    Attributes:
        image: Container image of all components and of the trainer.
        train: Machines of the training job.
    """

    image: str
    train: Cluster

    def __post_init__(self) -> None:
        if not self.image:
            raise SettingsError("image is empty; give the container image that all components run in")


def load(path: Path) -> Settings:
    """Reads a settings file.

    Raises:
        SettingsError: When the file is missing or no TOML, or a key is unknown, missing or mistyped.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"no settings file {path}; settings/local.toml is one to start from") from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot read settings file {path}: {error}") from None
    try:
        table = content.pop("train", {})
        if not isinstance(table, dict):
            raise SettingsError("train must be a table: [train]")
        _check(content, {field.name: field for field in fields(Settings) if field.name != "train"}, "")
        _check(table, {field.name: field for field in fields(Cluster)}, "train.")
        return Settings(**content, train=Cluster(**table))
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None


def _check(table: dict[str, Any], known: dict[str, Field[Any]], prefix: str) -> None:
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"there are {', '.join(known)}"
            raise SettingsError(f"unknown key {prefix}{key}; {hint}")
        wanted = known[key].type
        if type(value).__name__ != wanted:
            raise SettingsError(f"{prefix}{key} must be of type {wanted}, got {value!r}")
    for key, field in known.items():
        if key not in table and field.default is MISSING:
            raise SettingsError(f"{prefix}{key} is missing")
