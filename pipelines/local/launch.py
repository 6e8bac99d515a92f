"""How each replica of a job is started: its command, its environment, and a check of both."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardline.pipelines.local import cluster
from shardline.pipelines.local.job import CustomJob
from shardline.trainer import files, progress
from shardline.trainer.errors import PipelineError


@dataclass(frozen=True)
class Launch:
    """What one replica is started with.

    Attributes:
        command: Program and arguments.
        env: The whole environment.
    """

    command: Sequence[str]
    env: Mapping[str, str]


def launches(job: CustomJob, addresses: Sequence[str], gcs_root: Path | None) -> dict[str, Launch]:
    """Returns how each replica is started, by name, the chief first.

    An environment is this process's, the pool's, and the platform's own on top.

    Args:
        job: The job.
        addresses: "host:port" of each of its replicas.
        gcs_root: Stands in for /gcs/, unless this process's environment names another.

    Raises:
        PipelineError: When there is no such command on this machine.
    """
    inherited = {key: value for key, value in os.environ.items() if key not in cluster.PLATFORM_VARIABLES}
    if gcs_root is not None:
        inherited.setdefault(files.GCS_ROOT_VARIABLE, str(gcs_root))
    # "python3" in a replica's command is the Python of this environment.
    here = os.path.dirname(sys.executable)
    inherited["PATH"] = f"{here}{os.pathsep}{inherited.get('PATH', os.defpath)}"
    job_id = f"{time.time_ns()}"
    found = {}
    for member in cluster.replicas(job):
        pool = job.worker_pools[member.pool]
        env = {
            **inherited,
            "PYTHONUNBUFFERED": "1",
            **pool.env,
            **cluster.environment(job, member, addresses, job_id),
            progress.EVENTS_VARIABLE: "1",
        }
        if shutil.which(pool.command[0], path=env["PATH"]) is None:
            raise PipelineError(
                f"{member.name} cannot be started: there is no command {pool.command[0]!r} on this machine; "
                "install it, or correct the command in container_spec"
            )
        found[member.name] = Launch([*pool.command, *pool.args], env)
    return found
