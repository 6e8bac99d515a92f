"""Training on one replica: the body of the component `train`, and of a trial."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from kfp import dsl

from shardline.components.train.settings import TrainingSettings
from shardline.trainer import task
from shardline.trainer.base.deserialize import read, restore_integers
from shardline.trainer.base.progress import exit_on_error
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.cluster.cluster import read_cluster
from shardline.trainer.data import manifest as manifests


def run(
    *,
    dataset: dsl.Dataset,
    model: dsl.Model,
    tuned: Mapping[str, Any],
    **training: Any,
) -> None:
    """Trains on this replica and fills in the metadata of the model artifact.

    `training` are the fields of `TrainingSettings`, `tuned` the parameters of a trial by name. A user error
    is printed in one line and ends the process with `EXIT_BAD_INPUT`.
    """
    with exit_on_error("train"):
        settings = read(TrainingSettings, restore_integers(training)).with_tuned(restore_integers(tuned))
        default = 0
        if not settings.per_replica_batch_size:  # the trainer's, or a worker's share of the training split
            split = manifests.load(Path(dataset.path)).splits.get("train")
            share = split.records // read_cluster(os.environ).num_workers if split else 0
            default = max(1, min(TrainSettings.per_replica_batch_size, share))
        metrics = task.run(
            settings.trainer_settings(dataset=dataset.path, model_dir=model.path, default_batch_size=default)
        )
    # Metadata holds no numbers per class, and JSON none that are not finite.
    shown = {name: value for name, value in metrics.items() if isinstance(value, float) and isfinite(value)}
    model.metadata.update({"framework": "keras", "model_function": settings.model_function, **shown})
