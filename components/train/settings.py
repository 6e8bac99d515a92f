"""Settings of the training in a pipeline: the trainer's own, as parameters and their options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from shardline.trainer.base.deserialize import read_options
from shardline.trainer.base.settings import TrainSettings

#: Settings of the trainer that are parameters of the pipeline and can be tuned.
TUNABLE = frozenset({"epochs", "per_replica_batch_size", "learning_rate", "seed"})
_NAMES = frozenset(item.name for item in fields(TrainSettings))
#: Those that are its options.
OPTIONS = _NAMES - {*TUNABLE, "hparams", "model", "dataset", "model_dir"}


def read_training(values: Mapping[str, Any], options: str = "options") -> TrainSettings:
    """Returns the trainer's settings of the parameters of `train`, whose `options` have that name.

    The dataset and the directory of the model are set where it trains. Raises SettingsError when a value is
    of the wrong type or out of range, or the trainer has no such option.
    """
    own = {name: values[name] for name in (*TUNABLE, "hparams", options) if name in values}
    return read_options(
        TrainSettings, {"model": values["model_function"], **own}, options, dataset="any", model_dir=""
    )


def with_tuned(settings: TrainSettings, chosen: Mapping[str, Any]) -> TrainSettings:
    """Returns the settings with a trial's values; other names are arguments of the model function."""
    own = {name: value for name, value in chosen.items() if name in _NAMES}
    others = {name: value for name, value in chosen.items() if name not in _NAMES}
    return replace(settings, **own, hparams={**settings.hparams, **others})


def can_be_tuned(name: str) -> bool:
    """Whether a parameter of a study is an argument of the model function, or a setting that can vary."""
    return name not in _NAMES or name in TUNABLE or name in OPTIONS
