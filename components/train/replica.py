"""Training component on each replica: the body of `train`, and a program of its own.

`python -m shardline.components.train.replica JSON` is a replica where the worker pools are a parameter of the
run: the paths of dataset and model, and the object `training`, without a placeholder of the platform.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from kfp import dsl

from shardline.components.train.settings import TrainingSettings
from shardline.components.vertex.forms import check_text
from shardline.trainer import files, task
from shardline.trainer.cluster.cluster import read_cluster
from shardline.trainer.data import manifest as manifests
from shardline.trainer.errors import SettingsError
from shardline.trainer.progress import errors_end_the_process
from shardline.trainer.records import read
from shardline.trainer.settings import TrainSettings


def run(
    *,
    dataset: dsl.Dataset,
    model: dsl.Model,
    training: Mapping[str, Any],
    tuned: Mapping[str, Any] | None = None,
) -> None:
    """Trains on this replica and fills in the metadata of the model artifact.

    `training` has the fields of `TrainingSettings`, `tuned` the parameters of a trial by name. A mistake of
    the user ends the process with `EXIT_BAD_INPUT`, after one line that says which.
    """
    with errors_end_the_process("train"):
        settings = read(TrainingSettings, training, "training").with_tuned(tuned or {})
        usual = 0 if settings.per_replica_batch_size else _usual_batch_size(Path(dataset.path))
        metrics = task.run(
            settings.of_trainer(dataset=dataset.path, model_dir=model.path, usual_batch_size=usual)
        )
    # A number for each class has no place in an artifact's metadata, and one that is not finite none in JSON.
    shown = {name: value for name, value in metrics.items() if isinstance(value, float) and isfinite(value)}
    model.metadata.update({"framework": "keras", "model_function": settings.model, **shown})


def _usual_batch_size(dataset: Path) -> int:
    """Returns the trainer's default, or a worker's share of the training split where that is less."""
    split = manifests.load(dataset).splits.get("train")
    share = split.records // read_cluster(os.environ).num_workers if split else 0
    return max(1, min(TrainSettings.per_replica_batch_size, share))


def program(
    image: str, module: str = "shardline.components.train.replica", **arguments: Any
) -> dict[str, Any]:
    """Returns the container_spec of replicas that run a module with `arguments` as one JSON object.

    Raises SettingsError when an argument holds what the platform would replace.
    """
    text = json.dumps(arguments, ensure_ascii=False)
    check_text("a parameter of the training", text)
    return {"image_uri": image, "command": ["python3", "-m", module], "args": [text]}


def main(arguments: Sequence[str]) -> None:
    """Entry point."""
    with errors_end_the_process("train"):
        text = arguments[0] if len(arguments) == 1 else "null"
        given = files.parse_json(text, "the argument", SettingsError)
        if not isinstance(given, dict) or set(given) != {"dataset", "model", "training"}:
            raise SettingsError(
                "a replica takes one argument, a JSON object with dataset, model and training"
            )
    run(
        dataset=dsl.Dataset(uri=given["dataset"]),
        model=dsl.Model(uri=given["model"]),
        training=given["training"],
    )


if __name__ == "__main__":
    main(sys.argv[1:])
