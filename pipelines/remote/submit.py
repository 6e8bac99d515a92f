"""Submission of a run: its request, shown or sent, and waiting for its end."""

from __future__ import annotations

import copy
import datetime
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from shardline.components.custom_job import literal_string, mapping_at, whole_number
from shardline.components.runs import Run, VertexRun
from shardline.components.text import facts, truncate
from shardline.components.vertex import Platform
from shardline.pipelines.check import Job, Pipeline
from shardline.pipelines.settings import Environment, missing_error
from shardline.pipelines.spec import all_tasks, declared_parameters, defaults
from shardline.trainer.base import progress
from shardline.trainer.base.errors import CancelledRunError, RunError

#: Seconds between two reads of a run: at first, and at most.
_FIRST_S, _LAST_S = 0.5, 15.0

_MAX_ID = 127
_ROLES = ("chief", "workers", "servers", "evaluator")


def continue_parameters(platform: Platform, run: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a run that continues from the checkpoints of another; `parameters` override.

    Raises:
        RunError: When the other one is still running: both would write the same checkpoints.
        PlatformError: When there is no such run, or the platform is not reached.
    """
    previous = VertexRun(platform, run).read()
    if not previous.has_ended:
        raise RunError(f"the run {run} is {previous.state}; cancel it, or wait until it has ended")
    return {**previous.parameters, **parameters, "continue_run": previous.name}


def wait_for_run(read: Callable[[], Run]) -> Run:
    """Reads a run until it has ended, reports the states of its tasks, and returns it."""
    seen: dict[str, str] = {}
    pause = _FIRST_S
    while True:
        found = read()
        for task in found.tasks:
            has_started = not task.is_group and task.state not in ("waiting", "unknown")
            if has_started and seen.get(task.path) != task.state:
                seen[task.path] = task.state
                progress.report(task.name, task.summary)
        if found.has_ended:
            return found
        time.sleep(pause)
        pause = min(_LAST_S, pause * 1.3)


def raise_for_state(run: Run, explain: str) -> None:
    """Raises RunError or CancelledRunError when a finished run has not succeeded; `explain` says more."""
    if run.state == "succeeded":
        return
    if run.state == "cancelled":
        raise CancelledRunError(f"the run {run.name} was cancelled")
    failed = run.failed_task
    where = f" in the task {failed.name}" if failed else ""
    why = (failed.error if failed else "") or run.error or "the platform does not say why"
    raise RunError(f"the run {run.name} failed{where}: {why.rstrip('.')}; {explain} says more")


def job_request(
    environment: Environment,
    spec: Mapping[str, Any],
    parameters: Mapping[str, Any],
    *,
    job_id: str = "",
    tags: Mapping[str, str] | None = None,
    cached: bool = True,
    template_uri: str = "",
) -> dict[str, Any]:
    """Returns a CreatePipelineJobRequest in the API's JSON.

    `parameters` are checked values (`check_parameters`), without those that keep their default; `tags` are
    further labels of this run. Without a `job_id` it is the request of a schedule. Tasks take no cached
    results unless `cached`. `template_uri` is the URL of the pipeline in the registry. Raises SettingsError
    when there is no pipeline root.
    """
    if not cached:
        spec = copy.deepcopy(dict(spec))
        for _, task in all_tasks(spec):
            task["cachingOptions"] = {}
    root = environment.pipeline_root or spec.get("defaultPipelineRoot")
    if not root:
        raise missing_error("pipeline_root")
    key = environment.encryption_spec_key_name
    job = {
        "displayName": spec["pipelineInfo"]["name"],
        "pipelineSpec": spec,
        "labels": {**environment.tags, **(tags or {})},
        "runtimeConfig": {"gcsOutputDirectory": root, "parameterValues": dict(parameters)},
        "serviceAccount": environment.service_account,
        "network": environment.network,
        "encryptionSpec": {"kmsKeyName": key} if key else {},
        "templateUri": template_uri,
    }
    request = {
        "parent": environment.platform.parent,
        "pipelineJob": {name: value for name, value in job.items() if value},
    }
    if job_id:
        request["pipelineJobId"] = job_id
    return request


def summary(request: Mapping[str, Any], parameters: Mapping[str, Any], *, file: str, proof: str) -> str:
    """Returns a summary of a request of `job_request`; `file` is the pipeline's path or URL."""
    job = mapping_at(request, "pipelineJob")
    pipeline = Pipeline(mapping_at(job, "pipelineSpec"), parameters)
    default_values = defaults(pipeline.spec)
    changed = [
        f"{name}={truncate(value, 60)}"
        for name, value in parameters.items()
        if name not in default_values or value != default_values[name]
    ]
    if rest := len(declared_parameters(pipeline.spec)) - len(changed):
        changed.append(f"{rest} others keep their defaults")
    account = job.get("serviceAccount") or "the project's default service account"
    launchers = {literal_string(item.task.container.get("image")) for item in pipeline.jobs}
    images = [literal_string(executor.container.get("image")) for executor in pipeline.executors]
    images += [pool.image for item in pipeline.jobs for pool in item.pools]
    outputs = mapping_at(job, "runtimeConfig").get("gcsOutputDirectory")
    rows = [
        ("what", f"{job.get('displayName')}, {file}"),
        ("run", str(request.get("pipelineJobId") or "")),
        ("where", f"{request['parent']}, outputs below {outputs}"),
        ("as", str(account)),
        ("parameters", ", ".join(changed)),
        ("image", ", ".join(image for image in dict.fromkeys(images) if image not in launchers)),
        *(("training", _machines(item)) for item in pipeline.jobs),
        ("tags", ", ".join(f"{name}={value}" for name, value in mapping_at(job, "labels").items())),
        ("proof", proof),
    ]
    return facts([(name, value) for name, value in rows if value])


def _machines(job: Job) -> str:
    total = sum(pool.replica_count or 0 for pool in job.pools)
    pools = []
    for pool in job.pools:
        role = _ROLES[pool.index] if pool.index < len(_ROLES) else f"pool {pool.index}"
        count = "?" if pool.replica_count is None else pool.replica_count
        text = f"{role} {count} x {pool.machine_type or 'a machine of the run'}"
        if pool.accelerator_type:
            text += f" with {whole_number(pool.machine.get('accelerator_count'))} {pool.accelerator_type}"
        pools.append(text)
    return f"{', '.join(pools)} ({total} {'machine' if total == 1 else 'machines'})"


def new_job_id(name: str) -> str:
    """Returns an id that no other run of a pipeline has: NAME-YYYYMMDDhhmmss-6hex.

    Ids of the SDK have no random part, and collide within a second.
    """
    end = f"-{datetime.datetime.now(datetime.UTC):%Y%m%d%H%M%S}-{secrets.token_hex(3)}"
    word = name if name[:1].isalpha() else f"run-{name}"
    return word[: _MAX_ID - len(end)].rstrip("-") + end
