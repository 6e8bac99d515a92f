"""REST API of Slurm: a job as the body of POST /slurm/v0.0.42/job/submit, https://slurm.schedmd.com/rest_api.html.

Training clusters of Vertex AI take such a call through Google's API, `send`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardline.components.vertex.client import Rest, platform_errors
from shardline.pipelines.engines.slurm.script import BatchJob, batch_script, components, sbatch_options
from shardline.pipelines.engines.slurm.settings import SlurmSettings
from shardline.trainer.base.errors import PlatformError, SettingsError

PATH = "/slurm/v0.0.42/job/submit"


def rest_request(job: BatchJob, settings: SlurmSettings, working_directory: Path) -> dict[str, Any]:
    """Returns the body of the request for the job that `batch_script` describes.

    Raises SettingsError when Slurm has no such job, or the settings have options as lines of sbatch.
    """
    jobs = []
    for part in components(job, settings):
        if part.settings.options:
            raise SettingsError(
                f"options: Slurm's REST API has no sbatch to read {part.settings.options[0]!r}"
            )
        options = sbatch_options(job, part)
        fields = {
            name: form(options[option]) for name, (option, form) in _FIELDS.items() if option in options
        }
        # Without an environment the API refuses a job.
        environment = ["PATH=/usr/local/bin:/usr/bin:/bin"]
        jobs.append(
            {"current_working_directory": str(working_directory), "environment": environment, **fields}
        )
    return {"script": batch_script(job, settings), **({"jobs": jobs} if len(jobs) > 1 else {"job": jobs[0]})}


def send(rest: Rest, cluster: str, body: Mapping[str, Any]) -> str:
    """Submits a job to a cluster, by its resource name "projects/..."; returns the id of the job.

    Raises PlatformError when the platform or Slurm refuses it, or is not reached.
    """
    with platform_errors(f"submit a job of Slurm to {cluster}"):
        call = {"method": "POST", "path": PATH, "body": body}
        answer = rest.request("aiplatform", f"v1beta1/{cluster}:callSlurmRestApi", call)
    if answer.get("errors") or not answer.get("job_id"):
        raise PlatformError(f"Slurm refused the job: {answer.get('errors') or answer}")
    return str(answer["job_id"])


def _number(value: int) -> dict[str, Any]:
    return {"set": True, "infinite": False, "number": value}


def minutes(time: str) -> int:
    """Returns a time of sbatch in minutes, rounded up: "90", "30:00", "1:30:00", "1-12", "1-12:00"."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    # After days the first number is of hours; else a single one, and the first of two, is of minutes.
    hours = parts.pop(0) if dash or len(parts) == 3 else 0
    minute, second = [*parts, 0, 0][:2]
    return int(days or 0) * 1440 + hours * 60 + minute + math.ceil(second / 60)


def _megabytes(size: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([KMGT]?)", size).groups()  # type: ignore[union-attr]  # checked there
    return math.ceil(int(number) * 1024.0 ** ("KMGT".index(unit or "M") - 1))


#: Each field of a job, with its option of `sbatch_options`.
_FIELDS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "name": ("job-name", str),
    "standard_output": ("output", str),
    "open_mode": ("open-mode", lambda value: [value.upper()]),
    "requeue": ("requeue", lambda _: True),
    "kill_warning_signal": ("signal", lambda value: value.partition("@")[0]),
    "kill_warning_delay": ("signal", lambda value: _number(int(value.partition("@")[2]))),
    "array": ("array", str),
    "dependency": ("dependency", str),
    "flags": ("kill-on-invalid-dep", lambda _: ["KILL_INVALID_DEPENDENCY"]),
    "nodes": ("nodes", str),
    "tasks": ("ntasks", int),
    "tasks_per_node": ("ntasks-per-node", int),
    "partition": ("partition", str),
    "account": ("account", str),
    "qos": ("qos", str),
    "time_limit": ("time", lambda value: _number(minutes(value))),
    "cpus_per_task": ("cpus-per-task", int),
    "memory_per_node": ("mem", lambda value: _number(_megabytes(value))),
    "tres_per_node": ("gres", lambda value: ",".join(f"gres/{each}" for each in value.split(","))),
    "constraints": ("constraint", str),
}
