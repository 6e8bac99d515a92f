"""Starting a run, watching it, and cancelling it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shardline.pipelines.vertex.calls import Clients, ask
from shardline.pipelines.vertex.status import RunStatus, read_run, read_status, resource_name
from shardline.trainer import progress
from shardline.trainer.errors import CancelledRunError, RunError, ShardlineError

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1.types import PipelineJob

#: Seconds between two looks at a run: at first, and at most.
_FIRST_S, _LAST_S = 0.5, 15.0


def submit(clients: Clients, request: Mapping[str, Any]) -> RunStatus:
    """Starts a run.

    Args:
        clients: Of the place.
        request: What `job_request` returns, with an id.

    Returns:
        The run as the platform has it.

    Raises:
        PlatformError: When the platform refuses or is not reached.
    """
    from google.cloud.aiplatform_v1.types import CreatePipelineJobRequest
    from google.protobuf.json_format import ParseDict

    message = ParseDict(dict(request), CreatePipelineJobRequest.pb(CreatePipelineJobRequest()))
    job_id = str(request["pipelineJobId"])

    def made() -> PipelineJob:
        return read_run(clients, job_id)

    job = ask(
        f"submit the run {job_id}",
        clients.pipelines.create_pipeline_job,
        CreatePipelineJobRequest.wrap(message),
        made=made,
    )
    return read_status(job)


def cancel(clients: Clients, run: str) -> tuple[bool, RunStatus]:
    """Asks the platform to cancel a run, unless it has ended.

    Returns:
        Whether it was asked to, and the run as it was before.

    Raises:
        PlatformError: When there is no such run, or the platform refuses or is not reached.
    """
    status = read_status(read_run(clients, run))
    if status.has_ended:
        return False, status
    ask(f"cancel the run {run}", clients.pipelines.cancel_pipeline_job, cancel_request(clients, run))
    return True, status


def cancel_request(clients: Clients, run: str) -> dict[str, str]:
    """Returns a CancelPipelineJobRequest in the API's JSON form."""
    return {"name": resource_name(clients.environment, run)}


def wait(clients: Clients, run: str) -> RunStatus:
    """Watches a run until it has ended, and tells what becomes of its tasks.

    Returns:
        The run as it ended.

    Raises:
        PlatformError: When the platform was not reached for a quarter of an hour.
    """
    seen: dict[str, str] = {}
    for pause in _pauses():
        status = read_status(read_run(clients, run, watching=True))
        for task in status.tasks:
            if task.is_under_way and seen.get(task.path) != task.state:
                seen[task.path] = task.state
                progress.say(task.name, task.in_words)
        if status.has_ended:
            return status
        time.sleep(pause)
    raise AssertionError("pauses never end")


def judge(status: RunStatus) -> None:
    """Returns when a run that has ended succeeded.

    Raises:
        RunError: When it failed.
        CancelledRunError: When it was cancelled.
    """
    if error := _error(status):
        raise error


def _error(status: RunStatus) -> ShardlineError | None:
    if status.state == "succeeded":
        return None
    if status.state == "cancelled":
        return CancelledRunError(f"the run {status.job_id} was cancelled")
    failed = status.failed_task
    where = f" in the task {failed.name}" if failed else ""
    why = (failed.error if failed else "") or status.error or "the platform does not say why"
    more = f"'shardline explain {status.job_id}' says more"
    return RunError(f"the run {status.job_id} failed{where}: {why.rstrip('.')}; {more}")


def _pauses() -> Iterator[float]:
    pause = _FIRST_S
    while True:
        yield pause
        pause = min(_LAST_S, pause * 1.3)
