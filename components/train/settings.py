"""Training settings of a run, the parameters of the component `train`."""

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
    """Parameters of the component `train`, which explains them.

    Raises:
        SettingsError: A value is of the wrong type or out of range, or the trainer has no such option.
    """

    model_function: str
    hparams: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 20
    per_replica_batch_size: int = 0
    learning_rate: float = 0.0
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self)
        check_options(self.options)
        self.trainer_settings(dataset="any")

    def trainer_settings(
        self,
        *,
        dataset: str,
        model_dir: str = "",
        default_batch_size: int = TrainSettings.per_replica_batch_size,
    ) -> TrainSettings:
        """Returns the trainer's settings; `model_dir` "" is AIP_MODEL_DIR.

        `default_batch_size` replaces a per_replica_batch_size of 0.
        """
        options: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in self.options.items()
        }
        return TrainSettings(
            dataset=dataset,
            model=self.model_function,
            model_dir=model_dir,
            hparams=self.hparams,
            epochs=self.epochs,
            per_replica_batch_size=self.per_replica_batch_size or default_batch_size,
            learning_rate=self.learning_rate,
            seed=self.seed,
            **options,
        )

    def with_tuned(self, chosen: Mapping[str, Any]) -> TrainingSettings:
        """Returns the settings with a trial's values; other names are arguments of the model function."""
        own = {name: value for name, value in chosen.items() if name in TUNABLE}
        others = {name: value for name, value in chosen.items() if name not in TUNABLE}
        options = {name: value for name, value in others.items() if name in TRAINER_SETTINGS}
        hparams = {name: value for name, value in others.items() if name not in TRAINER_SETTINGS}
        options, hparams = {**self.options, **options}, {**self.hparams, **hparams}
        return replace(self, **own, hparams=hparams, options=options)


#: All settings of the trainer, and those that are parameters of the pipeline and can be tuned.
TRAINER_SETTINGS = frozenset(item.name for item in fields(TrainSettings))
TUNABLE = frozenset({"epochs", "per_replica_batch_size", "learning_rate", "seed"})
#: Those that `options` may have.
OPTIONS = TRAINER_SETTINGS - {*TUNABLE, "hparams", "model", "dataset", "model_dir"}


def check_options(names: Collection[str]) -> None:
    """Raises SettingsError unless all are options of the trainer that `options` may have."""
    for name in names:
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, n=5, cutoff=0.0)
            has_own = name in TRAINER_SETTINGS
            hint = "it has a value of its own" if has_own else f"the nearest are {', '.join(near)}"
            raise SettingsError(f"training has no option {name!r}; {hint}")
