"""Changes of a run between a checkpoint and its continuation: what takes effect, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum, auto
from typing import Any

from shardline.trainer.errors import SettingsError
from shardline.trainer.settings import TrainSettings


class Effect(Enum):
    """What a setting changes in a run that goes on."""

    #: How and where the run works, not what comes out: recorded without a line.
    WORK = auto()
    #: What happens between and after epochs: also in a run that has nothing left to train.
    EPOCHS = auto()
    #: The training itself.
    TRAINING = auto()
    #: Compared as the run's identity.
    IDENTITY = auto()


_IDENTITY = (
    "gradient_accumulation_steps",
    "initial_model",
    "model",
)
_WORK = (
    "allow_new_data",
    "allow_unexportable",
    "cache",
    "checkpoint_dir",
    "checkpoint_minutes",
    "checkpoint_steps",
    "communication",
    "cpu_devices",
    "dataset",
    "deterministic",
    "evaluator",
    "evaluator_timeout",
    "grace_period",
    "histograms",
    "jit_compile",
    "keep_checkpoints",
    "model_dir",
    "peer_timeout",
    "profile_steps",
    "stall_timeout",
    "startup_timeout",
    "steps_per_execution",
    "strategy",
    "tensorboard_log_dir",
)
_EPOCHS = (
    "callbacks",
    "early_stopping",
    "early_stopping_patience",
    "epochs",
    "max_steps",
    "max_time",
    "transform",
    "replicas",
    "tuning_metric",
)
#: The effect of each setting; of any other it is TRAINING.
EFFECTS: Mapping[str, Effect] = {
    **dict.fromkeys(_IDENTITY, Effect.IDENTITY),
    **dict.fromkeys(_WORK, Effect.WORK),
    **dict.fromkeys(_EPOCHS, Effect.EPOCHS),
}


@dataclass(frozen=True)
class Moment:
    """Where a run goes on: epochs trained, examples trained of the next, and steps in all.

    `ended` says why nothing is left to train, or is "".
    """

    epoch: int
    examples: int
    steps: int
    ended: str = ""


@dataclass(frozen=True)
class Change:
    """A setting that has changed, and the first step, from 1, of which that holds."""

    step: int
    setting: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.setting} was {_text(self.was)}, is {_text(self.now)} from step {self.step:,} on"

    @property
    def json(self) -> dict[str, Any]:
        """The change as settings.json has it."""
        return {"step": self.step, "setting": self.setting, "was": self.was, "is": self.now}


@dataclass(frozen=True)
class Record:
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
    def of(cls, settings: TrainSettings, replicas: int, learning_rates: Sequence[Any]) -> Record:
        """Returns the record of a run that begins."""
        values = {"settings": asdict(settings), "learning_rates": learning_rates}
        return cls(replicas=replicas, **json.loads(json.dumps(values)))

    @property
    def json(self) -> dict[str, Any]:
        """The record as checkpoints have it, and `Record(**json)` takes it."""
        return asdict(self)

    @property
    def fixed(self) -> dict[str, Any]:
        """What cannot change: it decides which variables there are, or with what they began."""
        kinds = ["number" if isinstance(rate, float) else "schedule" for rate in self.learning_rates]
        return {
            **{name: self.settings[name] for name in _IDENTITY if name != "model"},
            "unfreeze_at_epoch": "an epoch" if self.settings["unfreeze_at_epoch"] else "never",
            "learning_rate": ", ".join(kinds),
        }

    def continuing(self, before: Record, moment: Moment) -> tuple[Record, list[Change]]:
        """Returns this run's record where it goes on from a checkpoint, and the changes that deserve a line.

        A SettingsError names the first that cannot be.
        """
        changes = self._changes(before, moment.steps + 1)
        for change in changes:
            _refuse_impossible(change, before, self, moment)
        known = [*before.changes, *(change.json for change in changes)]
        said = [one for one in changes if EFFECTS.get(one.setting) is not Effect.WORK]
        return replace(self, changes=known), said

    def _changes(self, before: Record, step: int) -> list[Change]:
        was, now = before.settings, self.settings
        names = [name for name in now if name in was and was[name] != now[name]]
        found = {name: Change(step, name, was[name], now[name]) for name in names}
        if before.replicas != self.replicas:
            found["replicas"] = Change(step, "replicas", before.replicas, self.replicas)
        for one, other in zip(before.learning_rates, self.learning_rates, strict=False):
            # What the optimizer has counts, whichever setting, or code, it comes from.
            if _of_one_replica(one) != _of_one_replica(other):
                found["learning_rate"] = Change(step, "learning_rate", _shown(one), _shown(other))
        return list(found.values())


def _refuse_impossible(change: Change, before: Record, now: Record, moment: Moment) -> None:
    rule = _RULES.get(change.setting)
    why = rule(change, before, moment) if rule else ""
    if not why and moment.ended and EFFECTS.get(change.setting, Effect.TRAINING) is Effect.TRAINING:
        why = (
            f"nothing is left to train: {moment.ended}; raise that limit, or begin a run in another directory"
        )
    if why:
        raise SettingsError(f"{change.setting} was {_text(change.was)}, is {_text(change.now)}, but {why}")


Rule = Callable[[Change, Record, Moment], str]


def _order(change: Change, before: Record, moment: Moment) -> str:
    """Forbids another order of examples within an epoch, which would miss some and repeat others."""
    if not moment.examples or (change.setting == "shard_policy" and "off" not in (change.was, change.now)):
        return ""
    return (
        f"the run goes on {moment.examples:,} examples into epoch {moment.epoch + 1}, whose order follows "
        "from it; keep it until the end of the epoch"
    )


def _unfreezing(change: Change, before: Record, moment: Moment) -> str:
    """Forbids to change the epoch that begins to train frozen layers, or its rate, once it has begun."""
    epochs = [before.settings.get("unfreeze_at_epoch", 0)]
    epochs += [change.now] if change.setting == "unfreeze_at_epoch" else []
    begun = [epoch for epoch in epochs if 0 < epoch <= moment.epoch + bool(moment.examples)]
    return f"epoch {begun[0]} has begun; begin a run in another directory" if begun else ""


def _fine_tuning(change: Change, before: Record, moment: Moment) -> str:
    """Forbids another learning rate where that of fine-tuning has taken its place."""
    return _unfreezing(change, before, moment) if before.settings.get("fine_tuning_learning_rate") else ""


_RULES: Mapping[str, Rule] = {
    "seed": _order,
    "shard_policy": _order,
    "unfreeze_at_epoch": _unfreezing,
    "fine_tuning_learning_rate": _unfreezing,
    "learning_rate": _fine_tuning,
}


def _of_one_replica(rate: Any) -> Any:
    """Returns a learning rate without the factor that follows from the number of replicas."""
    if not isinstance(rate, dict) or rate.get("class_name") != "ScaledWarmup":
        return rate
    return {name: value for name, value in rate["config"].items() if name != "factor"}


def _shown(rate: Any) -> Any:
    """Returns a learning rate, a schedule as text: "CosineDecay(decay_steps=30, ...)"."""
    if not isinstance(rate, dict):
        return rate
    config = ", ".join(f"{name}={_shown(value)}" for name, value in rate.get("config", {}).items())
    return f"{rate.get('class_name')}({config})"


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value or "not given"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)
