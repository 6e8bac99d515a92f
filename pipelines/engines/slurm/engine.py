"""Slurm as an engine: submits the worker pools of a custom job, and follows the job to its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardline.pipelines.engines.custom_job import CustomJob
from shardline.pipelines.engines.slurm.script import BatchJob
from shardline.pipelines.engines.slurm.settings import SlurmSettings


def batch_job(job: CustomJob, directory: Path) -> BatchJob:
    """Returns a custom job as a job for Slurm, whose logs are in `directory`."""
    raise NotImplementedError


def submit(job: BatchJob, settings: SlurmSettings) -> str:
    """Writes the script into the job's directory and submits it; returns the id of the job.

    Raises:
        PlatformError: When Slurm refuses the job or is not reached.
    """
    raise NotImplementedError


def follow(
    job_id: str,
    directory: Path,
    *,
    topic: str,
    show_line: Callable[[str, str], None] = lambda name, line: None,
) -> None:
    """Shows state and output of a job until it has ended, and writes job.json into its directory.

    Raises:
        RunError: When the job failed; its exit_code is EXIT_BAD_INPUT after a user error.
        CancelledRunError: When somebody cancelled it.
        PlatformError: When Slurm is not reached for some minutes.
    """
    raise NotImplementedError
