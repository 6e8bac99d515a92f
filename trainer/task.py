"""Task: `python -m shardline.trainer.task`, the program that every replica of a training job runs.

The platform restarts a replica, a job and a task after any exit status. So the replica that finds a user
error leaves a marker next to the run's checkpoints, whose name is a digest of settings, data and code: a
restart ends with that error before it costs anything.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from shardline.trainer.base import crash, files, plugins, progress
from shardline.trainer.base.errors import EXIT_BAD_INPUT, SettingsError, ShardlineError
from shardline.trainer.base.settings import TrainSettings, flag_name, output_dirs, plugin_references
from shardline.trainer.cluster import ACCELERATORS_VARIABLE, ClusterConfig, read_cluster
from shardline.trainer.manifest import MANIFEST_FILE
from shardline.trainer.preemption import Preemption

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

_MARKERS = "mistake-*.json"
#: Variables of which a process in a job, which may be restarted, has at least one.
_JOB_VARIABLES = ("CLOUD_ML_JOB_ID", "CLUSTER_SPEC")
# Settings of output directories, which differ in a retried task.
_OUTPUT_SETTINGS = ("model_dir", "tensorboard_log_dir")


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
    if name == "class_weights" or isinstance(default, dict):
        is_word, flag = default == "", flag_name(name)
        read = partial(files.parse_json, what=flag, error=SettingsError)
        return {"type": lambda text: text if is_word and text[:1] != "{" else read(text), "metavar": "JSON"}
    if isinstance(default, int | float):
        return {"type": type(default), "metavar": "N" if isinstance(default, int) else "X"}
    return {"metavar": name.upper()}


@contextlib.contextmanager
def refuse_repeated_failure(
    settings: TrainSettings, cluster: ClusterConfig, environ: Mapping[str, str]
) -> Iterator[None]:
    """Writes a marker of a user error that ends the context; in a restart the marker is the error."""
    if not any(name in environ for name in _JOB_VARIABLES):  # started by hand
        yield
        return
    marker, failure = _marker(settings, cluster, environ), None
    with contextlib.suppress(ShardlineError):
        failure = files.read_json(marker, SettingsError).get("error")
    if isinstance(failure, str):
        progress.report(
            "train", f"an earlier attempt has ended with this error, and nothing has changed: {marker}"
        )
        raise ShardlineError(failure)
    try:
        yield
    except ShardlineError as error:
        if error.exit_code == EXIT_BAD_INPUT and not crash.is_machine_failure(error):
            with contextlib.suppress(OSError):
                marker.parent.mkdir(parents=True, exist_ok=True)
                files.write_json(marker, {"error": error.line, "replica": cluster.name})
        raise


def clear_markers(directory: Path) -> None:
    """Removes the markers of a directory, for a new job."""
    for marker in directory.glob(_MARKERS):
        marker.unlink(missing_ok=True)


def _marker(settings: TrainSettings, cluster: ClusterConfig, environ: Mapping[str, str]) -> Path:
    own = environ.get("AIP_CHECKPOINT_DIR")
    base = files.local_path(own).parent if own else output_dirs(settings, environ).model
    chosen = {name: value for name, value in asdict(settings).items() if name not in _OUTPUT_SETTINGS}
    tasks = {kind: len(hosts) for kind, hosts in cluster.tasks.items()}
    names = [name for path in sys.path if os.path.isdir(path) for name in os.listdir(path)]
    installed = sorted({name for name in names if name.endswith(".dist-info")})
    inputs = [settings.dataset, settings.initial_model, *settings.hparams.values()]
    states = [_path_state(files.local_path(text)) for text in inputs if isinstance(text, str) and text]
    known = (chosen, tasks, environ.get(ACCELERATORS_VARIABLE), installed, states)
    digest = hashlib.sha256(repr(known).encode())
    for package in ("shardline.trainer", *plugins.packages(plugin_references(asdict(settings)).values())):
        for path in plugins.python_files(package):
            if path.is_file():
                digest.update(path.read_bytes())
    return base / _MARKERS.replace("*", digest.hexdigest()[:16])


def _path_state(path: Path) -> Any:
    """Returns name, size and time of a file, or of the files in a directory; [] if it does not exist."""
    with contextlib.suppress(OSError, ValueError):
        if (manifest := path / MANIFEST_FILE).is_file():  # which has the checksums of the shards
            return sorted(os.listdir(path)), manifest.read_bytes()
        paths = sorted(path.iterdir()) if path.is_dir() else [path]
        known = [(file.name, file.stat()) for file in paths]
        return [(name, at.st_size, at.st_mtime_ns) for name, at in known if stat.S_ISREG(at.st_mode)]
    return []


def run_replica(settings: TrainSettings, environ: Mapping[str, str] = os.environ) -> dict[str, float]:
    """Runs `train.train` after preparing the process: signals, memory and the import of TensorFlow."""
    cluster = read_cluster(environ)  # raises its errors before TensorFlow is loaded
    with refuse_repeated_failure(settings, cluster, environ), Preemption(settings.grace_period):
        from shardline.trainer.keras_compat import tensorflow_internals

        tensorflow_internals.keep_freed_memory()
        tensorflow_internals.import_tensorflow()
        from shardline.trainer.train import train  # after the settings have been checked

        return train(settings, environ)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    with progress.exit_on_error("train"):
        run_replica(parse(arguments))


if __name__ == "__main__":
    main()
