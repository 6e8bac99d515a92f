"""Task: `python -m shardline.trainer.task`, the program that every replica of a training job runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from shardline.trainer.base import files
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.base.progress import exit_on_error
from shardline.trainer.base.settings import TrainSettings, flag_name
from shardline.trainer.checkpoint.preemption import Preemption
from shardline.trainer.cluster.cluster import read_cluster
from shardline.trainer.loop import fail_fast_marker

# Groups of `--help` by their first setting, in the order of the settings.
_GROUPS = {
    "dataset": "data, model and output",
    "epochs": "duration",
    "per_replica_batch_size": "batches and learning rate",
    "class_weights": "examples, callbacks and stopping",
    "precision": "precision",
    "strategy": "distribution",
    "checkpoint_steps": "checkpoints and resuming",
    "evaluator": "processes and timeouts",
}


# Subdirectories of --job-dir, as in the platform's AIP_* variables below the job's base directory.
_JOB_SUBDIRECTORIES = {"model_dir": "model", "checkpoint_dir": "checkpoints", "tensorboard_log_dir": "logs"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}; see python -m shardline.trainer.task --help")


def parse(arguments: Sequence[str] | None = None) -> TrainSettings:
    """Returns the settings of command-line flags; raises SettingsError for a wrong one."""
    values: dict[str, Any] = vars(parser().parse_args(arguments))
    base = values.pop("job_dir").rstrip("/")
    for name, part in _JOB_SUBDIRECTORIES.items():
        values[name] = values[name] or (f"{base}/{part}" if base else "")
    return TrainSettings(**{**values, "callbacks": tuple(values["callbacks"])})


def parser() -> argparse.ArgumentParser:
    """Returns the parser: a flag for every field of `TrainSettings`, with its annotation as help."""
    parser = _Parser(
        prog="python -m shardline.trainer.task",
        usage="%(prog)s --dataset DIR --model MODEL [OPTIONS]",
        description="Train a compiled Keras 3 model on a dataset directory, alone or as one replica of the "
        "cluster in TF_CONFIG.",
        allow_abbrev=False,
    )
    hints = get_type_hints(TrainSettings, include_extras=True)
    group: Any = parser
    for field in fields(TrainSettings):
        if field.name in _GROUPS:
            group = parser.add_argument_group(_GROUPS[field.name])
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        required = default is MISSING
        text = hints[field.name].__metadata__[-1].replace("%", "%%")
        suffix = f" (default {default})" if default not in (MISSING, "", False, (), {}) else ""
        options = {
            "default": None if required else default,
            **_argument_options(field.name, hints[field.name], default),
        }
        group.add_argument(
            flag_name(field.name), dest=field.name, required=required, help=text + suffix, **options
        )
        if field.name == "model":
            parts = ", ".join(f"{part} ({flag_name(name)})" for name, part in _JOB_SUBDIRECTORIES.items())
            group.add_argument("--job-dir", default="", metavar="DIR", help=f"Directory for {parts}.")
    return parser


def _argument_options(name: str, hint: Any, default: Any) -> dict[str, Any]:
    if get_origin(hint.__origin__) is Literal:
        return {"choices": get_args(hint.__origin__)}
    if isinstance(default, bool):
        return {"action": "store_true"}
    if isinstance(default, tuple):
        return {"action": "append", "default": list(default), "metavar": "PKG.MODULE:NAME"}
    if name == "class_weights":
        return {"type": lambda text: _json_object(text) if text[:1] == "{" else text, "metavar": "JSON"}
    if isinstance(default, dict):
        return {"type": _json_object, "metavar": "JSON"}
    if isinstance(default, int | float):
        return {"type": type(default), "metavar": "N" if isinstance(default, int) else "X"}
    return {"metavar": name.upper()}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = files.parse_json(text, "it", SettingsError)
    except SettingsError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text[:80]!r}")
    return value


def run(settings: TrainSettings, environ: Mapping[str, str] = os.environ) -> dict[str, float]:
    """Runs `train.train` after preparing the process: signals, memory and the import of TensorFlow."""
    cluster = read_cluster(environ)  # raises its errors before TensorFlow is loaded
    with (
        fail_fast_marker.refuse_repeated_failure(settings, cluster, environ),
        Preemption(settings.grace_period),
    ):
        from shardline.trainer.keras_compat import tensorflow_internals

        tensorflow_internals.keep_freed_memory()
        tensorflow_internals.import_tensorflow()
        from shardline.trainer.train import train  # after the settings have been checked

        return train(settings, environ)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    with exit_on_error("train"):
        run(parse(arguments))


if __name__ == "__main__":
    main()
