"""`python -m trainer.task`: the program that every replica of a training job runs."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

from trainer import quiet
from trainer.errors import SettingsError
from trainer.progress import errors_end_the_process
from trainer.settings import STRATEGIES, TrainSettings


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the flags as every other mistake is said."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}; see python -m trainer.task --help")


def parse(arguments: Sequence[str] | None = None) -> TrainSettings:
    """Turns command-line flags into settings.

    Raises:
        SettingsError: When a flag is unknown or mistyped, or a value is out of range.
    """
    defaults = {field.name: field.default for field in fields(TrainSettings)}
    parser = _Parser(
        prog="python -m trainer.task",
        description="Trains a compiled Keras 3 model on a dataset directory, alone or as one replica of the "
        "cluster that TF_CONFIG describes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--dataset", required=True, help="dataset directory written by preprocessing")
    add("--model", required=True, help="built-in name (mnist_cnn, resnet50) or pkg.module:function")
    add("--model-dir", help="where the model goes; default AIP_MODEL_DIR")
    add("--checkpoint-dir", help="default AIP_CHECKPOINT_DIR, else MODEL_DIR/checkpoints")
    add("--tensorboard-log-dir", help="default AIP_TENSORBOARD_LOG_DIR, else MODEL_DIR/logs")
    add("--epochs", type=int, help="passes over the training split")
    add("--per-replica-batch-size", type=int, help="examples per replica and step")
    add("--learning-rate", type=float, help="0 keeps the model's own")
    add("--hparams", type=_json_object, metavar="JSON", help="further arguments of the model function")
    add("--seed", type=int, help="of weights, dropout and shuffling")
    add("--strategy", choices=STRATEGIES, help="how the replicas work together")
    add("--steps-per-execution", type=int, help="steps between two looks at the metrics; 0 chooses")
    parser.set_defaults(**{**defaults, "hparams": {}})
    return TrainSettings(**vars(parser.parse_args(arguments)))


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text!r}")
    return value


def run(settings: TrainSettings) -> dict[str, float]:
    """Trains in this process as the environment says (TF_CONFIG, AIP_*)."""
    quiet.import_tensorflow()
    from trainer.train import train  # TensorFlow, so only once the settings are known to be good

    return train(settings, os.environ)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    with errors_end_the_process("train"):
        run(parse(arguments))


if __name__ == "__main__":
    main()
