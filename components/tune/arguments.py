"""The trainer's arguments with the parameters of a trial in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from shardline.trainer.settings import TrainSettings

#: Settings that the training component takes one by one; the others are its options.
_OWN = ("epochs", "per_replica_batch_size", "learning_rate", "seed")
_OPTIONS = {field.name for field in fields(TrainSettings)}


def with_parameters(arguments: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `shardline.components.train.run.run` with the parameters of a trial put in.

    Args:
        arguments: With hparams and options; they stay as they are.
        chosen: By name. A setting of the trainer is one there; everything else goes to the model function.
    """
    merged = {**arguments, "hparams": dict(arguments["hparams"]), "options": dict(arguments["options"])}
    for name, value in chosen.items():
        if name in _OWN:
            merged[name] = value
        else:
            merged["options" if name in _OPTIONS else "hparams"][name] = value
    return merged
