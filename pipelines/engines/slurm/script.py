"""Script of a Slurm job, and the same job as a request of Slurm's REST API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardline.pipelines.engines.slurm.settings import SlurmSettings


@dataclass(frozen=True, kw_only=True)
class Step:
    """The tasks of one worker pool, which all run the same command.

    Attributes:
        role: "chief", "worker", "ps" or "evaluator".
        tasks: Their number.
        command: Program and arguments.
        env: Environment variables besides those of the job.
    """

    role: str
    tasks: int
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A job for Slurm.

    Attributes:
        name: Name of the job.
        steps: The tasks by worker pool, the chief first.
        directory: Directory, which all nodes see, for the script and the logs, one of each replica.
        elements: Elements of a job array, each of which runs the steps; 0 for no array. The command of a step
            may contain $SLURM_ARRAY_TASK_ID, from 0.
        after: Id of a job that must succeed first; "" for none.
    """

    name: str
    steps: tuple[Step, ...]
    directory: Path
    elements: int = 0
    after: str = ""


def batch_script(job: BatchJob, settings: SlurmSettings) -> str:
    """Returns the script that sbatch takes."""
    raise NotImplementedError


def rest_request(job: BatchJob, settings: SlurmSettings) -> dict[str, Any]:
    """Returns the body of POST /slurm/vX/job/submit for the same job."""
    raise NotImplementedError
