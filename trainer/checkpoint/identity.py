"""Identity of a run: what must stay the same when it resumes, and a record of what has changed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shardline.trainer.base import files
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.base.settings import PATH_SETTINGS, SETTINGS_FILE, TrainSettings

IDENTITY_FILE = "run.json"

# Settings that determine the variables, their initial values, or the order of examples.
_FIXED_SETTINGS = ("gradient_accumulation_steps", "initial_model", "seed")


@dataclass(frozen=True)
class Identity:
    """Identity of a run: its `model` setting, its dataset's fingerprint, and `TrainingState.variables`.

    `fixed` are further settings that may not change. They and the variables are empty, and not compared, in
    a process that has only some of them (the evaluator). `format` is that of checkpoints and their records.
    """

    model: str
    dataset: str
    variables: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    format: int = 1


def claim(directory: Path, identity: Identity, *, allow_new_data: bool, write: bool) -> None:
    """Claims a checkpoint directory for this run, or refuses another run's; only the chief writes."""
    path = directory / IDENTITY_FILE
    previous = _read(path)
    own = asdict(identity)
    _check_same_run(f"{directory} holds checkpoints", previous, own, allow_new_data=allow_new_data)
    if write and previous != own:
        directory.mkdir(parents=True, exist_ok=True)
        files.write_json(path, own)


def check_model_dir(directory: Path, *, model: str, dataset: str, allow_new_data: bool) -> None:
    """Refuses a model directory of another run, before a model is built."""
    settings = _read(directory / SETTINGS_FILE)
    previous = {"model": settings.get("model"), "dataset": settings.get("fingerprint")} if settings else {}
    own = {"model": model, "dataset": dataset}
    _check_same_run(f"{directory} holds the model", previous, own, allow_new_data=allow_new_data)


def _read(path: Path) -> dict[str, Any]:
    try:
        return files.read_json(path, SettingsError) if path.exists() else {}
    except SettingsError as error:
        raise SettingsError(f"{error}; choose another directory, or delete this file to continue") from None


def _check_same_run(
    what: str, previous: Mapping[str, Any], own: Mapping[str, Any], *, allow_new_data: bool
) -> None:
    """Raises SettingsError with the first difference between a previous run, if any, and this one."""
    if not previous:
        return
    differences = []
    hints = {"format": "", "model": "", "dataset": " (allow_new_data continues on the new one)"}
    for name, hint in hints.items():
        if previous.get(name) != own.get(name) and not (name == "dataset" and allow_new_data):
            differences.append(f"{name} was {previous.get(name)!r}, is {own[name]!r}{hint}")
    before, now = previous.get("fixed", {}), own.get("fixed", {})
    for name in before.keys() & now.keys():
        if before[name] != now[name]:
            differences.append(f"{name} was {before[name]!r}, is {now[name]!r}")
    before, now = previous.get("variables", {}), own.get("variables", {})
    for name in sorted(before.keys() | now.keys()) if now else ():
        if before.get(name) != now.get(name):
            differences.append(
                f"variable {name} was {before.get(name, 'absent')}, is {now.get(name, 'absent')}"
            )
    if differences:
        raise SettingsError(
            f"{what} of another run: {differences[0]}; choose another directory or delete that one"
        )


@dataclass(frozen=True)
class IdentityRecord:
    """Record of a run's settings, as JSON in its checkpoints.

    `learning_rates` are those of the optimizers as built, each a number or a schedule's configuration;
    `changes` those when the run resumed earlier, as in settings.json.
    """

    settings: Mapping[str, Any]
    replicas: int
    learning_rates: Sequence[Any]
    changes: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(cls, settings: TrainSettings, replicas: int, learning_rates: Sequence[Any]) -> IdentityRecord:
        """Returns the record of a new run."""
        values = {"settings": asdict(settings), "learning_rates": learning_rates}
        return cls(replicas=replicas, **json.loads(json.dumps(values)))

    @property
    def fixed(self) -> dict[str, Any]:
        """Settings that are part of the run's identity."""
        kinds = ["number" if isinstance(rate, float) else "schedule" for rate in self.learning_rates]
        return {**{name: self.settings[name] for name in _FIXED_SETTINGS}, "learning_rate": ", ".join(kinds)}

    def continuing(self, before: IdentityRecord, step: int) -> tuple[IdentityRecord, str]:
        """Returns this run's record when it resumes at a step, from 1, and a description of the changes."""
        was, now = before.settings, self.settings
        names = [name for name in now if was[name] != now[name] and name not in PATH_SETTINGS]
        changed = {name: (was[name], now[name]) for name in names}
        if before.replicas != self.replicas:
            changed["replicas"] = (before.replicas, self.replicas)
        for old, new in zip(before.learning_rates, self.learning_rates, strict=False):
            # The optimizer's rate is compared, whether it comes from a setting or from code.
            if old != new:
                changed["learning_rate"] = (format_rate(old), format_rate(new))
        changes = [{"step": step, "setting": name, "was": a, "is": b} for name, (a, b) in changed.items()]
        text = ", ".join(
            f"{name} was {_format_value(a)}, is {_format_value(b)}" for name, (a, b) in changed.items()
        )
        return replace(self, changes=[*before.changes, *changes]), text and f"{text} from step {step:,} on"


def format_rate(rate: Any) -> Any:
    """Returns a number as it is, a schedule as text: "CosineDecay(decay_steps=30, ...)"."""
    if not isinstance(rate, dict):
        return rate
    config = {name: format_rate(value) for name, value in rate.get("config", {}).items() if name != "name"}
    # Numbers of 32 bits as they were written: 0.003, not 0.003000000026077032.
    config = {name: f"{value:g}" if isinstance(value, float) else value for name, value in config.items()}
    values = ", ".join(f"{name}={value}" for name, value in config.items() if value is not None)
    return f"{rate.get('class_name')}({values})"


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        return value or "not set"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)
