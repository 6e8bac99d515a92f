"""How runs on the platform stand: states in words, tasks, durations.

Why a run on the platform failed.

What the tasks of a run on the platform have printed.
"""

from __future__ import annotations

import datetime
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardline.components.run_record import Outcome
from shardline.components.text import duration
from shardline.components.vertex import runs
from shardline.components.vertex.logs import KfpLines, LogLine, log_filter
from shardline.pipelines.local.job import ROLES
from shardline.pipelines.remote.client import Clients, ask, ask_all, clients, platform_errors
from shardline.pipelines.remote.environment import Environment
from shardline.trainer import progress
from shardline.trainer.errors import SettingsError

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1.types import PipelineJob, PipelineTaskDetail

_NAME = re.compile(r"projects/([^/]+)/locations/([^/]+)/pipelineJobs/([^/]+)")

#: What is asked for of each run in a list: everything but the pipeline, which is long.
_LISTED = ("name", "display_name", "state", "create_time", "start_time", "end_time", "error", "schedule_name")

#: The platform's states in words; of a pipeline without "PIPELINE_STATE_".
_WORDS = {
    "STATE_UNSPECIFIED": "unknown",
    "UNSPECIFIED": "unknown",
    "QUEUED": "queued",
    "PENDING": "waiting",
    "RUNNING": "running",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
    "CANCEL_PENDING": "being cancelled",
    "CANCELLING": "being cancelled",
    "CANCELLED": "cancelled",
    "PAUSED": "paused",
    "SKIPPED": "from the cache",
    "NOT_TRIGGERED": "not run",
}
_ENDED = ("succeeded", "failed", "cancelled")


@dataclass(frozen=True, kw_only=True)
class TaskStatus:
    """One task of a run.

    Attributes:
        name: Its name; its path where the run has several of that name, as in a loop.
        path: Name, with those of the tasks that it is part of in front: "condition-1.train".
        state: In words.
        seconds: For how long it has run; None when it has not begun.
        error: Why it failed; "" when it did not, or the platform does not say.
        jobs: Resource names of its custom jobs, the last attempt's last.
        is_group: Whether it only holds other tasks.
    """

    name: str
    path: str
    state: str
    seconds: float | None
    error: str
    jobs: tuple[str, ...]
    is_group: bool

    @property
    def is_under_way(self) -> bool:
        """Whether something has become of it."""
        return not self.is_group and self.state not in ("waiting", "unknown")

    @property
    def duration(self) -> str:
        """For how long, as a person says it."""
        return "" if self.seconds is None else duration(self.seconds)

    @property
    def in_words(self) -> str:
        """State, and for how long where it is over."""
        return f"{self.state} after {self.duration}" if self.state in _ENDED and self.duration else self.state


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """One run.

    Attributes:
        name: Resource name.
        pipeline: Name of the pipeline.
        state: In words.
        created: When it was submitted (UTC, ISO 8601); "" when it is not known.
        seconds: For how long it has run; None when it has not begun.
        error: Why it failed; "" when it did not, or the platform does not say.
        schedule: Resource name of the schedule that started it; "" for none.
        tasks: In the order in which they began; empty in a list of runs.
    """

    name: str
    pipeline: str
    state: str
    created: str
    seconds: float | None
    error: str
    schedule: str
    tasks: tuple[TaskStatus, ...]

    @property
    def job_id(self) -> str:
        """Id, the last part of the name."""
        return self.name.rpartition("/")[2]

    @property
    def duration(self) -> str:
        """For how long, as a person says it."""
        return "" if self.seconds is None else duration(self.seconds)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more becomes of it."""
        return self.state in _ENDED

    @property
    def failed_task(self) -> TaskStatus | None:
        """The task that failed first; the innermost where it is part of others."""
        return next((task for task in self.tasks if task.state == "failed" and not task.is_group), None)

    def link(self, project: str) -> str:
        """Returns the address of its page in the console."""
        location = self.name.split("/")[3]
        return (
            f"https://console.cloud.google.com/vertex-ai/locations/{location}/pipelines/runs/"
            f"{self.job_id}?project={project}"
        )


def resource_name(environment: Environment, run: str) -> str:
    """Returns a run's resource name.

    Args:
        environment: Where it is.
        run: Its id, or its resource name.

    Raises:
        SettingsError: When it is neither, or the name is that of a run elsewhere.
    """
    if "/" not in run:
        return f"{environment.parent}/pipelineJobs/{run}"
    found = _NAME.fullmatch(run)
    if found is None:
        raise SettingsError(f"a run is its id, or projects/P/locations/L/pipelineJobs/ID, got {run!r}")
    if found[2] != environment.location:
        raise SettingsError(
            f"the run {found[3]} is in {found[2]}, and the location is {environment.location}; "
            f"give --location {found[2]}"
        )
    return run


def read_run(clients: Clients, run: str, *, watching: bool = False) -> PipelineJob:
    """Returns a run as the platform has it.

    Args:
        clients: Of the place.
        run: Its id, or its resource name.
        watching: Whether no answer for some time is no error.

    Raises:
        PlatformError: When there is none, or the platform refuses or is not reached.
    """
    name = resource_name(clients.environment, run)
    doing = f"look at the run {run.rpartition('/')[2]}"
    return ask(doing, clients.pipelines.get_pipeline_job, {"name": name}, watching=watching)


def latest_runs(clients: Clients, limit: int, condition: str = "") -> list[RunStatus]:
    """Returns the newest runs, without their tasks; raises as `read_run` does.

    Args:
        clients: Of the place.
        limit: How many at most.
        condition: Filter of ListPipelineJobs; "" for all.
    """
    request = {
        "parent": clients.environment.parent,
        "filter": condition,
        "order_by": "create_time desc",
        "page_size": min(limit, 100),
        "read_mask": {"paths": list(_LISTED)},
    }
    found = ask_all("list the runs", clients.pipelines.list_pipeline_jobs, request, limit=limit)
    return [read_status(job) for job in found]


def read_status(job: PipelineJob) -> RunStatus:
    """Returns how a run stands."""
    return RunStatus(
        name=job.name,
        pipeline=job.display_name,
        state=_WORDS.get(job.state.name.removeprefix("PIPELINE_STATE_"), job.state.name.lower()),
        created=job.create_time.astimezone(datetime.UTC).isoformat(timespec="seconds")
        if job.create_time
        else "",
        seconds=_seconds(job.start_time, job.end_time),
        error=" ".join(job.error.message.split()),
        schedule=job.schedule_name,
        tasks=_tasks(job.job_detail.task_details, job.name.rpartition("/")[2]),
    )


def _tasks(details: Iterable[PipelineTaskDetail], job_id: str) -> tuple[TaskStatus, ...]:
    by_id = {detail.task_id: detail for detail in details}
    parents = {detail.parent_task_id for detail in by_id.values()}
    # The whole run is a task as well, of the run's own name.
    shown = [detail for detail in by_id.values() if detail.task_name != job_id]
    shown.sort(key=lambda detail: (detail.start_time is None, _time(detail.start_time or detail.create_time)))
    names = Counter(detail.task_name for detail in shown)
    return tuple(
        TaskStatus(
            name=detail.task_name
            if names[detail.task_name] == 1
            else ".".join(_names(detail, by_id, job_id)),
            path=".".join(_names(detail, by_id, job_id)),
            state=_WORDS.get(detail.state.name, detail.state.name.lower()),
            seconds=_seconds(detail.start_time, detail.end_time),
            error=" ".join(detail.error.message.split()),
            jobs=_jobs(detail),
            is_group=detail.task_id in parents,
        )
        for detail in shown
    )


def _names(detail: PipelineTaskDetail, by_id: dict[int, PipelineTaskDetail], job_id: str) -> list[str]:
    names: list[str] = []
    node: PipelineTaskDetail | None = detail
    while node is not None and node.task_name != job_id and len(names) < len(by_id):
        names.insert(0, node.task_name)
        node = by_id.get(node.parent_task_id) if node.parent_task_id else None
    return names


def _jobs(detail: PipelineTaskDetail) -> tuple[str, ...]:
    container, custom = detail.executor_detail.container_detail, detail.executor_detail.custom_job_detail
    names = (*container.failed_main_jobs, container.main_job, *custom.failed_jobs, custom.job)
    return tuple(name for name in names if name)


def _time(moment: Any) -> float:
    return float(moment.timestamp()) if moment else 0.0


def _seconds(start: Any, end: Any) -> float | None:
    if not start:
        return None
    return max(0.0, _time(end or datetime.datetime.now(datetime.UTC)) - _time(start))


def read_outcome(environment: Environment, run: str) -> Outcome:
    """Returns how a run came out, as far as it has come.

    Args:
        environment: Where it is.
        run: Its id, or its resource name.

    Raises:
        SettingsError: When it is neither.
        PlatformError: When there is no such run, or the platform refuses or is not reached.
    """
    name = resource_name(environment, run)
    with platform_errors(f"look at the run {run}"):
        return runs.read_outcome(
            name,
            runs.connect(environment.project, environment.location, environment.api_endpoint),
            note=lambda text: progress.say("explain", text),
        )


#: Lines that are shown at most, the newest of them.
LIMIT = 5000
#: Seconds between two looks; Cloud Logging has a line some seconds after it was printed.
_PAUSE_S = 5.0
#: Lines may arrive out of order by about so many seconds.
_OVERLAP = datetime.timedelta(seconds=30)

_REPLICA = re.compile(rf"({'|'.join(ROLES)})-(\d+)")


def read_log(
    environment: Environment,
    run: str,
    task: str = "",
    replica: str = "",
    *,
    since: datetime.datetime | None = None,
    follow: bool = False,
    pause: float = _PAUSE_S,
) -> Iterator[str]:
    """Yields what tasks have printed, each line after the names of its task and replica.

    Args:
        environment: Where the run is.
        run: Its id, or its resource name.
        task: Only of this task; "" for all.
        replica: Only of this replica, "worker-0" or "workerpool1-0"; "" for all.
        since: Only what came at or after this time.
        follow: Whether to wait for more until the run has ended.
        pause: Seconds between two looks.

    Raises:
        SettingsError: When there is no such task.
        PlatformError: When there is no such run, or the platform refuses or is not reached.
    """
    connected = clients(environment)
    source = runs.connect(environment.project, environment.location, environment.api_endpoint)
    seen: set[str] = set()
    kfp = KfpLines()
    while True:
        job = read_run(connected, run)
        ended = read_status(job).has_ended
        names = _task_names(job, task, wait=follow and not ended)
        lines = _ask(source, list(names), pool_name(replica), since) if names else []
        fresh = [line for line in lines if line.key not in seen]
        seen.update(line.key for line in fresh)
        for line in fresh:
            where = f"{names[line.job]} {line.replica}".rstrip()
            if not kfp.has(line.text, where):
                yield f"{where} | {line.text}"
        if ended or not follow:
            return
        if lines:
            since = max(lines[-1].time - _OVERLAP, since or lines[0].time)
        time.sleep(pause)


def pool_name(replica: str) -> str:
    """Returns the platform's name of a replica: workerpool1-0 for worker-0."""
    found = _REPLICA.fullmatch(replica)
    return f"workerpool{ROLES.index(found[1])}-{found[2]}" if found else replica


def _task_names(job: PipelineJob, task: str, *, wait: bool) -> dict[str, str]:
    """Returns the names of tasks by the ids of their custom jobs."""
    details = [item for item in job.job_detail.task_details if runs.custom_jobs(item)]
    if task and not wait and task not in (known := [item.task_name for item in details]):
        raise SettingsError(f"no task {task!r} has run; there are {', '.join(known) or 'none'}")
    return {
        name.rpartition("/")[2]: item.task_name
        for item in details
        for name in runs.custom_jobs(item)
        if task in ("", item.task_name)
    }


def _ask(
    source: runs.Platform, jobs: Sequence[str], replica: str, since: datetime.datetime | None
) -> list[LogLine]:
    with platform_errors("read the logs"):
        return source.log(log_filter(jobs, replica, since=since), LIMIT)
