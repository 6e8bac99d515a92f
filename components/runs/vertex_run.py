"""Run on Vertex AI: tasks, states, custom jobs and outputs from its API, the lines of its logs."""

from __future__ import annotations

import datetime
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from shardline.components.custom_job import ROLES
from shardline.components.runs.causes import Explanation, KfpLines, explain, own_error
from shardline.components.runs.run import Run, RunState, Task, results
from shardline.components.text import timestamp
from shardline.components.vertex import Platform, call_api, list_all
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


@dataclass(frozen=True)
class VertexRun:
    """A run on Vertex AI, by id or resource name. Nothing but `cancel` has an effect on the run."""

    platform: Platform
    run: str

    @classmethod
    def submit(cls, platform: Platform, request: Mapping[str, Any]) -> Run:
        """Starts a run with a request, a CreatePipelineJobRequest in the API's JSON, and returns it.

        Raises PlatformError when the platform refuses or is not reached.
        """
        from google.cloud.aiplatform_v1.types import CreatePipelineJobRequest
        from google.protobuf.json_format import ParseDict

        message = ParseDict(dict(request), CreatePipelineJobRequest.pb(CreatePipelineJobRequest()))
        run = cls(platform, str(request["pipelineJobId"]))
        job = call_api(
            f"submit the run {_id(run.name)}",
            platform.pipelines.create_pipeline_job,
            CreatePipelineJobRequest.wrap(message),
            read_existing=run._job,
        )
        return _run(job, platform)

    @staticmethod
    def newest(platform: Platform, limit: int) -> list[Run]:
        """Returns the newest runs, `limit` at most, without their tasks; raises as `read` does."""
        request = {
            "parent": platform.parent,
            "order_by": "create_time desc",
            "page_size": min(limit, 100),
            "read_mask": {"paths": list(_LISTED)},
        }
        listed = list_all("list the runs", platform.pipelines.list_pipeline_jobs, request, limit=limit)
        return [_run(job, platform) for job in listed]

    @property
    def name(self) -> str:
        """Resource name.

        Raises:
            SettingsError: When `run` is neither an id nor such a name, or is that of a run elsewhere.
        """
        if "/" not in self.run:
            return f"{self.platform.parent}/pipelineJobs/{self.run}"
        found = _NAME.fullmatch(self.run)
        if found is None:
            raise SettingsError(
                f"a run is its id, or projects/P/locations/L/pipelineJobs/ID, got {self.run!r}"
            )
        if found[2] != self.platform.location:
            raise SettingsError(
                f"the run {found[3]} is in {found[2]}, and the location is {self.platform.location}; "
                f"give --location {found[2]}"
            )
        return self.run

    def read(self, *, watching: bool = False) -> Run:
        """Reads the present state of the run, its tasks and results.

        Raises:
            PlatformError: When there is none, or the platform refuses or is not reached; while `watching`
                only when it has not been reached for some time.
        """
        return _run(self._job(_OUTAGE_S if watching else 0.0), self.platform)

    def _job(self, outage_s: float = 0.0) -> PipelineJob:
        doing, request = f"read the run {_id(self.run)}", {"name": self.name}  # before the client signs in
        job: PipelineJob = call_api(
            doing, self.platform.pipelines.get_pipeline_job, request, outage_s=outage_s
        )
        return job

    def explain(self, run: Run) -> Run:
        """Returns the run with the explanation of its failure, from jobs and logs; None if it has not failed.

        What cannot be read is reported and left out.
        """
        return replace(run, explanation=self._explanation(run) if run.state == "failed" else None)

    def _explanation(self, run: Run) -> Explanation:
        task = run.failed_task
        if task is None:
            return explain(error=run.error or "")
        messages: list[str] = []
        for name in reversed(task.jobs):  # until one names an exit code
            if any(map(_STATUS.search, messages)):
                break
            try:
                job = call_api(f"read the job {_id(name)}", self.platform.jobs.get_custom_job, {"name": name})
                messages.append(str(job.error.message))
            except PlatformError as error:
                progress.report("vertex", str(error))
        messages.append(task.error)
        # The one that names an exit code, else the first.
        message = next(filter(_STATUS.search, messages), "") or next(filter(None, messages), "")
        replica, status = _FAILED_REPLICA.search(message), _STATUS.search(message)
        pool = replica[1] if replica else ""
        lines: list[_LogLine] = []
        if task.jobs:
            try:
                lines = _read_entries(self.platform, map(_id, task.jobs), limit=300, replica=pool)
            except PlatformError as error:
                progress.report("vertex", str(error))
        log = [line.text for line in lines]
        return explain(
            task=task.name,
            replica=pool,
            exit_code=int(status[1]) + (128 if status[2] and int(status[1]) < 128 else 0) if status else None,
            error=" ".join(message.split()),
            own_message=own_error(log),
            log=log,
        )

    def read_log(self, task: str = "", replica: str = "", *, follow: bool = False) -> Iterator[str]:
        """Yields the lines that tasks have printed, each after the names of its task and replica.

        `task` and `replica`, "worker-0" or "workerpool1-0", choose some. With `follow`, waits for more lines
        until the run has ended. Raises SettingsError when there is no such task, PlatformError as `read`.
        """
        role = re.fullmatch(rf"({'|'.join(ROLES)})-(\d+)", replica)
        pool = f"workerpool{ROLES.index(role[1])}-{role[2]}" if role else replica
        seen: set[str] = set()
        since: datetime.datetime | None = None
        kfp = KfpLines()
        while True:
            found = self.read()
            ran = [item for item in found.tasks if item.jobs]
            chosen = [item for item in ran if task in ("", item.name, item.path.rpartition(".")[2])]
            if task and not chosen and (found.has_ended or not follow):
                known = ", ".join(item.name for item in ran)
                raise SettingsError(f"no task {task!r} has run; these have: {known or 'none'}")
            names = {_id(job): item.name for item in chosen for job in item.jobs}
            lines = _read_entries(self.platform, names, _LIMIT, pool, since) if names else []
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

    def cancel(self) -> None:
        """Asks the platform to cancel it."""
        request = {"name": self.name}  # before the client signs in
        call_api(f"cancel the run {self.run}", self.platform.pipelines.cancel_pipeline_job, request)


def _run(job: PipelineJob, platform: Platform) -> Run:
    """Returns the run that the API describes."""
    from google.protobuf.json_format import MessageToDict

    job_id = job.name.rpartition("/")[2]
    config = MessageToDict(type(job.runtime_config).pb(job.runtime_config))
    link = (
        f"https://console.cloud.google.com/vertex-ai/locations/{platform.location}/pipelines/runs/{job_id}"
        f"?project={platform.project}"
    )
    tasks = _tasks(job.job_detail.task_details, job_id)
    found = results(tasks)
    return Run(
        name=job_id,
        pipeline=job.display_name or job_id,
        state=cast(RunState, _state_name(job.state.name)),
        created=timestamp(job.create_time.replace(microsecond=0)) if job.create_time else "",
        duration_s=_seconds(job.start_time, job.end_time),
        error=" ".join(job.error.message.split()) or None,
        parameters=restore_integers(config.get("parameterValues", {})),
        resource=job.name,
        schedule=job.schedule_name,
        tasks=tasks,
        **found | {"links": {"run": link, **found["links"]}},
    )


def _tasks(details: Sequence[PipelineTaskDetail], job_id: str) -> tuple[Task, ...]:
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


def _task(detail: PipelineTaskDetail, path: str, is_only: bool, is_group: bool) -> Task:
    artifacts = {key: item.artifacts[0] for key, item in detail.outputs.items() if item.artifacts}
    metadata = dict(detail.execution.metadata or {})
    outputs = {
        key.removeprefix("output:"): value for key, value in metadata.items() if key.startswith("output:")
    }
    container, custom = detail.executor_detail.container_detail, detail.executor_detail.custom_job_detail
    jobs = (*container.failed_main_jobs, container.main_job, *custom.failed_jobs, custom.job)
    launched = [match[0] for match in _CUSTOM_JOB.finditer(str(outputs.get("gcp_resources", "")))]
    return Task(
        name=detail.task_name if is_only else path,
        path=path,
        state=_state_name(detail.state.name),
        seconds=_seconds(detail.start_time, detail.end_time),
        error=" ".join(detail.error.message.split()),
        jobs=tuple(dict.fromkeys(job for job in (*jobs, *launched) if job)),
        is_group=is_group,
        ended=_time(detail.end_time) or float("inf"),
        parameters=outputs,
        artifacts={key: dict(item.metadata or {}) for key, item in artifacts.items()},
        uris={key: item.uri for key, item in artifacts.items()},
    )


def _state_name(state: str) -> str:
    return _STATES.get(state.removeprefix("PIPELINE_STATE_"), state.lower())


def _time(at: Any) -> float:
    return float(at.timestamp()) if at else 0.0


def _seconds(start: Any, end: Any) -> float | None:
    if not start:
        return None
    return max(0.0, _time(end or datetime.datetime.now(datetime.UTC)) - _time(start))


class _LogLine(NamedTuple):
    """One line of a replica's output, without line end, and when (UTC) Cloud Logging received it.

    `job` is the id of the custom job, `replica` "" for the platform's own lines, `key` the line's unique id.
    """

    time: datetime.datetime
    job: str
    replica: str
    text: str
    key: str


def _read_entries(
    platform: Platform, jobs: Iterable[str], limit: int, replica: str, since: datetime.datetime | None = None
) -> list[_LogLine]:
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
        _LogLine(
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


def _id(name: str) -> str:
    return name.rpartition("/")[2]
