"""One trial of a tuning job on this machine: a custom job with the trial's parameters in its arguments."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardline.pipelines.local.job import CustomJob, WorkerPool
from shardline.pipelines.local.output import ShowLine
from shardline.pipelines.local.supervisor import run_job
from shardline.trainer import progress
from shardline.trainer.errors import RunError
from shardline.trainer.measurements import FILE_VARIABLE, read_measurements
from shardline.trainer.progress import Event

#: Beside a trial's log files, what its chief reports.
METRIC_FILE = "output.metrics"

Measurement = tuple[int, float, float]


class _HopelessError(RunError):
    """Ends a trial that has been stopped early."""


@dataclass
class Trial:
    """A trial and how it went.

    Attributes:
        id: Number, as text, from "1".
        parameters: Values by name.
        start: When it started.
        end: When it ended.
        measurements: Step, value and time of each report.
        stopped: Whether it was stopped early.
        fault: Why it has failed; "" when it has not.
    """

    id: str
    parameters: Mapping[str, Any]
    start: datetime.datetime = field(default_factory=lambda: datetime.datetime.now(datetime.UTC))
    end: datetime.datetime | None = None
    measurements: Sequence[Measurement] = ()
    stopped: bool = False
    fault: str = ""


def run_trial(
    trial: Trial,
    job: CustomJob,
    metric: str,
    log_directory: Path,
    *,
    is_hopeless: Callable[[Sequence[float]], bool],
    show_line: ShowLine,
    gcs_root: Path,
) -> None:
    """Runs a trial and fills in how it went. Only a signal that stops this process is raised.

    Args:
        trial: What is tried.
        job: What every trial runs.
        metric: The metric's name.
        log_directory: Gets the log files and what the chief reports.
        is_hopeless: Whether a trial that has measured these values should be stopped.
        show_line: As for `run_job`.
        gcs_root: As for `run_job`.
    """
    topic = f"trial {trial.id}"
    log_directory.mkdir(parents=True, exist_ok=True)
    reports = log_directory / METRIC_FILE

    def show(event: Event) -> None:
        if event.kind != "fact":  # the results of a run are those of its last training
            outer(replace(event, topic=topic))
        measured = read_measurements(reports, metric)
        if len(measured) > len(trial.measurements):
            trial.measurements = measured
            if is_hopeless([value for _, value, _ in measured]):
                raise _HopelessError(f"{metric} {measured[-1][1]:.4f} is behind the other trials")

    with progress.sink(show) as outer:
        try:
            run_job(
                _with_parameters(job, trial, reports),
                log_directory,
                topic=topic,
                show_line=show_line,
                gcs_root=gcs_root,
            )
        except _HopelessError as error:
            trial.stopped = True
            outer(Event("line", topic, f"stopped early: {error}"))
        except RunError as error:
            trial.fault = " ".join(str(error).split())
            outer(Event("line", topic, f"failed: {trial.fault}"))
    trial.measurements = read_measurements(reports, metric)
    trial.end = datetime.datetime.now(datetime.UTC)
    if not trial.measurements and not trial.fault:
        trial.fault = f"{metric} was not reported"


def _with_parameters(job: CustomJob, trial: Trial, reports: Path) -> CustomJob:
    """Returns the job as the platform runs it for one trial."""
    flags = tuple(f"--{name}={value}" for name, value in trial.parameters.items())

    def pool_of(pool: WorkerPool) -> WorkerPool:
        env = {**pool.env, FILE_VARIABLE: str(reports)}
        return replace(pool, args=(*pool.args, *flags), env=env) if pool.replica_count else pool

    return replace(
        job,
        worker_pools=tuple(map(pool_of, job.worker_pools)),
        base_output_directory=f"{job.base_output_directory.rstrip('/')}/{trial.id}",
        trial=trial.id,
    )
