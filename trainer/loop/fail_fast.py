"""Attempts: the mistake that ended an attempt of this job, which ends the next one before it costs anything.

The platform starts a replica, a job and a task again whatever they ended with. So the replica that finds a
mistake leaves a marker beside the run's checkpoints, whose name says for which settings, data and code.
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
from shardline.trainer.base.errors import EXIT_BAD_INPUT, RepeatedError, SettingsError, ShardlineError
from shardline.trainer.base.settings import TrainSettings, output_dirs, plugin_references
from shardline.trainer.cluster.cluster import ACCELERATORS_VARIABLE, ClusterConfig
from shardline.trainer.data.manifest import MANIFEST_FILE

_MARKERS = "mistake-*.json"
#: Variables of which a process in a job, which may be started again, has one at least.
_OF_A_JOB = ("CLOUD_ML_JOB_ID", "CLUSTER_SPEC")
# Where attempts may write; a retried task has another directory for its model.
_PLACES = ("model_dir", "tensorboard_log_dir")


@contextlib.contextmanager
def refuse_repeated_failure(
    settings: TrainSettings, cluster: ClusterConfig, environ: Mapping[str, str]
) -> Iterator[None]:
    """Remembers the mistake that ends the context for the job's next attempt: there it is a RepeatedError."""
    if not any(name in environ for name in _OF_A_JOB):  # somebody tries by hand
        yield
        return
    marker, found = _marker(settings, cluster, environ), None
    with contextlib.suppress(SettingsError):
        found = files.read_json(marker, SettingsError).get("error")
    if isinstance(found, str):
        progress.report(
            "train", f"an earlier attempt has ended with this mistake, and nothing has changed: {marker}"
        )
        raise RepeatedError(found)
    try:
        yield
    except ShardlineError as error:
        if error.exit_code == EXIT_BAD_INPUT and not crash.is_machine_failure(error):
            with contextlib.suppress(OSError):
                marker.parent.mkdir(parents=True, exist_ok=True)
                files.write_json(marker, {"error": error.line, "replica": cluster.name})
        raise


def forget_failure(directory: Path) -> None:
    """Removes the markers of a directory: a new job is tried whatever ended another one."""
    for marker in directory.glob(_MARKERS):
        marker.unlink(missing_ok=True)


def _marker(settings: TrainSettings, cluster: ClusterConfig, environ: Mapping[str, str]) -> Path:
    """Returns the path that tells this job's mistake, should it find one, from any other's."""
    own = environ.get("AIP_CHECKPOINT_DIR")
    base = files.local_path(own).parent if own else output_dirs(settings, environ).model
    chosen = {name: value for name, value in asdict(settings).items() if name not in _PLACES}
    tasks = {kind: len(hosts) for kind, hosts in cluster.tasks.items()}
    names = [name for place in sys.path if os.path.isdir(place) for name in os.listdir(place)]
    installed = sorted({name for name in names if name.endswith(".dist-info")})
    places = [settings.dataset, settings.initial_model, *settings.hparams.values()]
    states = [_state(files.local_path(text)) for text in places if isinstance(text, str) and text]
    known = (chosen, tasks, environ.get(ACCELERATORS_VARIABLE), installed, states)
    digest = hashlib.sha256(repr(known).encode())
    for package in ("shardline.trainer", *plugins.packages(plugin_references(asdict(settings)).values())):
        for path in plugins.python_files(package):
            if path.is_file():
                digest.update(path.read_bytes())
    return base / _MARKERS.replace("*", digest.hexdigest()[:16])


def _state(path: Path) -> Any:
    """Returns name, size and time of a file, or of those in a directory; nothing where there is none."""
    with contextlib.suppress(OSError, ValueError):
        if (manifest := path / MANIFEST_FILE).is_file():  # it has the checksums of its shards
            return sorted(os.listdir(path)), manifest.read_bytes()
        found = sorted(path.iterdir()) if path.is_dir() else [path]
        known = [(file.name, file.stat()) for file in found]
        return [(name, at.st_size, at.st_mtime_ns) for name, at in known if stat.S_ISREG(at.st_mode)]
    return []
