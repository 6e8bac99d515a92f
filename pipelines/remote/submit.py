"""Starting a run, watching it, and cancelling it.

The request that starts a run, as JSON: what is shown is what is sent.
"""

from __future__ import annotations

import copy
import datetime
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shardline.components.vertex.forms import JOB_ID, LONGEST_NAME, check_labels
from shardline.pipelines.remote.client import Clients, ask
from shardline.pipelines.remote.environment import Environment
from shardline.pipelines.remote.runs import RunStatus, read_run, read_status, resource_name
from shardline.trainer import progress
from shardline.trainer.errors import CancelledRunError, PipelineError, RunError, SettingsError, ShardlineError

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


_LONGEST_ID = 127
_OLDEST_SCHEMA = (2, 1)


def job_request(
    environment: Environment,
    spec: Mapping[str, Any],
    parameters: Mapping[str, Any],
    *,
    job_id: str = "",
    labels: Mapping[str, str] | None = None,
    enable_caching: bool | None = None,
    template_uri: str = "",
) -> dict[str, Any]:
    """Returns a CreatePipelineJobRequest in the API's JSON form.

    Args:
        environment: Where, in whose name, and with which labels.
        spec: The compiled pipeline (IR).
        parameters: Checked values (`check_parameters`), without those that keep their default.
        job_id: Id of the run; "" leaves it out, as a schedule's request must.
        labels: Of this run, beside the environment's.
        enable_caching: For every task; None leaves it to each.
        template_uri: Where in the registry the pipeline came from.

    Raises:
        SettingsError: When there is no pipeline root, or a label or the id has not the form that it needs.
        PipelineError: When the pipeline is of a form that takes parameters in another way, or has a name that
            breaks the launcher of custom jobs.
    """
    _check_spec(spec)
    job = {
        "displayName": spec["pipelineInfo"]["name"],
        "pipelineSpec": spec if enable_caching is None else with_caching(spec, enable_caching),
        "labels": merge_labels(environment, labels or {}),
        "runtimeConfig": {
            "gcsOutputDirectory": _root(environment, spec),
            "parameterValues": dict(parameters),
        },
        "serviceAccount": environment.service_account,
        "network": environment.network,
        "encryptionSpec": {"kmsKeyName": environment.encryption_spec_key_name}
        if environment.encryption_spec_key_name
        else {},
        "templateUri": template_uri,
    }
    request = {"parent": environment.parent, "pipelineJob": {key: job[key] for key in job if job[key]}}
    if job_id:
        check_job_id(job_id)
        request["pipelineJobId"] = job_id
    return request


def new_job_id(name: str, now: datetime.datetime | None = None) -> str:
    """Returns an id that no other run has: NAME-YYYYMMDDhhmmss-6hex.

    The SDK's own end with the second, and collide within it.

    Args:
        name: Name of the pipeline.
        now: Time; the present one unless given.
    """
    moment = (now or datetime.datetime.now(datetime.UTC)).strftime("%Y%m%d%H%M%S")
    end = f"-{moment}-{secrets.token_hex(3)}"
    word = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    word = word if word[:1].isalpha() else f"run-{word}".rstrip("-")
    return word[: _LONGEST_ID - len(end)].rstrip("-") + end


def check_job_id(job_id: str) -> None:
    """Checks the form of a run's id.

    Raises:
        SettingsError: When it has another.
    """
    if not JOB_ID.fits(job_id):
        raise SettingsError(
            f"a run's id must begin with a letter, and have lower-case letters, digits and - only, "
            f"{_LONGEST_ID} at most, got {job_id!r}"
        )


def merge_labels(environment: Environment, labels: Mapping[str, str]) -> dict[str, str]:
    """Returns the labels of an environment and of a run, checked.

    Raises:
        SettingsError: When one has not the form that it needs.
    """
    merged = {**environment.labels, **labels}
    check_labels(merged)
    return merged


def with_caching(spec: Mapping[str, Any], enabled: bool) -> dict[str, Any]:
    """Returns a pipeline with caching on, or off, in every task."""
    changed = copy.deepcopy(dict(spec))
    for component in (changed["root"], *changed["components"].values()):
        for task in component.get("dag", {}).get("tasks", {}).values():
            task["cachingOptions"] = {"enableCache": True} if enabled else {}
    return changed


def _root(environment: Environment, spec: Mapping[str, Any]) -> str:
    return environment.pipeline_root or spec.get("defaultPipelineRoot") or environment.need("pipeline_root")


def _check_spec(spec: Mapping[str, Any]) -> None:
    name = spec["pipelineInfo"]["name"]
    if '"' in name or len(name) > LONGEST_NAME:
        raise PipelineError(
            f"the pipeline is called {name[:80]!r}; a name may have {LONGEST_NAME} characters, none of them "
            'a ", which breaks what its custom jobs are launched with: give another in @dsl.pipeline'
        )
    version = str(spec.get("schemaVersion", ""))
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _OLDEST_SCHEMA:
        raise PipelineError(
            f"the pipeline has schema version {version or 'none'}; compile it with KFP 2, which writes 2.1.0"
        )
