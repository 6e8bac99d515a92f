"""What the training component does on each replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kfp import dsl

from trainer import task
from trainer.progress import errors_end_the_process
from trainer.settings import TrainSettings


def run(
    *,
    dataset: dsl.Dataset,
    model: dsl.Model,
    model_function: str,
    hparams: Mapping[str, Any],
    **settings: Any,
) -> None:
    """Trains on this replica and describes the model artifact.

    Args:
        dataset: The dataset artifact.
        model: The model artifact; its metadata is filled in.
        model_function: Built-in name or import string.
        hparams: Keyword arguments of the model function.
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
            **settings,
        )
        metrics = task.run(chosen)
    model.metadata.update({"framework": "keras", "model_function": model_function, **metrics})


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
