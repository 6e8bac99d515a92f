"""Identity: what a run that goes on must have kept since its beginning, and what has changed on the way."""

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

# Settings that decide which variables there are, with what they began, or which examples are still to come.
_FIXED_SETTINGS = (
    "fine_tuning_learning_rate",
    "gradient_accumulation_steps",
    "initial_model",
    "seed",
    "unfreeze_at_epoch",
)


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
    _check_same_run(f"{directory} holds checkpoints", found, own, allow_new_data=allow_new_data)
    if write and found != own:
        directory.mkdir(parents=True, exist_ok=True)
        files.write_json(path, own)


def check_model_dir(directory: Path, *, model: str, dataset: str, allow_new_data: bool) -> None:
    """Refuses a model directory into which another run has written; needs no model yet."""
    found = _read(directory / SETTINGS_FILE)
    before = {"model": found.get("model"), "dataset": found.get("fingerprint")} if found else {}
    own = {"model": model, "dataset": dataset}
    _check_same_run(f"{directory} holds the model", before, own, allow_new_data=allow_new_data)


def _read(path: Path) -> dict[str, Any]:
    """Returns a file's JSON object; empty where there is none."""
    try:
        return files.read_json(path, SettingsError) if path.exists() else {}
    except SettingsError as error:
        raise SettingsError(f"{error}; choose another directory or delete it") from None


def _check_same_run(
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


@dataclass(frozen=True)
class IdentityRecord:
    """What a run is, as JSON, kept in its checkpoints.

    Attributes:
        settings: Value of each setting.
        replicas: Replicas that share each step.
        learning_rates: Those of the optimizers as built: a number each, or a schedule's configuration.
        changes: Changes of earlier continuations, as settings.json has them.
    """

    settings: Mapping[str, Any]
    replicas: int
    learning_rates: Sequence[Any]
    changes: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(cls, settings: TrainSettings, replicas: int, learning_rates: Sequence[Any]) -> IdentityRecord:
        """Returns the record of a run that begins."""
        values = {"settings": asdict(settings), "learning_rates": learning_rates}
        return cls(replicas=replicas, **json.loads(json.dumps(values)))

    @property
    def fixed(self) -> dict[str, Any]:
        """What is part of the run's identity."""
        kinds = ["number" if isinstance(rate, float) else "schedule" for rate in self.learning_rates]
        # What fine-tuning begins with takes the place of the rate before it.
        tuned = self.settings["fine_tuning_learning_rate"]
        rates = list(map(_unscaled_rate, self.learning_rates)) if tuned else ", ".join(kinds)
        return {**{name: self.settings[name] for name in _FIXED_SETTINGS}, "learning_rate": rates}

    def continuing(self, before: IdentityRecord, step: int) -> tuple[IdentityRecord, str]:
        """Returns this run's record where it goes on with a step, from 1, and in words what has changed."""
        was, now = before.settings, self.settings
        names = [name for name in now if name in was and was[name] != now[name] and name not in PATH_SETTINGS]
        found = {name: (was[name], now[name]) for name in names}
        if before.replicas != self.replicas:
            found["replicas"] = (before.replicas, self.replicas)
        for one, other in zip(before.learning_rates, self.learning_rates, strict=False):
            # What the optimizer has counts, whichever setting, or code, it comes from.
            if _unscaled_rate(one) != _unscaled_rate(other):
                found["learning_rate"] = (_format_rate(one), _format_rate(other))
        changes = [{"step": step, "setting": name, "was": a, "is": b} for name, (a, b) in found.items()]
        said = ", ".join(
            f"{name} was {_format_value(a)}, is {_format_value(b)}" for name, (a, b) in found.items()
        )
        return replace(self, changes=[*before.changes, *changes]), said and f"{said} from step {step:,} on"


def _unscaled_rate(rate: Any) -> Any:
    """Returns a learning rate without the factor that follows from the number of replicas."""
    if not isinstance(rate, dict) or rate.get("class_name") != "ScaledWarmup":
        return rate
    return {name: value for name, value in rate["config"].items() if name != "factor"}


def _format_rate(rate: Any) -> Any:
    """Returns a learning rate, a schedule as text: "CosineDecay(decay_steps=30, ...)"."""
    if not isinstance(rate, dict):
        return rate
    config = ", ".join(f"{name}={_format_rate(value)}" for name, value in rate.get("config", {}).items())
    return f"{rate.get('class_name')}({config})"


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        return value or "not given"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)
