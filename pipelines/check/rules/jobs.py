"""Rules about custom jobs: provisioning, restarts, labels, and numbers that have to fit together."""

from __future__ import annotations

from shardline.components.vertex.forms import DURATION, MOST_LABELS, is_label_key, is_label_value, seconds
from shardline.components.vertex.job import SEVEN_DAYS_S, STRATEGIES
from shardline.components.vertex.payload import at, known_text, lacks, whole
from shardline.pipelines.check.job import Job, jobs
from shardline.pipelines.check.pipeline import Pipeline, Task
from shardline.pipelines.check.registry import Found, rules
from shardline.pipelines.check.rules.machines import is_tpu

_DEPRECATED = ("ON_DEMAND", "LOW_COST")
_FLEX_START_GPUS = ("L4", "A100", "H100", "H200", "B200")


@rules(Job)
def scheduling(job: Job) -> Found:
    """Scheduling and restarts of a custom job.

    All-reduce cannot go on without a peer: a worker that comes back alone finds nobody.

    SL201 error: A timeout and a max_wait_duration are seconds with an "s".
        Fix: write seconds followed by "s", as in "86400s"
        Source: google_cloud_pipeline_components, CustomTrainingJobOp: "A duration in seconds with up to nine
            fractional digits, terminated by 's'".
    SL202 error: The scheduling strategy is one that the API has.
        Fix: take STANDARD, SPOT or FLEX_START
        Source: google.cloud.aiplatform_v1.types.Scheduling.Strategy.
    SL203 warning: The scheduling strategy is not deprecated.
        Fix: take STANDARD for ON_DEMAND, and SPOT for LOW_COST
        Source: google.cloud.aiplatform_v1.types.Scheduling.Strategy.
    SL209 warning: Workers without parameter servers restart together.
        Fix: set restart_job_on_worker_restart, and resume from checkpoints
        Source: google.cloud.aiplatform_v1.types.Scheduling: restart_job_on_worker_restart is for "distributed
            training jobs that are not resilient to workers leaving and joining a job".
    SL210 warning: disable_retries and restart_job_on_worker_restart are not both set.
        Fix: leave out disable_retries or restart_job_on_worker_restart
        Source: google.cloud.aiplatform_v1.types.Scheduling: disable_retries "overrides
            restart_job_on_worker_restart to false".
    """
    for name in ("timeout", "max_wait_duration"):
        found = known_text(job.scheduling.get(name))
        if found and not DURATION.fits(found):
            yield "SL201", f"{name} is {found!r}"
    if job.strategy and job.strategy not in (*STRATEGIES, *_DEPRECATED, "STRATEGY_UNSPECIFIED"):
        yield "SL202", f"strategy is {job.strategy!r}"
    if job.strategy in _DEPRECATED:
        yield "SL203", f"strategy {job.strategy} is deprecated"
    alone = lacks(job.spec, "scheduling", "restart_job_on_worker_restart")
    if job.pool(1) and not job.has_parameter_servers and alone:
        yield "SL209", "the job has workers, no parameter servers, and restart_job_on_worker_restart is off"
    if job.scheduling.get("disable_retries") and job.scheduling.get("restart_job_on_worker_restart"):
        yield "SL210", "disable_retries switches restart_job_on_worker_restart off"


@rules(Job)
def strategies(job: Job) -> Found:
    """Strategies FLEX_START and SPOT, and what they need.

    SL204 error: FLEX_START has the same machines in all pools.
        Fix: give all worker pools the same machine type and accelerators, or take SPOT or STANDARD
        Source: docs.cloud.google.com, training/schedule-jobs-dws, "Requirements".
    SL205 error: FLEX_START asks for L4, A100, H100, H200 or B200 GPUs.
        Fix: take a machine with L4, A100, H100, H200 or B200 GPUs, or another strategy
        Source: docs.cloud.google.com, training/schedule-jobs-dws, "Requirements".
    SL206 error: FLEX_START has a timeout of at most 7 days.
        Fix: give a timeout of at most "604800s"
        Source: docs.cloud.google.com, training/schedule-jobs-dws, "Requirements".
    SL207 warning: A SPOT job has a place for checkpoints.
        Fix: write checkpoints: set base_output_directory, or give the trainer a directory for them
        Source: docs.cloud.google.com, training/use-spot-vms, "Preemption handling".
    SL208 error: SPOT does not come with TPU pods.
        Fix: take STANDARD for TPUs
        Source: docs.cloud.google.com, training/use-spot-vms, "Limitations and requirements".
    """
    kinds = {
        (pool.machine_type, pool.accelerator_type, str(pool.machine.get("accelerator_count")))
        for pool in job.pools
    }
    timeout = known_text(job.scheduling.get("timeout"))
    if job.strategy == "FLEX_START" and len(kinds) > 1:
        listing = ", ".join(f"{pool.index}: {pool.machine_type}" for pool in job.pools)
        yield "SL204", f"FLEX_START has {len(kinds)} different machines: {listing}"
    if job.strategy == "FLEX_START" and (seconds(timeout) or 0) > SEVEN_DAYS_S:
        yield "SL206", f"FLEX_START with a timeout of {timeout}"
    if job.strategy == "SPOT" and lacks(job.spec, "base_output_directory") and not _has_place(job):
        lost = "nothing says where checkpoints go: the job starts over"
        yield "SL207", f"SPOT replicas are preempted, and {lost}"
    for pool in job.pools:
        count, written = pool.machine.get("accelerator_count"), str(pool.machine.get("accelerator_type", ""))
        supported = "{{$" in written or set(_FLEX_START_GPUS) & set(pool.accelerator_type.split("_"))
        if job.strategy == "FLEX_START" and not supported:
            yield (
                "SL205",
                f"FLEX_START, and worker pool {pool.index} has {pool.accelerator_type or 'no GPUs'}",
            )
        if job.strategy == "SPOT" and is_tpu(pool) and isinstance(count, int | float) and count > 8:
            yield "SL208", f"worker pool {pool.index} is a TPU pod, and the strategy is SPOT"


def _has_place(job: Job) -> bool:
    """Whether the trainer is given output artifacts, or something that is called a checkpoint."""
    arguments = " ".join(part for pool in job.pools for part in pool.argv)
    outputs = at(job.task.component, "outputDefinitions", "artifacts")
    return bool(outputs and "--executor_input" in arguments) or "checkpoint" in arguments.lower()


_RESERVED = "vertex-ai-pipelines-run-billing-id"


@rules(Job, Pipeline)
def labels(part: Job | Pipeline) -> Found:
    """Labels of custom jobs and of runs.

    SL801 error: A custom job's labels are as the API wants them.
        Fix: use lower-case letters, digits, _ and -, 63 characters at most
        Source: google.cloud.aiplatform_v1.types.CustomJob.labels; goo.gl/xmQnxf.
    SL802 error: A run's labels are as the API wants them.
        Fix: use lower-case letters, digits, _ and -, 63 characters at most
        Source: google.cloud.aiplatform_v1.types.PipelineJob.labels; goo.gl/xmQnxf.
    SL803 warning: A run does not set the label that the platform sets.
        Fix: leave it out
        Source: google.cloud.aiplatform_v1.types.PipelineJob.labels: "user set value will get overrided".
    """
    if isinstance(part, Job):
        code, found = "SL801", at(part.content, "labels")
    else:
        code, found = "SL802", dict(part.labels or {})
        if _RESERVED in found:
            yield "SL803", f"the label {_RESERVED} is overwritten"
    if len(found) > MOST_LABELS:
        yield code, f"there are {len(found)} labels, at most {MOST_LABELS} are allowed"
    for key, value in found.items():
        if "{{$" in f"{key}{value}":
            continue
        if not isinstance(value, str):
            yield code, f"the label {key} is {value!r}, not a text"
        elif not is_label_key(key):
            yield code, f"the label key {key[:80]!r} is not allowed"
        elif not is_label_value(value):
            yield code, f"the value {value[:80]!r} of the label {key} is not allowed"


_GLOBAL_BATCH = ("global_batch_size", "total_batch_size")
_SHARDS = ("shards", "num_shards", "shard_count")
_READERS = ("readers", "input_workers", "num_input_workers")


@rules(Job)
def batches(job: Job) -> Found:
    """Batch sizes; each accelerator of a machine is a replica of its own.

    SL701 error: A global batch can be divided among the replicas.
        Fix: take a multiple of the number of replicas, or say the batch size per replica
        Source: tensorflow.org, tf.distribute.InputContext.get_per_replica_batch_size: it raises ValueError.
    """
    machines = job.training_replicas
    chief = job.pool(0)
    devices = whole(chief.machine.get("accelerator_count", 1)) if chief else None
    for name in _GLOBAL_BATCH:
        batch = whole(job.task.value(name)) if name in job.task.declared("parameters") else None
        if batch and machines and devices and batch % (machines * devices):
            yield "SL701", f"{name} is {batch}, and there are {machines * devices} replicas"


@rules(Task)
def shards(task: Task) -> Found:
    """Numbers of shards.

    SL702 warning: The number of shards is a multiple of the training workers.
        Fix: take a multiple of the number of workers, chief included
        Source: tensorflow.org, tf.data.experimental.AutoShardPolicy.FILE: with fewer files than workers it
            fails, and with a number that does not divide some workers read more.
    """
    given = {name: task.value(name) for name in task.declared("parameters")}
    for fields in [value for value in given.values() if isinstance(value, dict)]:
        given = {**fields, **given}  # an object of parameters, as preprocess takes it
    # Where the writer is told how many will read, it sees to the shards itself.
    told = [name for name in _READERS if name in given] or [name for name in _SHARDS if name in given]
    if not task.container or not told:
        return
    for workers in sorted({job.training_replicas or 1 for job in jobs(task.pipeline)} - {1}):
        for name in told:
            count = whole(given[name])
            if count and count % workers:
                yield "SL702", f"{name} is {count}, and {workers} workers read the shards"
