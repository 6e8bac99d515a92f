"""Rules about how a custom job is provisioned, restarted and ended.

Rules about labels.

Rules about numbers that have to fit together in distributed training.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardline.components.vertex.forms import MOST_LABELS, is_label_key, is_label_value
from shardline.components.vertex.payload import at, known_text, lacks, whole
from shardline.pipelines.check.job import Job, jobs
from shardline.pipelines.check.pipeline import Pipeline, Task
from shardline.pipelines.check.registry import error, warning
from shardline.pipelines.check.rules.machines import is_tpu

_STRATEGIES = ("STANDARD", "SPOT", "FLEX_START")
_DEPRECATED = ("ON_DEMAND", "LOW_COST")
_FLEX_START_GPUS = ("L4", "A100", "H100", "H200", "B200")
_WEEK = 7 * 24 * 3600
_DURATION = re.compile(r"\d+(\.\d{1,9})?s")


@error("SL201", Job, fix='write seconds followed by "s", as in "86400s"')
def durations_are_seconds(job: Job) -> Iterator[str]:
    """A timeout and a max_wait_duration are seconds with an "s".

    Source: google_cloud_pipeline_components, CustomTrainingJobOp: "A duration in seconds with up to nine
    fractional digits, terminated by 's'".
    """
    for name in ("timeout", "max_wait_duration"):
        found = known_text(job.scheduling.get(name))
        if found and not _DURATION.fullmatch(found):
            yield f"{name} is {found!r}"


@error("SL202", Job, fix="take STANDARD, SPOT or FLEX_START")
def strategy_exists(job: Job) -> Iterator[str]:
    """The scheduling strategy is one that the API has.

    Source: google.cloud.aiplatform_v1.types.Scheduling.Strategy.
    """
    known = (*_STRATEGIES, *_DEPRECATED, "STRATEGY_UNSPECIFIED")
    if job.strategy and job.strategy not in known:
        yield f"strategy is {job.strategy!r}"


@warning("SL203", Job, fix="take STANDARD for ON_DEMAND, and SPOT for LOW_COST")
def strategy_is_current(job: Job) -> Iterator[str]:
    """The scheduling strategy is not deprecated.

    Source: google.cloud.aiplatform_v1.types.Scheduling.Strategy.
    """
    if job.strategy in _DEPRECATED:
        yield f"strategy {job.strategy} is deprecated"


@error(
    "SL204", Job, fix="give all worker pools the same machine type and accelerators, or take SPOT or STANDARD"
)
def flex_start_machines_are_alike(job: Job) -> Iterator[str]:
    """FLEX_START has the same machines in all pools.

    Source: docs.cloud.google.com, training/schedule-jobs-dws, "Requirements".
    """
    machines = {
        (pool.machine_type, pool.accelerator_type, str(pool.machine.get("accelerator_count")))
        for pool in job.pools
    }
    if job.strategy == "FLEX_START" and len(machines) > 1:
        yield f"FLEX_START has {len(machines)} different machines: " + ", ".join(
            f"{pool.index}: {pool.machine_type}" for pool in job.pools
        )


@error("SL205", Job, fix="take a machine with L4, A100, H100, H200 or B200 GPUs, or another strategy")
def flex_start_gpus_are_supported(job: Job) -> Iterator[str]:
    """FLEX_START asks for L4, A100, H100, H200 or B200 GPUs.

    Source: docs.cloud.google.com, training/schedule-jobs-dws, "Requirements".
    """
    if job.strategy != "FLEX_START":
        return
    for pool in job.pools:
        unknown = "{{$" in str(pool.machine.get("accelerator_type", ""))
        if not unknown and not any(gpu in pool.accelerator_type.split("_") for gpu in _FLEX_START_GPUS):
            yield f"FLEX_START, and worker pool {pool.index} has {pool.accelerator_type or 'no GPUs'}"


@error("SL206", Job, fix='give a timeout of at most "604800s"')
def flex_start_ends_in_a_week(job: Job) -> Iterator[str]:
    """FLEX_START has a timeout of at most 7 days.

    Source: docs.cloud.google.com, training/schedule-jobs-dws, "Requirements".
    """
    timeout = known_text(job.scheduling.get("timeout"))
    if job.strategy == "FLEX_START" and _DURATION.fullmatch(timeout) and float(timeout[:-1]) > _WEEK:
        yield f"FLEX_START with a timeout of {timeout}"


@warning(
    "SL207", Job, fix="write checkpoints: set base_output_directory, or give the trainer a directory for them"
)
def spot_has_checkpoints(job: Job) -> Iterator[str]:
    """A SPOT job has a place for checkpoints.

    Source: docs.cloud.google.com, training/use-spot-vms, "Preemption handling".
    """
    if job.strategy == "SPOT" and lacks(job.spec, "base_output_directory") and not _has_place(job):
        yield "SPOT replicas are preempted, and nothing says where checkpoints go: the job starts over"


@error("SL208", Job, fix="take STANDARD for TPUs")
def spot_has_no_tpu(job: Job) -> Iterator[str]:
    """SPOT does not come with TPU pods.

    Source: docs.cloud.google.com, training/use-spot-vms, "Limitations and requirements".
    """
    for pool in job.pools:
        count = pool.machine.get("accelerator_count")
        if job.strategy == "SPOT" and is_tpu(pool) and isinstance(count, int | float) and count > 8:
            yield f"worker pool {pool.index} is a TPU pod, and the strategy is SPOT"


@warning("SL209", Job, fix="set restart_job_on_worker_restart, and resume from checkpoints")
def workers_restart_together(job: Job) -> Iterator[str]:
    """Workers without parameter servers restart together.

    All-reduce cannot go on without a peer: a worker that comes back alone finds nobody.

    Source: google.cloud.aiplatform_v1.types.Scheduling: restart_job_on_worker_restart is for "distributed
    training jobs that are not resilient to workers leaving and joining a job".
    """
    if (
        job.pool(1)
        and not job.has_parameter_servers
        and lacks(job.spec, "scheduling", "restart_job_on_worker_restart")
    ):
        yield "the job has workers, no parameter servers, and restart_job_on_worker_restart is off"


@warning("SL210", Job, fix="leave out disable_retries or restart_job_on_worker_restart")
def restarts_are_not_disabled(job: Job) -> Iterator[str]:
    """disable_retries and restart_job_on_worker_restart are not both set.

    Source: google.cloud.aiplatform_v1.types.Scheduling: disable_retries "overrides
    restart_job_on_worker_restart to false".
    """
    if job.scheduling.get("disable_retries") and job.scheduling.get("restart_job_on_worker_restart"):
        yield "disable_retries switches restart_job_on_worker_restart off"


def _has_place(job: Job) -> bool:
    """Whether the trainer is given output artifacts, or something that is called a checkpoint."""
    arguments = " ".join(part for pool in job.pools for part in pool.argv)
    outputs = job.task.component.get("outputDefinitions") or {}
    return (
        bool(outputs.get("artifacts") and "--executor_input" in arguments)
        or "checkpoint" in arguments.lower()
    )


_RESERVED = "vertex-ai-pipelines-run-billing-id"


@error("SL801", Job, fix="use lower-case letters, digits, _ and -, 63 characters at most")
def job_labels_are_valid(job: Job) -> Iterator[str]:
    """A custom job's labels are as the API wants them.

    Source: google.cloud.aiplatform_v1.types.CustomJob.labels; goo.gl/xmQnxf.
    """
    yield from _invalid(at(job.content, "labels"))


@error("SL802", Pipeline, fix="use lower-case letters, digits, _ and -, 63 characters at most")
def run_labels_are_valid(pipeline: Pipeline) -> Iterator[str]:
    """A run's labels are as the API wants them.

    Source: google.cloud.aiplatform_v1.types.PipelineJob.labels; goo.gl/xmQnxf.
    """
    yield from _invalid(pipeline.labels or {})


@warning("SL803", Pipeline, fix="leave it out")
def reserved_label_is_free(pipeline: Pipeline) -> Iterator[str]:
    """A run does not set the label that the platform sets.

    Source: google.cloud.aiplatform_v1.types.PipelineJob.labels: "user set value will get overrided".
    """
    if _RESERVED in (pipeline.labels or {}):
        yield f"the label {_RESERVED} is overwritten"


def _invalid(labels: Mapping[str, Any]) -> Iterator[str]:
    if len(labels) > MOST_LABELS:
        yield f"there are {len(labels)} labels, at most {MOST_LABELS} are allowed"
    for key, value in labels.items():
        if "{{$" in f"{key}{value}":
            continue
        if not isinstance(value, str):
            yield f"the label {key} is {value!r}, not a text"
        elif not is_label_key(key):
            yield f"the label key {key[:80]!r} is not allowed"
        elif not is_label_value(value):
            yield f"the value {value[:80]!r} of the label {key} is not allowed"


_GLOBAL_BATCH = ("global_batch_size", "total_batch_size")
_SHARDS = ("shards", "num_shards", "shard_count")
_READERS = ("readers", "input_workers", "num_input_workers")


@error("SL701", Job, fix="take a multiple of the number of replicas, or say the batch size per replica")
def global_batch_is_divisible(job: Job) -> Iterator[str]:
    """A global batch can be divided among the replicas.

    Each accelerator of a machine is a replica of its own.

    Source: tensorflow.org, tf.distribute.InputContext.get_per_replica_batch_size: it raises ValueError.
    """
    machines = job.training_replicas
    chief = job.pool(0)
    devices = whole(chief.machine.get("accelerator_count", 1)) if chief else None
    for name in _GLOBAL_BATCH:
        batch = whole(job.task.value(name)) if name in job.task.declared("parameters") else None
        if batch and machines and devices and batch % (machines * devices):
            yield f"{name} is {batch}, and there are {machines * devices} replicas"


@warning("SL702", Task, fix="take a multiple of the number of workers, chief included")
def shards_are_a_multiple_of_workers(task: Task) -> Iterator[str]:
    """The number of shards is a multiple of the training workers.

    Source: tensorflow.org, tf.data.experimental.AutoShardPolicy.FILE: with fewer files than workers it
    fails, and with a number that does not divide some workers read more.
    """
    names = task.declared("parameters")
    # Where the writer is told how many will read, it sees to the shards itself.
    told = [name for name in _READERS if name in names] or [name for name in _SHARDS if name in names]
    if not task.container or not told:
        return
    for workers in sorted({job.training_replicas or 1 for job in jobs(task.pipeline)} - {1}):
        for name in told:
            count = whole(task.value(name))
            if count and count % workers:
                yield f"{name} is {count}, and {workers} workers read the shards"
