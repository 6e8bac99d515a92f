"""The object `training` of a run: what is trained, and how."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from shardline.trainer.base.deserialize import check_types
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.base.settings import TrainSettings


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The object `training`: what is trained, and how.

    Attributes:
        model: mnist_cnn, resnet50, keras:NAME, or pkg.module:function.
        hparams: Further keyword arguments of the model function, a JSON object.
        epochs: Passes over the training split.
        per_replica_batch_size: Examples per replica and step; 0 for 16, or what a worker has where that is
            less.
        learning_rate: Given to the model function; 0 keeps the model's own.
        seed: Seed of the weights, the shuffling and the order of the examples, from 0; not of the split.
        train_options: Any further option of the trainer by name, a JSON object:
            {"early_stopping": "val_loss", "checkpoint_steps": 500}.

    Raises:
        SettingsError: A value is of the wrong type or out of range, or the trainer has no such option.
    """

    model: str
    hparams: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 20
    per_replica_batch_size: int = 0
    learning_rate: float = 0.0
    seed: int = 0
    train_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self)
        check_options(self.train_options)
        self.of_trainer(dataset="any")

    def of_trainer(
        self,
        *,
        dataset: str,
        model_dir: str = "",
        usual_batch_size: int = TrainSettings.per_replica_batch_size,
    ) -> TrainSettings:
        """Returns the settings of a training run; without a `model_dir` it is AIP_MODEL_DIR.

        `usual_batch_size` counts examples per replica and step, where per_replica_batch_size is 0.
        """
        options: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in self.train_options.items()
        }
        return TrainSettings(
            dataset=dataset,
            model=self.model,
            model_dir=model_dir,
            hparams=self.hparams,
            epochs=self.epochs,
            per_replica_batch_size=self.per_replica_batch_size or usual_batch_size,
            learning_rate=self.learning_rate,
            seed=self.seed,
            **options,
        )

    def with_tuned(self, chosen: Mapping[str, Any]) -> TrainingSettings:
        """Returns the settings with a trial's values; one of no setting goes to the model function."""
        own = {name: value for name, value in chosen.items() if name in TUNABLE}
        others = {name: value for name, value in chosen.items() if name not in TUNABLE}
        options = {name: value for name, value in others.items() if name in TRAINER_SETTINGS}
        hparams = {name: value for name, value in others.items() if name not in TRAINER_SETTINGS}
        return replace(
            self,
            **own,
            hparams={**self.hparams, **hparams},
            train_options={**self.train_options, **options},
        )


#: All settings of the trainer, and those that have a parameter of their own and can be tuned.
TRAINER_SETTINGS = frozenset(item.name for item in fields(TrainSettings))
TUNABLE = frozenset({"epochs", "per_replica_batch_size", "learning_rate", "seed"})
_OPTIONS = TRAINER_SETTINGS - {item.name for item in fields(TrainingSettings)} - {"dataset", "model_dir"}


def check_options(names: Collection[str]) -> None:
    """Checks that all are options of the trainer without a parameter of their own; else SettingsError."""
    for name in names:
        if name not in _OPTIONS:
            near = difflib.get_close_matches(name, _OPTIONS, n=5, cutoff=0.0)
            raise SettingsError(f"train_options has no {name!r} to set; the nearest are {', '.join(near)}")
