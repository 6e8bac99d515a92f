"""Training: its settings as parameters of a pipeline, and the program of a replica, as of a trial.

It may import what components share; a job's worker pools come from `custom_job`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from shardline.trainer.base.deserialize import read_options, restore_integers
from shardline.trainer.base.progress import exit_on_error
from shardline.trainer.base.settings import TrainSettings

if TYPE_CHECKING:
    from kfp import dsl

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


def train_replica(
    *,
    dataset: dsl.Dataset,
    model: dsl.Model,
    tuned: Mapping[str, Any],
    **training: Any,
) -> None:
    """Trains on this replica and fills in the metadata of the model artifact.

    `training` are parameters of `train`, `tuned` the parameters of a trial by name. A user error
    is printed in one line and ends the process with `EXIT_BAD_INPUT`.
    """
    from shardline.trainer import task  # with TensorFlow

    with exit_on_error("train"):
        settings = with_tuned(read_training(training), restore_integers(tuned))
        metrics = task.run_replica(replace(settings, dataset=dataset.path, model_dir=model.path))
    # Metadata holds no numbers per class, and JSON none that are not finite.
    shown = {name: value for name, value in metrics.items() if isinstance(value, float) and isfinite(value)}
    model.metadata.update({"framework": "keras", "model_function": settings.model, **shown})
