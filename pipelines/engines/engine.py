"""Engines: what can be asked about a run, on this machine, in Slurm and on the platform alike."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from shardline.components.runs import slurm_job
from shardline.components.runs.directory import (
    find_run,
    local_runs,
    read_local_record,
    read_log,
    task_states,
)
from shardline.components.runs.logs import read_log as read_platform_log
from shardline.components.runs.logs import read_platform_record
from shardline.components.runs.platform_run import (
    PlatformRun,
    PlatformTask,
    cancel_run,
    latest_runs,
    read_run,
)
from shardline.components.runs.record import (
    ABANDONED,
    REPLICAS,
    RUNNING,
    SLURM,
    RunRecord,
)
from shardline.components.runs.slurm_job import describe, job_directories
from shardline.components.vertex.client import Platform
from shardline.pipelines.engines.custom_job import ROLES
from shardline.pipelines.engines.slurm.engine import Logs
from shardline.trainer.base import progress
from shardline.trainer.base.errors import SettingsError

#: Seconds that the process of a run here has to end, which is more than its own processes have.
_CANCEL_S = 15.0
#: Seconds between two reads of logs, and between two questions to Slurm.
_LOGS_S, _STATE_S = 0.5, 5.0

_NOWHERE = "its record does not name the machine on which it runs"


class Engine(Protocol):
    """Runs of one kind; each method takes a run's id or name, or its directory.

    Attributes:
        asked: Who is asked to end a run.
    """

    asked: str

    def read(self, run: str, *, watching: bool = False) -> PlatformRun:
        """Returns the state of a run and its tasks now; while `watching`, waits for the end of an outage."""

    def record(self, run: str) -> RunRecord:
        """Returns the record of a run, with results and explanation."""

    def log(self, run: str, task: str, replica: str, *, follow: bool) -> Iterator[str]:
        """Yields what a run has printed, of one task or replica ("worker-0") or, with "", of all."""

    def cancel(self, run: str) -> tuple[bool, PlatformRun]:
        """Asks for the end of a run, unless it has ended; returns whether it did, and the run before that."""

    def newest(self, limit: int) -> list[tuple[str, PlatformRun]]:
        """Returns the newest runs, newest first, each after its place; `error` is the outcome."""


def find_engine(run: str, runs_dir: Path, platform: Callable[[], Platform]) -> Engine:
    """Returns the engine of a run: by its directory, or else the platform; raises as `platform` does."""
    try:
        directory = find_run(run, runs_dir)
    except SettingsError:
        return PlatformRuns(platform())
    return (SlurmRuns if RunRecord.read(directory).engine == SLURM else LocalRuns)(runs_dir)


class LocalRuns:
    """Run directories in `runs_dir`, whose processes are those of a machine."""

    asked = "its process"

    def __init__(self, runs_dir: Path) -> None:
        self.runs_dir = runs_dir

    def read(self, run: str, *, watching: bool = False) -> PlatformRun:
        """Returns its state, and those of its tasks and jobs of Slurm."""
        directory = find_run(run, self.runs_dir)
        record = RunRecord.read(directory)
        if watching and record.state == RUNNING and not (record.host or record.job):
            raise SettingsError(f"cannot wait for the end of {record.name}: {_NOWHERE}")
        places = job_directories(record.job, directory)
        rows = [(places[job.id].name, job.state, job.seconds, describe(job)) for job in record.slurm]
        rows += [(name, state, None, "") for name, state in task_states(directory, record.state).items()]
        tasks = (
            PlatformTask(name=row[0], path=row[0], state=row[1], seconds=row[2], error=row[3]) for row in rows
        )
        waits = record.state == RUNNING and {job.state for job in record.slurm} == {"waiting"}
        found = replace(_run(directory, record), tasks=tuple(tasks))
        return replace(found, state="waiting") if waits else found

    def record(self, run: str) -> RunRecord:
        """Returns its record, with results and explanation from its files."""
        return read_local_record(find_run(run, self.runs_dir))

    def log(self, run: str, task: str = "", replica: str = "", *, follow: bool = False) -> Iterator[str]:
        """Yields what its tasks have printed; reports why it follows no longer where the end is not known."""
        directory = find_run(run, self.runs_dir)
        yield from read_log(directory, task, replica, follow=follow)
        record = RunRecord.read(directory) if follow else None
        if record and (record.state == RUNNING or record.error == ABANDONED):
            progress.report("logs", f"no longer following {record.name}: {record.error or _NOWHERE}")

    def cancel(self, run: str) -> tuple[bool, PlatformRun]:
        """Ends its process by SIGTERM and waits some seconds for it; SettingsError on another machine."""
        before = self.read(run)
        if before.has_ended:
            return False, before
        directory = find_run(run, self.runs_dir)
        record = RunRecord.read(directory)
        # The process of this id holds the lock: it is the run's, not another that has got the id since.
        if not record.has_reliable_lock or not record.pid:
            raise SettingsError(
                f"the run {record.name} is not known to run on this machine; end its process on "
                f"{record.host or 'the machine that it runs on'}"
            )
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGTERM)
        until = time.monotonic() + _CANCEL_S
        while RunRecord.read(directory).state == RUNNING and time.monotonic() < until:
            time.sleep(0.1)
        return True, before

    def newest(self, limit: int) -> list[tuple[str, PlatformRun]]:
        """Returns the newest runs in the directory, those of Slurm too."""
        found = []
        for record in local_runs(self.runs_dir, limit):
            directory = self.runs_dir / record.name
            failed = record.explanation.failed if record.explanation else ""
            outcome = failed or record.headline().partition(": ")[2] or (record.engine and record.error) or ""
            where = f"slurm {record.job}" if record.engine == SLURM else "here"
            found.append((where, replace(_run(directory, record), error=outcome)))
        return found


class SlurmRuns(LocalRuns):
    """Run directories whose processes are jobs of Slurm, each after the success of the one before."""

    asked = "Slurm"

    def log(self, run: str, task: str = "", replica: str = "", *, follow: bool = False) -> Iterator[str]:
        """Yields the output of its jobs' replicas; that of element 3 of an array is named "3/chief-0"."""
        directory = find_run(run, self.runs_dir)
        if RunRecord.read(directory).yaml:  # a pipeline has tasks, and a log of them
            yield from super().log(run, task, replica, follow=follow)
            return
        self.read(run, watching=follow)  # refuses a run whose end could not be seen
        lines: list[tuple[str, str]] = []
        logs = Logs(directory / REPLICAS / task, lambda *line: lines.append(line))
        asked, ended = 0.0, not follow
        while True:
            if not ended and time.monotonic() - asked > _STATE_S:
                asked, ended = time.monotonic(), RunRecord.read(directory).state != RUNNING
            logs.read(at_end=ended)
            yield from (f"{name} | {line}" for name, line in lines if replica in ("", name))
            lines.clear()
            if ended:
                return
            time.sleep(_LOGS_S)

    def cancel(self, run: str) -> tuple[bool, PlatformRun]:
        """Asks Slurm to end its jobs."""
        before = self.read(run, watching=True)
        record = RunRecord.read(find_run(run, self.runs_dir))
        if not before.has_ended:
            for job_id in [job.id for job in record.slurm if not job.has_ended] or record.job.split():
                slurm_job.cancel_job(job_id)
        return not before.has_ended, before


class PlatformRuns:
    """Runs on Vertex AI, by id or resource name."""

    asked = "the platform"

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    def read(self, run: str, *, watching: bool = False) -> PlatformRun:
        """Returns its state, and those of its tasks."""
        return read_run(self.platform, run, watching=watching)

    def record(self, run: str) -> RunRecord:
        """Returns its record, with the explanation of a failure from Cloud Logging."""
        return read_platform_record(self.platform, run)

    def log(self, run: str, task: str = "", replica: str = "", *, follow: bool = False) -> Iterator[str]:
        """Yields what its tasks have printed, from Cloud Logging."""
        found = re.fullmatch(rf"({'|'.join(ROLES)})-(\d+)", replica)
        pool = f"workerpool{ROLES.index(found[1])}-{found[2]}" if found else replica
        return read_platform_log(self.platform, run, task, pool, follow=follow)

    def cancel(self, run: str) -> tuple[bool, PlatformRun]:
        """Asks the platform to cancel it."""
        return cancel_run(self.platform, run)

    def newest(self, limit: int) -> list[tuple[str, PlatformRun]]:
        """Returns the newest runs of the project."""
        return [("platform", run) for run in latest_runs(self.platform, limit)]


def _run(directory: Path, record: RunRecord) -> PlatformRun:
    now = datetime.datetime.now(datetime.UTC)
    age = (now - datetime.datetime.fromisoformat(record.created)).total_seconds() if record.created else None
    return PlatformRun(
        name=str(directory),
        pipeline=record.pipeline,
        state=record.state,
        created=record.created,
        seconds=age if record.state == RUNNING else record.duration_s,
        error=record.error or "",
        link=str(directory),
        parameters=record.parameters,
        tasks=(),
    )
