"""Identity: what must not change between the beginning of a run and its continuation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardline.trainer import files
from shardline.trainer.errors import SettingsError
from shardline.trainer.saving import SETTINGS_FILE

IDENTITY_FILE = "run.json"


@dataclass(frozen=True)
class Identity:
    """Identity of a run: its model in the settings, its dataset's fingerprint, and `TrainingState.variables`.

    `fixed` are further settings that a run keeps. They and the variables are empty, and not compared, in a
    process that has only some of them (the evaluator).
    """

    model: str
    dataset: str
    variables: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)


def claim(directory: Path, identity: Identity, *, allow_new_data: bool, write: bool) -> None:
    """Makes a directory of checkpoints this run's own, or refuses another run's; only the chief writes."""
    path = directory / IDENTITY_FILE
    found = _read(path)
    own = asdict(identity)
    _refuse_others(f"{directory} holds checkpoints", found, own, allow_new_data=allow_new_data)
    if write and found != own:
        directory.mkdir(parents=True, exist_ok=True)
        files.write_json(path, own)


def check_model_dir(directory: Path, *, model: str, dataset: str, allow_new_data: bool) -> None:
    """Refuses a model directory into which another run has written; needs no model yet."""
    found = _read(directory / SETTINGS_FILE)
    before = {"model": found.get("model"), "dataset": found.get("fingerprint")} if found else {}
    own = {"model": model, "dataset": dataset}
    _refuse_others(f"{directory} holds the model", before, own, allow_new_data=allow_new_data)


def _read(path: Path) -> dict[str, Any]:
    """Returns a file's JSON object; empty where there is none."""
    try:
        return files.read_json(path, SettingsError) if path.exists() else {}
    except SettingsError as error:
        raise SettingsError(f"{error}; choose another directory or delete it") from None


def _refuse_others(
    what: str, found: Mapping[str, Any], own: Mapping[str, Any], *, allow_new_data: bool
) -> None:
    """Names the first thing in which what was found, if anything, differs from this run."""
    if not found:
        return
    differences = []
    for name, hint in (("model", ""), ("dataset", " (allow_new_data continues on the new one)")):
        if found.get(name) != own[name] and not (name == "dataset" and allow_new_data):
            differences.append(f"{name} was {found.get(name)!r}, is {own[name]!r}{hint}")
    before, now = found.get("fixed", {}), own.get("fixed", {})
    for name in before.keys() & now.keys():
        if before[name] != now[name]:
            differences.append(f"{name} was {before[name]!r}, is {now[name]!r}")
    before, now = found.get("variables", {}), own.get("variables", {})
    for name in sorted(before.keys() | now.keys()) if now else ():
        if before.get(name) != now.get(name):
            differences.append(
                f"variable {name} was {before.get(name, 'absent')}, is {now.get(name, 'absent')}"
            )
    if differences:
        raise SettingsError(
            f"{what} of another run: {differences[0]}; choose another directory or delete that one"
        )
