"""A run on the platform, as Vertex AI and Cloud Logging tell of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from shardline.components import run_record
from shardline.components.run_record import LAST_LINES, Outcome, TaskOutputs, results
from shardline.components.vertex.causes import Failure
from shardline.components.vertex.logs import LogLine, lines_of, log_filter, readable

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1.types import CustomJob, PipelineJob, PipelineTaskDetail

#: Entries that are read to find the last lines that say something.
_ENTRIES = 300

T = TypeVar("T")

_RESOURCE = re.compile(r"projects/([^/]+)/locations/([^/]+)/pipelineJobs/([^/]+)")
_CUSTOM_JOB = re.compile(r"projects/[^/\s\"]+/locations/[^/\s\"]+/customJobs/(\d+)")
_REPLICA = re.compile(r"replica (workerpool\d+-\d+)")
_STATUS = re.compile(r"non-zero status of (\d+)(\(SIG)?")
#: As `shardline.trainer.progress` renders it.
_ERROR = re.compile(r"(?!pipeline:)(\w+): error: (.*)")


@dataclass(frozen=True)
class Platform:
    """Where a run can be asked about.

    Attributes:
        pipeline_job: Gives a pipeline's run by its resource name.
        custom_job: Gives a custom job by its resource name.
        log: Gives the newest lines in the project's logs by filter, at most so many, the oldest first.
    """

    pipeline_job: Callable[[str], PipelineJob]
    custom_job: Callable[[str], CustomJob]
    log: Callable[[str, int], list[LogLine]]


def connect(project: str, location: str, endpoint: str = "") -> Platform:
    """Returns the platform in one region, behind Google's own clients; each call is tried again for a while.

    Args:
        project: Id, for its logs.
        location: Region.
        endpoint: Host of the API; "" for the region's.
    """
    from google.api_core.retry import Retry
    from google.cloud.aiplatform_v1 import JobServiceClient, PipelineServiceClient
    from google.cloud.logging_v2.services.logging_service_v2 import LoggingServiceV2Client

    options = {"api_endpoint": endpoint or f"{location}-aiplatform.googleapis.com"}
    retry = Retry(timeout=60)

    def read_log(text: str, limit: int) -> list[LogLine]:
        request = {
            "resource_names": [f"projects/{project}"],
            "filter": text,
            "order_by": "timestamp desc",
            "page_size": min(limit, 1000),
        }
        pages = LoggingServiceV2Client().list_log_entries(request=request, retry=retry)
        entries = [entry for entry, _ in zip(pages, range(limit), strict=False)]
        return list(lines_of(reversed(entries)))

    return Platform(
        lambda name: PipelineServiceClient(client_options=options).get_pipeline_job(name=name, retry=retry),
        lambda name: JobServiceClient(client_options=options).get_custom_job(name=name, retry=retry),
        read_log,
    )


def console_link(name: str) -> str:
    """Returns the console's page of a run."""
    found = _RESOURCE.fullmatch(name)
    if found is None:
        return ""
    project, location, job = found.groups()
    return (
        f"https://console.cloud.google.com/vertex-ai/locations/{location}/pipelines/runs/{job}"
        f"?project={project}"
    )


def read_outcome(
    name: str, platform: Platform, state: str = "", note: Callable[[str], None] = lambda text: None
) -> Outcome:
    """Returns how a run came out, as far as it has come.

    Args:
        name: Resource name of the run.
        platform: Where to ask.
        state: Where the run's own state cannot know it yet: "failed" to a task that runs at its end.
        note: Is told what could not be read; a failure is explained as well as it can be without it.

    Raises:
        google.api_core.exceptions.GoogleAPIError: When the run itself cannot be read.
    """
    job = platform.pipeline_job(name)
    state = state or _state(job.state.name)
    details = list(job.job_detail.task_details)
    found = results(map(_outputs, details))
    found["links"] = {"run": console_link(name), **found["links"]}
    failed = failed_task(details)
    failure = None
    if state == run_record.FAILED:
        failure = _failure(failed, platform, note) if failed else Failure(error=_line(job.error.message))
    return Outcome(
        name=name.rpartition("/")[2],
        pipeline=job.display_name or name.rpartition("/")[2],
        state=state,
        failure=failure,
        **found,
    )


def failed_task(details: list[PipelineTaskDetail]) -> PipelineTaskDetail | None:
    """Returns the task that failed first, not the groups that it is in."""
    failed = [item for item in details if item.state.name == "FAILED"]
    groups = {item.parent_task_id for item in failed}
    tasks = [item for item in failed if item.task_id not in groups]
    # A time that is not set is None, and then comes last.
    return min(tasks, key=lambda item: (item.end_time is None, item.end_time or 0), default=None)


def custom_jobs(detail: PipelineTaskDetail) -> list[str]:
    """Returns the resource names of a task's custom jobs, the one that matters most first.

    GCPC's launcher is a custom job itself; the one that it has launched stands in gcp_resources.
    """
    executor = detail.executor_detail
    launched = str(dict(detail.execution.metadata or {}).get("output:gcp_resources", ""))
    names = [match[0] for match in _CUSTOM_JOB.finditer(launched)]
    names += [executor.custom_job_detail.job, executor.container_detail.main_job]
    return list(dict.fromkeys(name for name in names if name))


def _failure(detail: PipelineTaskDetail, platform: Platform, note: Callable[[str], None]) -> Failure:
    names = custom_jobs(detail)
    messages = [_read(partial(_error_of, platform, name), "", note) for name in names]
    replica = _REPLICA.search(_telling([*messages, detail.error.message]))
    lines: list[LogLine] = []
    if names:
        jobs = [name.rpartition("/")[2] for name in names]
        text = log_filter(jobs, replica[1] if replica else "")
        lines = _read(lambda: platform.log(text, _ENTRIES), lines, note)
    return _judged(detail.task_name, [*messages, detail.error.message], [line.text for line in lines])


def _error_of(platform: Platform, name: str) -> str:
    return str(platform.custom_job(name).error.message)


def _read(ask: Callable[[], T], otherwise: T, note: Callable[[str], None]) -> T:
    """Returns an answer of the platform, or what to go on with where it refuses one."""
    from google.api_core.exceptions import GoogleAPIError

    try:
        return ask()
    except GoogleAPIError as error:
        note(f"not everything can be read: {_line(str(error))}")
        return otherwise


def _telling(messages: list[str]) -> str:
    """Returns the message that names a replica and its exit code, or else the first."""
    return next((text for text in messages if _STATUS.search(text)), next(filter(None, messages), ""))


def _judged(task: str, messages: list[str], log: list[str]) -> Failure:
    """Returns the evidence in the platform's messages and in the lines of the log."""
    message = _telling(messages)
    replica, status = _REPLICA.search(message), _STATUS.search(message)
    lines = [line for line in readable(log) if not _ERROR.fullmatch(line)]
    own = [match[2] for line in log if (match := _ERROR.fullmatch(line))]
    code = int(status[1]) + (128 if status[2] and int(status[1]) < 128 else 0) if status else None
    return Failure(
        task=task,
        replica=replica[1] if replica else "",
        exit_code=code,
        error=own[-1] if own else _line(message),
        own_words=bool(own),
        lines=tuple(lines[-LAST_LINES:]),
    )


def _outputs(detail: PipelineTaskDetail) -> TaskOutputs:
    made = {name: item.artifacts[0] for name, item in detail.outputs.items() if item.artifacts}
    metadata = dict(detail.execution.metadata or {})
    prefix = "output:"
    return TaskOutputs(
        task=detail.task_name,
        parameters={k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)},
        artifacts={name: _plain(item.metadata) for name, item in made.items()},
        uris={name: item.uri for name, item in made.items()},
    )


def _plain(metadata: Any) -> dict[str, Any]:
    return dict(metadata or {})


def _state(name: str) -> str:
    word = name.removeprefix("PIPELINE_STATE_").lower()
    return (
        word
        if word in (run_record.SUCCEEDED, run_record.FAILED, run_record.CANCELLED)
        else run_record.RUNNING
    )


def _line(text: str) -> str:
    return " ".join(text.split())
