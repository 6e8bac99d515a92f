"""What the training component does on each replica.

`python -m shardline.components.train.replica JSON` is a replica where the pools are a parameter.

The JSON object holds the paths of dataset and model, and the other arguments of `run`.

The program of a replica as plain arguments, without a placeholder for the platform to fill in.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp import dsl

from shardline.components.vertex.forms import check_text
from shardline.trainer import task
from shardline.trainer.cluster.cluster import read_cluster
from shardline.trainer.data import manifest as manifests
from shardline.trainer.errors import SettingsError
from shardline.trainer.progress import errors_end_the_process
from shardline.trainer.settings import TrainSettings

if TYPE_CHECKING:
    from kfp import dsl

# Settings that the component itself decides.
_OF_THE_COMPONENT = {"dataset", "model", "model_dir", "hparams"}


def run(
    *,
    dataset: dsl.Dataset,
    model: dsl.Model,
    model_function: str,
    hparams: Mapping[str, Any],
    options: Mapping[str, Any],
    per_replica_batch_size: int,
    **settings: Any,
) -> None:
    """Trains on this replica and describes the model artifact.

    Args:
        dataset: The dataset artifact.
        model: The model artifact; its metadata is filled in.
        model_function: Built-in name or import string.
        hparams: Keyword arguments of the model function.
        options: Fields of `TrainSettings` that have no parameter of their own.
        per_replica_batch_size: 0 for the usual, or what a worker has where that is less.
        **settings: Further fields of `TrainSettings`.

    Raises:
        SystemExit: With `EXIT_BAD_INPUT` for a mistake of the user, after one line that says which.
    """
    with errors_end_the_process("train"):
        chosen = TrainSettings(
            dataset=dataset.path,
            model=model_function,
            model_dir=model.path,
            hparams=restore_integers(hparams),
            per_replica_batch_size=per_replica_batch_size or _usual_batch_size(Path(dataset.path)),
            **check_options(options, taken={*settings, "per_replica_batch_size"}),
            **settings,
        )
        metrics = task.run(chosen)
    model.metadata.update({"framework": "keras", "model_function": model_function, **metrics})


def _usual_batch_size(dataset: Path) -> int:
    """Returns the trainer's default, or a worker's share of the training split where that is less."""
    split = manifests.load(dataset).splits.get("train")
    share = split.records // read_cluster(os.environ).num_workers if split else 0
    return max(1, min(TrainSettings.per_replica_batch_size, share))


def check_options(options: Mapping[str, Any], *, taken: Collection[str]) -> dict[str, Any]:
    """Returns options as `TrainSettings` takes them.

    Args:
        options: By name, as JSON has them.
        taken: Settings that have a parameter of their own.

    Raises:
        SettingsError: When an option is none of the trainer's, or has a parameter of its own.
    """
    known = {field.name for field in fields(TrainSettings)} - _OF_THE_COMPONENT - set(taken)
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=5, cutoff=0.0)
            raise SettingsError(f"train_options has no {name!r} to set; the nearest are {', '.join(near)}")
    restored = restore_integers(options)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in restored.items()}


def restore_integers(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters with whole floats as integers, all the way down.

    Pipeline parameters travel as protobuf Struct, which knows no integers: 64 arrives as 64.0, and
    keras.layers.Dense refuses that. A float that is whole serves as well where a float is wanted.
    """
    return {name: _restore(value) for name, value in hparams.items()}


def _restore(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return restore_integers(value)
    return [_restore(item) for item in value] if isinstance(value, list) else value


def main(argument: str) -> None:
    """Trains."""
    values = json.loads(argument)
    dataset, model = dsl.Dataset(uri=values.pop("dataset")), dsl.Model(uri=values.pop("model"))
    run(dataset=dataset, model=model, **values)


def program(
    image: str, module: str = "shardline.components.train.replica", **arguments: Any
) -> dict[str, Any]:
    """Returns the container_spec that trains.

    Args:
        image: Container image.
        module: What a replica runs.
        **arguments: Its first argument, as JSON.

    Raises:
        SettingsError: When an argument holds what the platform would replace.
    """
    text = json.dumps(arguments, ensure_ascii=False)
    check_text("a parameter of the training", text)
    return {"image_uri": image, "command": ["python3", "-m", module], "args": [text]}


if __name__ == "__main__":
    main(sys.argv[1])
