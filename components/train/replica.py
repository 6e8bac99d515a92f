"""Training on one replica: the body of the component `train`, and of a trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import Any

from kfp import dsl

from shardline.components.train.settings import read_training, with_tuned
from shardline.trainer import task
from shardline.trainer.base.deserialize import restore_integers
from shardline.trainer.base.progress import exit_on_error


def run(
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
    with exit_on_error("train"):
        settings = with_tuned(read_training(training), restore_integers(tuned))
        metrics = task.run(replace(settings, dataset=dataset.path, model_dir=model.path))
    # Metadata holds no numbers per class, and JSON none that are not finite.
    shown = {name: value for name, value in metrics.items() if isinstance(value, float) and isfinite(value)}
    model.metadata.update({"framework": "keras", "model_function": settings.model, **shown})
