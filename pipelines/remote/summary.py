"""Summary of a submission: what is sent, where, as whom, on which machines, in some lines for a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from shardline.components.text import duration, facts, short
from shardline.components.vertex.forms import seconds
from shardline.components.vertex.payload import at, known_text, whole
from shardline.pipelines.check.job import Job, Pool, jobs
from shardline.pipelines.check.pipeline import Executor, Pipeline
from shardline.pipelines.spec import declared, defaults

_ROLES = ("chief", "workers", "servers", "evaluator")
#: Characters of a value that are shown.
_LONGEST = 60


def summary(request: Mapping[str, Any], parameters: Mapping[str, Any], *, file: str, proof: str) -> str:
    """Returns the lines of a request that `job_request` has made.

    Args:
        request: The request.
        parameters: What the run is given, of the declared types.
        file: Where the pipeline is: a path or an address.
        proof: Whether it has run here.
    """
    job = at(request, "pipelineJob")
    pipeline = Pipeline(at(job, "pipelineSpec"), parameters)
    custom_jobs = jobs(pipeline)
    rows = [
        ("what", f"{job.get('displayName')}, {file}"),
        ("run", str(request.get("pipelineJobId") or "")),
        ("where", f"{request['parent']}, outputs below {at(job, 'runtimeConfig').get('gcsOutputDirectory')}"),
        ("as", _account(job, custom_jobs)),
        ("parameters", _parameters(pipeline, parameters)),
        ("image", ", ".join(_images(pipeline, custom_jobs))),
        *(("training", line) for item in custom_jobs for line in _machines(item)),
        ("other tasks", _resources(pipeline)),
        *(("limits", _limits(item)) for item in custom_jobs),
        ("labels", ", ".join(f"{name}={value}" for name, value in at(job, "labels").items())),
        ("proof", proof),
    ]
    # Both ways through a pipeline have their own training job.
    return facts([(name, value) for name, value in dict.fromkeys(rows) if value])


def _account(job: Mapping[str, Any], custom_jobs: tuple[Job, ...]) -> str:
    own = str(job.get("serviceAccount") or "") or "the project's default service account"
    others = {account for item in custom_jobs if (account := known_text(item.spec.get("service_account")))}
    training = "".join(f"; training as {account}" for account in sorted(others - {own}))
    return f"{own}{training}"


def _parameters(pipeline: Pipeline, parameters: Mapping[str, Any]) -> str:
    usual = defaults(pipeline.spec)
    given = [
        f"{name}={short(value, _LONGEST)}"
        for name, value in parameters.items()
        if name not in usual or value != usual[name]
    ]
    rest = len(declared(pipeline.spec)) - len(given)
    return ", ".join([*given, f"{rest} others keep their defaults"] if rest else given)


def _images(pipeline: Pipeline, custom_jobs: tuple[Job, ...]) -> list[str]:
    of_tasks = [known_text(executor.container.get("image")) for executor in pipeline.executors]
    of_replicas = [pool.image for job in custom_jobs for pool in job.pools]
    found = Counter(image for image in of_tasks + of_replicas if image)
    launchers = {known_text(job.task.container.get("image")) for job in custom_jobs}
    return [image for image, _ in found.most_common() if image not in launchers]


def _machines(job: Job) -> Iterator[str]:
    if not job.pools:  # they are known to a task of the run, of what it is given
        yield "machines as worker_pool_specs says"
        return
    total = sum(pool.replica_count or 0 for pool in job.pools)
    pools = [_pool(pool) for pool in job.pools]
    yield f"{', '.join(pools)} ({total} {'machine' if total == 1 else 'machines'})"


def _pool(pool: Pool) -> str:
    has = (
        f" with {whole(pool.machine.get('accelerator_count'))} {pool.accelerator_type}"
        if pool.accelerator_type
        else ""
    )
    role = _ROLES[pool.index] if pool.index < len(_ROLES) else f"pool {pool.index}"
    count = "?" if pool.replica_count is None else pool.replica_count
    return f"{role} {count} x {pool.machine_type or 'a machine of the run'}{has}"


def _resources(pipeline: Pipeline) -> str:
    """Returns what machines the tasks ask for that are no custom jobs, most of them first."""
    launchers = {item.task.component_name for item in jobs(pipeline)}
    wanted = Counter(
        _limit(executor)
        for executor in pipeline.executors
        if executor.task is None or executor.task.component_name not in launchers
    )
    return ", ".join(f"{count} x {what}" for what, count in wanted.most_common())


def _limit(executor: Executor) -> str:
    resources = at(executor.container, "resources")
    cpu = resources.get("resourceCpuLimit") or resources.get("cpuLimit")
    memory = resources.get("resourceMemoryLimit") or resources.get("memoryLimit")
    accelerator = at(resources, "accelerator")
    kind = accelerator.get("resourceType") or accelerator.get("type")
    parts = [f"{cpu} CPU" if cpu else "", f"{memory} memory" if memory else "", str(kind or "")]
    return " ".join(part for part in parts if part) or "the platform's default machine"


def _limits(job: Job) -> str:
    """Returns what bounds the time, and so the costs, of a custom job."""
    timeout = seconds(known_text(job.scheduling.get("timeout")))
    retries = at(job.task.spec, "retryPolicy").get("maxRetryCount")
    parts = [
        f"training ends after {duration(timeout)} at the latest" if timeout else "",
        f"tried again {int(retries)} times" if retries else "never tried again",
        job.strategy.lower().replace("_", " ") if job.strategy else "",
    ]
    return ", ".join(part for part in parts if part)
