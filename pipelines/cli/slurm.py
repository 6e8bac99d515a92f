"""Jobs of Slurm as runs: what `--engine slurm` means for every command that has it."""

from __future__ import annotations

import contextlib
import datetime
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import click

from shardline.components.runs.record import LOG, RUNNING, SLURM, RunRecord
from shardline.components.runs.slurm_job import cancel_job
from shardline.components.text import timestamp
from shardline.pipelines.engines.slurm import engine
from shardline.pipelines.engines.slurm.script import BatchJob, batch_script
from shardline.pipelines.engines.slurm.settings import SlurmSettings
from shardline.pipelines.local.record import directory_name, link_latest, make_directory
from shardline.pipelines.local.terminal import foreground
from shardline.trainer.base import progress
from shardline.trainer.base.errors import RestartError, SettingsError, ShardlineError

#: Returns the jobs of a run directory.
MakeJobs = Callable[[Path], Sequence[BatchJob]]


@dataclass(frozen=True, kw_only=True)
class Submission:
    """How a command submits its jobs to Slurm; `engine_options` makes it.

    Attributes:
        settings: The table [engine.slurm].
        runs_dir: Directory for the new run directory.
        detach: Whether the command returns once the jobs are submitted.
        dry_run: Whether the command prints the scripts and submits nothing.
    """

    settings: SlurmSettings
    runs_dir: Path
    detach: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        if not self.dry_run and shutil.which("sbatch") is None:
            raise SettingsError(
                "there is no sbatch in PATH: --engine slurm needs a machine with Slurm's commands, such as "
                "a login node; --dry-run shows the script without them"
            )

    def limited(self, restarts: int | None, timeout: float | None) -> Submission:
        """Returns the same with other restarts and another time limit in seconds; None keeps each."""
        settings = self.settings
        if timeout is not None:  # in minutes; 0 is no limit
            settings = replace(settings, time=str(math.ceil(timeout / 60) if math.isfinite(timeout) else 0))
        if restarts is not None:
            settings = replace(settings, restarts=restarts)
        return replace(self, settings=settings)

    def run(
        self,
        pipeline: str,
        make_jobs: MakeJobs,
        *,
        parameters: Mapping[str, Any] | None = None,
        stream: TextIO | None = None,
    ) -> bool:
        """Submits jobs as a new run, each after the success of the one before, and follows them to the end.

        Args:
            pipeline: Name of what runs, "train", "launch", "preprocess" or that of a pipeline.
            make_jobs: Returns the jobs of a run directory.
            parameters: Parameters of the run, for its record.
            stream: Stream for progress; None for standard output.

        Returns:
            Whether the jobs have succeeded; False where the command does not wait for that.

        Raises:
            RunError: When a job failed; its exit_code is EXIT_BAD_INPUT after a user error.
            CancelledRunError: When somebody cancelled it.
            RestartError: After Ctrl-C; the jobs continue.
        """
        now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        if self.dry_run:
            for job in make_jobs(self.runs_dir.absolute() / directory_name(now)):
                click.echo(batch_script(job, self.settings))
            return False
        directory = make_directory(self.runs_dir, now)
        record = RunRecord(
            name=directory.name,
            pipeline=pipeline,
            state=RUNNING,
            created=timestamp(now),
            parameters=parameters or {},
            engine=SLURM,
        )
        jobs = self._submit(make_jobs, record, directory)
        link_latest(directory)
        shown = str(directory).removeprefix(f"{Path.cwd()}/")
        with foreground(stream) as terminal:
            progress.report(pipeline, f"submitted as job {', then '.join(jobs)}, in {shown}")
            if self.detach:
                progress.report(pipeline, f"'shardline status {shown} --wait' watches it")
                return False
            try:
                for job_id, place in jobs.items():
                    engine.follow(job_id, place, topic=pipeline, show_line=terminal.line)
            except KeyboardInterrupt:
                raise RestartError(
                    f"no longer watching; the job continues: 'shardline status {shown} --wait' watches it "
                    f"again, 'shardline cancel {shown}' ends it"
                ) from None
            finally:
                with contextlib.suppress(ShardlineError):
                    RunRecord.read(directory)  # which records the end
            return True

    def _submit(self, make_jobs: MakeJobs, record: RunRecord, directory: Path) -> dict[str, Path]:
        """Submits jobs and writes the record; returns their directories by id, or leaves none."""
        submitted: dict[str, Path] = {}
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, directory, ignore_errors=True)
            for job in make_jobs(directory):
                job_id = engine.submit(replace(job, after=next(reversed(submitted), "")), self.settings)
                undo.callback(cancel_job, job_id)
                submitted[job_id] = job.directory
            (directory / LOG).touch()
            replace(record, job=" ".join(submitted)).write(directory)
            undo.pop_all()
        return submitted
