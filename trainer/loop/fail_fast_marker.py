"""Fail-fast markers: a user error that ended a job ends its restart before it costs anything.

The platform restarts a replica, a job and a task after any exit status. So the replica that finds a user
error leaves a marker next to the run's checkpoints, whose name is a digest of settings, data and code.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardline.trainer.base import crash, files, plugins, progress
from shardline.trainer.base.errors import EXIT_BAD_INPUT, SettingsError, ShardlineError
from shardline.trainer.base.settings import TrainSettings, output_dirs, plugin_references
from shardline.trainer.cluster.cluster import ACCELERATORS_VARIABLE, ClusterConfig
from shardline.trainer.data.manifest import MANIFEST_FILE

_MARKERS = "mistake-*.json"
#: Variables of which a process in a job, which may be restarted, has at least one.
_JOB_VARIABLES = ("CLOUD_ML_JOB_ID", "CLUSTER_SPEC")
# Settings of output directories, which differ in a retried task.
_OUTPUT_SETTINGS = ("model_dir", "tensorboard_log_dir")


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
