"""Run of a pipeline on the platform: tasks, states, custom jobs and outputs, lines of its logs, its record.

`status`, `explain`, `logs`, `submit --wait` and the exit handler use the `PlatformRun` of `read_run`.
"""

from __future__ import annotations

import datetime
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, cast

from shardline.components.runs.causes import Failure, KfpLines, explain, last_lines, own_error
from shardline.components.runs.record import (
    CANCELLED,
    FAILED,
    RUNNING,
    SUCCEEDED,
    RunRecord,
    State,
    TaskOutputs,
    collect_results,
)
from shardline.components.text import duration, timestamp
from shardline.components.vertex.client import Platform, call_api, list_all
from shardline.trainer.base import progress
from shardline.trainer.base.deserialize import restore_integers
from shardline.trainer.base.errors import PlatformError, SettingsError

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1.types import PipelineJob, PipelineTaskDetail

#: Seconds of an outage that does not end the watching of a run.
_OUTAGE_S = 900.0
_NAME = re.compile(r"projects/([^/]+)/locations/([^/]+)/pipelineJobs/([^/]+)")
_CUSTOM_JOB = re.compile(r"projects/[^/\s\"]+/locations/[^/\s\"]+/customJobs/(\d+)")
_FAILED_REPLICA = re.compile(r"replica (workerpool\d+-\d+)")
_STATUS = re.compile(r"non-zero status of (\d+)(\(SIG)?")

#: Largest number of entries that `logs` shows, the newest.
_LIMIT = 5000
#: Seconds between two reads; Cloud Logging has a line some seconds after it was printed.
_PAUSE_S = 5.0
#: Lines may arrive out of order by this much.
_OVERLAP = datetime.timedelta(seconds=30)

#: Fields that are requested for each run in a list: all but the pipeline, which is large.
_LISTED = ("name", "display_name", "state", "create_time", "start_time", "end_time", "error", "schedule_name")
#: Our names of the platform's states; of a pipeline without "PIPELINE_STATE_".
_STATES = {
    "STATE_UNSPECIFIED": "unknown",
    "UNSPECIFIED": "unknown",
    "QUEUED": "queued",
    "PENDING": "waiting",
    "RUNNING": RUNNING,
    "SUCCEEDED": SUCCEEDED,
    "FAILED": FAILED,
    "CANCEL_PENDING": "being cancelled",
    "CANCELLING": "being cancelled",
    "CANCELLED": CANCELLED,
    "PAUSED": "paused",
    "SKIPPED": "from the cache",
    "NOT_TRIGGERED": "not run",
}


@dataclass(frozen=True, kw_only=True)
class _Timed:
    """Common fields of a run and a task: state, seconds since its start, and why it failed."""

    state: str
    seconds: float | None = None
    error: str = ""

    @property
    def duration(self) -> str:
        """Duration for people: "3 min 20 s"; "" where it is not known."""
        return "" if self.seconds is None else duration(self.seconds)

    @property
    def has_ended(self) -> bool:
        """Whether its state is final."""
        return self.state in (SUCCEEDED, FAILED, CANCELLED)

    @property
    def summary(self) -> str:
        """State, and the duration where it has ended: "succeeded after 48 s"."""
        return f"{self.state} after {self.duration}" if self.has_ended and self.duration else self.state


@dataclass(frozen=True, kw_only=True)
class PlatformTask(_Timed):
    """One task of a run.

    Attributes:
        name: Its name; its path where the run has several tasks of that name, as in a loop.
        path: Name after those of the tasks that contain it: "condition-1.train".
        jobs: Resource names of its custom jobs, the most relevant last: failed attempts, the last attempt,
            then what that attempt (GCPC's launcher) has launched.
        is_group: Whether it only contains other tasks.
        ended: Time of its end, in seconds since 1970; infinity while it runs.
    """

    name: str
    path: str
    jobs: tuple[str, ...] = ()
    is_group: bool = False
    ended: float = 0.0
    outputs: TaskOutputs = field(default_factory=TaskOutputs)


@dataclass(frozen=True, kw_only=True)
class PlatformRun(_Timed):
    """One run.

    Attributes:
        name: Resource name.
        created: Time of its submission (UTC, RFC 3339); "" when it is not known.
        schedule: Resource name of the schedule that started it; "" for none.
        link: URL of its page in the console; of a run elsewhere its directory, which is its name, too.
        tasks: Its tasks in the order of their starts; empty in a list of runs.
    """

    name: str
    pipeline: str
    created: str
    schedule: str = ""
    link: str
    parameters: Mapping[str, Any]
    tasks: tuple[PlatformTask, ...]

    @property
    def job_id(self) -> str:
        """Id, the last part of the resource name."""
        return self.name.rpartition("/")[2]

    @property
    def failed_task(self) -> PlatformTask | None:
        """The task that failed first; the innermost of nested ones."""
        failed = [task for task in self.tasks if task.state == FAILED]
        inner = [
            task for task in failed if not any(other.path.startswith(f"{task.path}.") for other in failed)
        ]
        return min(inner, key=lambda task: task.ended, default=None)

    def as_json(self) -> dict[str, Any]:
        """Returns the run for --json, without parameters and outputs."""
        content = {"run": self.job_id, **asdict(self)}
        del content["parameters"]
        for task in content["tasks"]:
            del task["ended"], task["outputs"]
        return content


def resource_name(platform: Platform, run: str) -> str:
    """Returns a run's resource name; `run` is that name, or the run's id.

    Raises:
        SettingsError: When it is neither, or the name is that of a run elsewhere.
    """
    if "/" not in run:
        return f"{platform.parent}/pipelineJobs/{run}"
    found = _NAME.fullmatch(run)
    if found is None:
        raise SettingsError(f"a run is its id, or projects/P/locations/L/pipelineJobs/ID, got {run!r}")
    if found[2] != platform.location:
        raise SettingsError(
            f"the run {found[3]} is in {found[2]}, and the location is {platform.location}; "
            f"give --location {found[2]}"
        )
    return run


def read_run(platform: Platform, run: str, *, watching: bool = False) -> PlatformRun:
    """Reads the present state of a run by its id or resource name.

    Raises:
        PlatformError: When there is none, or the platform refuses or is not reached; while `watching` only
            when it has not been reached for some time.
    """
    request = {"name": resource_name(platform, run)}
    doing, outage_s = f"read the run {run.rpartition('/')[2]}", _OUTAGE_S if watching else 0.0
    return run_of(call_api(doing, platform.pipelines.get_pipeline_job, request, outage_s=outage_s), platform)


def latest_runs(platform: Platform, limit: int) -> list[PlatformRun]:
    """Returns the newest runs, `limit` at most, without their tasks; raises as `read_run` does."""
    request = {
        "parent": platform.parent,
        "order_by": "create_time desc",
        "page_size": min(limit, 100),
        "read_mask": {"paths": list(_LISTED)},
    }
    listed = list_all("list the runs", platform.pipelines.list_pipeline_jobs, request, limit=limit)
    return [run_of(job, platform) for job in listed]


def run_of(job: PipelineJob, platform: Platform) -> PlatformRun:
    """Returns the run that the API describes."""
    from google.protobuf.json_format import MessageToDict

    job_id = job.name.rpartition("/")[2]
    config = MessageToDict(type(job.runtime_config).pb(job.runtime_config))
    return PlatformRun(
        name=job.name,
        pipeline=job.display_name,
        state=_state_name(job.state.name),
        created=timestamp(job.create_time.replace(microsecond=0)) if job.create_time else "",
        seconds=_seconds(job.start_time, job.end_time),
        error=" ".join(job.error.message.split()),
        schedule=job.schedule_name,
        link=f"https://console.cloud.google.com/vertex-ai/locations/{platform.location}/pipelines/runs/"
        f"{job_id}?project={platform.project}",
        parameters=restore_integers(config.get("parameterValues", {})),
        tasks=_tasks(job.job_detail.task_details, job_id),
    )


def _tasks(details: Sequence[PipelineTaskDetail], job_id: str) -> tuple[PlatformTask, ...]:
    by_id = {detail.task_id: detail for detail in details}
    parents = {detail.parent_task_id for detail in details}
    # The run itself is a task too, with the run's name.
    shown = [detail for detail in details if detail.task_name != job_id]
    shown.sort(key=lambda detail: (detail.start_time is None, _time(detail.start_time or detail.create_time)))
    names = Counter(detail.task_name for detail in shown)

    def path(detail: PipelineTaskDetail) -> str:
        parts, node = [detail.task_name], by_id.get(detail.parent_task_id)
        while node is not None and node.task_name != job_id and len(parts) < len(by_id):
            parts.insert(0, node.task_name)
            node = by_id.get(node.parent_task_id) if node.parent_task_id else None
        return ".".join(parts)

    return tuple(
        _task(detail, path(detail), names[detail.task_name] == 1, detail.task_id in parents)
        for detail in shown
    )


def _task(detail: PipelineTaskDetail, path: str, is_only: bool, is_group: bool) -> PlatformTask:
    artifacts = {key: item.artifacts[0] for key, item in detail.outputs.items() if item.artifacts}
    metadata = dict(detail.execution.metadata or {})
    outputs = {
        key.removeprefix("output:"): value for key, value in metadata.items() if key.startswith("output:")
    }
    container, custom = detail.executor_detail.container_detail, detail.executor_detail.custom_job_detail
    jobs = (*container.failed_main_jobs, container.main_job, *custom.failed_jobs, custom.job)
    launched = [match[0] for match in _CUSTOM_JOB.finditer(str(outputs.get("gcp_resources", "")))]
    return PlatformTask(
        name=detail.task_name if is_only else path,
        path=path,
        state=_state_name(detail.state.name),
        seconds=_seconds(detail.start_time, detail.end_time),
        error=" ".join(detail.error.message.split()),
        jobs=tuple(dict.fromkeys(job for job in (*jobs, *launched) if job)),
        is_group=is_group,
        ended=_time(detail.end_time) or float("inf"),
        outputs=TaskOutputs(
            parameters=outputs,
            artifacts={key: dict(item.metadata or {}) for key, item in artifacts.items()},
            uris={key: item.uri for key, item in artifacts.items()},
        ),
    )


def _state_name(state: str) -> str:
    return _STATES.get(state.removeprefix("PIPELINE_STATE_"), state.lower())


def _time(at: Any) -> float:
    return float(at.timestamp()) if at else 0.0


def _seconds(start: Any, end: Any) -> float | None:
    if not start:
        return None
    return max(0.0, _time(end or datetime.datetime.now(datetime.UTC)) - _time(start))


@dataclass(frozen=True)
class LogLine:
    """One line of a replica's output, without line end, and when (UTC) Cloud Logging received it.

    `job` is the id of the custom job, `replica` "" for the platform's own lines, `key` the line's unique id.
    """

    time: datetime.datetime
    job: str
    replica: str
    text: str
    key: str


def read_entries(
    platform: Platform,
    jobs: Iterable[str],
    limit: int,
    replica: str = "",
    since: datetime.datetime | None = None,
) -> list[LogLine]:
    """Returns the newest lines of custom jobs by id, `limit` entries at most, oldest first.

    `replica` is a name as in workerpool0-0, "" for all; `since` is the time of the oldest entry. Source:
    https://cloud.google.com/vertex-ai/docs/training/monitor-training-logs
    """
    ids = " OR ".join(json.dumps(job) for job in jobs)
    parts = ['resource.type="ml_job"', f"resource.labels.job_id=({ids})"]
    if replica:
        parts.append(f'resource.labels.task_name="{replica}"')
    if since:
        parts.append(f'timestamp>="{since.astimezone(datetime.UTC).isoformat()}"')
    request = {
        "resource_names": [f"projects/{platform.project}"],
        "filter": " AND ".join(parts),
        "order_by": "timestamp desc",
        "page_size": min(limit, 1000),
    }
    found = list_all("read the logs", platform.logs.list_log_entries, request, limit=limit)
    return [
        LogLine(
            time=entry.timestamp,
            job=entry.resource.labels.get("job_id", ""),
            # "service" is the platform itself.
            replica=entry.resource.labels.get("task_name", "").removeprefix("service"),
            text=line,
            key=f"{entry.timestamp}{entry.insert_id}{number}",
        )
        for entry in found[::-1]
        for text in [str(entry.text_payload or (entry.json_payload or {}).get("message", ""))]
        for number, line in enumerate(text.splitlines() or [""])
    ]


def read_platform_record(platform: Platform, run: str, state: State | None = None) -> RunRecord:
    """Returns the record of a run by id or resource name, running or ended; raises as `read_run` does.

    `state` overrides the platform's, which an exit task of the run needs.
    """
    found = read_run(platform, run)
    state = state or (cast(State, found.state) if found.has_ended else RUNNING)
    outcome = collect_results(task.outputs for task in found.tasks)
    return RunRecord(
        name=found.job_id,
        pipeline=found.pipeline or found.job_id,
        state=state,
        created=found.created,
        duration_s=found.seconds,
        error=found.error or None,
        parameters=found.parameters,
        explanation=explain(failure_of(platform, found)) if state == FAILED else None,
        **{**outcome, "links": {"run": found.link, **outcome["links"]}},
    )


def failure_of(platform: Platform, run: PlatformRun) -> Failure:
    """Returns the failure of a run from the platform and its logs.

    What cannot be read is reported and left out.
    """
    task = run.failed_task
    if task is None:
        return Failure(error=run.error)
    messages: list[str] = []
    for name in reversed(task.jobs):  # until one names an exit code
        if any(map(_STATUS.search, messages)):
            break
        try:
            job = call_api(f"read the job {_id(name)}", platform.jobs.get_custom_job, {"name": name})
            messages.append(str(job.error.message))
        except PlatformError as error:
            progress.report("vertex", str(error))
    messages.append(task.error)
    # The one that names an exit code, else the first.
    message = next(filter(_STATUS.search, messages), "") or next(filter(None, messages), "")
    replica, status = _FAILED_REPLICA.search(message), _STATUS.search(message)
    pool = replica[1] if replica else ""
    lines: list[LogLine] = []
    if task.jobs:
        try:
            lines = read_entries(platform, map(_id, task.jobs), limit=300, replica=pool)
        except PlatformError as error:
            progress.report("vertex", str(error))
    log = [line.text for line in lines]
    own = own_error(log)
    return Failure(
        task=task.name,
        replica=pool,
        exit_code=int(status[1]) + (128 if status[2] and int(status[1]) < 128 else 0) if status else None,
        error=own or " ".join(message.split()),
        is_own_message=bool(own),
        lines=last_lines(log),
    )


def read_log(
    platform: Platform, run: str, task: str = "", replica: str = "", *, follow: bool = False
) -> Iterator[str]:
    """Yields the lines that tasks have printed, each after the names of its task and replica.

    `task` and `replica`, "workerpool1-0", choose some. With `follow`, waits for more lines until the run has
    ended. Raises SettingsError when there is no such task, PlatformError as `read_run` does.
    """
    seen: set[str] = set()
    since: datetime.datetime | None = None
    kfp = KfpLines()
    while True:
        found = read_run(platform, run)
        ran = [item for item in found.tasks if item.jobs]
        chosen = [item for item in ran if task in ("", item.name, item.path.rpartition(".")[2])]
        if task and not chosen and (found.has_ended or not follow):
            known = ", ".join(item.name for item in ran)
            raise SettingsError(f"no task {task!r} has run; these have: {known or 'none'}")
        names = {_id(job): item.name for item in chosen for job in item.jobs}
        lines = read_entries(platform, names, _LIMIT, replica, since) if names else []
        fresh = [line for line in lines if line.key not in seen]
        seen.update(line.key for line in fresh)
        for line in fresh:
            where = f"{names[line.job]} {line.replica}".rstrip()
            if not kfp.has(line.text, where):
                yield f"{where} | {line.text}"
        if found.has_ended or not follow:
            return
        if lines:
            since = max(lines[-1].time - _OVERLAP, since or lines[0].time)
        time.sleep(_PAUSE_S)


def _id(name: str) -> str:
    return name.rpartition("/")[2]
