"""What can be asked about a run, on this machine and on the platform alike."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shardline.components.runs.directory import local_runs, read_local_record, read_log, task_states
from shardline.components.runs.logs import read_log as read_platform_log
from shardline.components.runs.logs import read_platform_record
from shardline.components.runs.platform_run import PlatformRun, PlatformTask, read_run, resource_name
from shardline.components.runs.record import ABANDONED, RUNNING, RunRecord
from shardline.components.vertex.client import Platform, call_api
from shardline.pipelines.local.job.custom_job import ROLES
from shardline.trainer.base import progress
from shardline.trainer.base.errors import SettingsError

#: Seconds that the process of a run here has to end, which is more than its own processes have.
_CANCEL_S = 15.0


@dataclass(frozen=True)
class DirectoryRun:
    """A run on this machine."""

    directory: Path
    asked = "its process"

    def read(self, *, watching: bool = False) -> PlatformRun:
        """Returns its state, and those of its tasks."""
        record = RunRecord.read(self.directory)
        states = task_states(self.directory, record.state)
        tasks = [PlatformTask(name=name, path=name, state=state) for name, state in states.items()]
        return replace(_as_run(self.directory, record), tasks=tuple(tasks))

    def record(self) -> RunRecord:
        """Returns its record, with results and explanation from its files."""
        return read_local_record(self.directory)

    def log(self, task: str, replica: str, *, follow: bool) -> Iterator[str]:
        """Yields what it has printed, of one task or replica ("worker-0") or, with "", of all."""
        yield from read_log(self.directory, task, replica, follow=follow)
        if follow and (record := RunRecord.read(self.directory)).error == ABANDONED:
            progress.report("logs", f"no longer following {record.name}: {ABANDONED}")

    def cancel(self) -> tuple[bool, PlatformRun]:
        """Ends its process by SIGTERM, unless it has ended.

        Returns whether it did, and the run before; raises SettingsError for a process of another machine.
        """
        before, record = self.read(), RunRecord.read(self.directory)
        if before.has_ended:
            return False, before
        # The process of this id holds the lock: it is the run's, not another that has got the id since.
        if not record.has_reliable_lock:
            raise SettingsError(
                f"the run {record.name} is not known to run on this machine; end its process on {record.host}"
            )
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGTERM)
        until = time.monotonic() + _CANCEL_S
        while RunRecord.read(self.directory).state == RUNNING and time.monotonic() < until:
            time.sleep(0.1)
        return True, before


@dataclass(frozen=True)
class VertexRun:
    """A run on Vertex AI, by id or resource name."""

    platform: Platform
    run: str
    asked = "the platform"

    def read(self, *, watching: bool = False) -> PlatformRun:
        """Returns its state, and those of its tasks; while `watching`, waits for the end of an outage."""
        return read_run(self.platform, self.run, watching=watching)

    def record(self) -> RunRecord:
        """Returns its record, with the explanation of a failure from Cloud Logging."""
        return read_platform_record(self.platform, self.run)

    def log(self, task: str, replica: str, *, follow: bool) -> Iterator[str]:
        """Yields what its tasks have printed, from Cloud Logging."""
        found = re.fullmatch(rf"({'|'.join(ROLES)})-(\d+)", replica)
        pool = f"workerpool{ROLES.index(found[1])}-{found[2]}" if found else replica
        return read_platform_log(self.platform, self.run, task, pool, follow=follow)

    def cancel(self) -> tuple[bool, PlatformRun]:
        """Asks the platform to cancel it, unless it has ended; returns whether it did, and the run before."""
        found = self.read()
        if found.has_ended:
            return False, found
        name = {"name": resource_name(self.platform, self.run)}
        call_api(f"cancel the run {self.run}", self.platform.pipelines.cancel_pipeline_job, name)
        return True, found


#: One run, wherever it is; what can be asked about it has the same names.
AnyRun = DirectoryRun | VertexRun


def newest_here(runs_dir: Path, limit: int) -> list[PlatformRun]:
    """Returns the newest runs in a directory, newest first; `error` is the outcome."""
    found = []
    for record in local_runs(runs_dir, limit):
        failed = record.explanation.failed if record.explanation else ""
        outcome = failed or record.headline().partition(": ")[2]
        found.append(replace(_as_run(runs_dir / record.name, record), error=outcome))
    return found


def _as_run(directory: Path, record: RunRecord) -> PlatformRun:
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
