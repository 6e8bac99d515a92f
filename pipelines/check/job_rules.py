"""Rules about custom jobs: worker pools, provisioning, restarts, payload, keys and TensorBoard."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardline.components.custom_job import (
    duration_seconds,
    is_surely_missing,
    literal_string,
    mapping_at,
    other_region,
    refusals,
    whole_number,
    wrong_label,
)
from shardline.pipelines.check.checks import Found, rules
from shardline.pipelines.check.pipeline import PARAMETER, Job, Pipeline, Pool, strings

ROLES = ("chief", "workers", "parameter servers or Reduction Server", "evaluators")


@rules(Job)
def slots(job: Job) -> Found:
    """Slots of worker pools.

    The launcher drops empty pools, which moves each later pool up into another role.

    SL101 error: Worker pool 0 has one replica.
        Fix: set replica_count to 1, and put more replicas into worker pool 1
        Source: training/distributed-training.
    SL103 error: No worker pool follows an empty one.
        Fix: keep the slot with {"replica_count": "0"}, a string, or fill it
        Source: GCPC, json_util.py.
    """
    chief = job.pool(0)
    if chief and chief.replica_count not in (1, None):
        yield "SL101", f"worker pool 0 has replica_count {chief.replica_count}"
    elif not chief and not job.fault and (job.pools or is_surely_missing(job.spec, "worker_pool_specs")):
        yield "SL101", "worker pool 0 is empty"
    kept = [index for index, pool in enumerate(job.written_pools) if pool]
    for index, after in enumerate(kept):
        if index != after:
            moved = f"pool {after} ({_role(after)}) becomes {index} ({_role(index)})"
            yield "SL103", f"pool {index} is empty: {moved}"
            break


@rules(Pool)
def counts(pool: Pool) -> Found:
    """Counts of a pool. The launcher drops a count of 0 and keeps the rest of the pool.

    SL106 error: replica_count is 1 or more.
        Fix: set 1 or more, or leave out the pool
        Source: WorkerPoolSpec; the launcher drops 0.
    SL114 error: A machine has both accelerator type and count or neither, and a boot disk of 100 GB.
        Fix: set accelerator_type and accelerator_count or neither, and boot_disk_size_gb to 100 or more
        Source: MachineSpec; DiskSpec.
    """
    if "replica_count" not in mapping_at(pool.spec):
        kept = [before for before in pool.job.written_pools if before]
        if pool.index < len(kept) and mapping_at(kept[pool.index]).get("replica_count") == 0:
            yield "SL106", "replica_count is 0: the launcher drops the count and keeps the pool"
    elif pool.replica_count is not None and pool.replica_count < 1:
        yield "SL106", f"replica_count is {pool.replica_count}"
    kind, count = (pool.machine.get(f"accelerator_{name}") for name in ("type", "count"))
    if bool(kind) != bool(count):
        yield "SL114", f"accelerator_type is {kind or 'not set'}, and accelerator_count {count or 'is not'}"
    size = whole_number(mapping_at(pool.spec, "disk_spec").get("boot_disk_size_gb"))
    if size is not None and size < 100:
        yield "SL114", f"boot_disk_size_gb is {size}"


@rules(Job)
def roles(job: Job) -> Found:
    """Roles of worker pools: parameter servers and Reduction Server.

    SL107 error: Parameter servers have workers.
        Fix: put workers into worker pool 1, or leave out the parameter servers
        Source: tf.distribute.ParameterServerStrategy.
    SL109 error: Reduction Server is worker pool 2.
        Fix: put Reduction Server into worker pool 2
        Source: training/distributed-training.
    SL110 error: Reduction Server, without GPUs, serves workers with GPUs.
        Fix: give GPUs to chief and workers, at least one, and none to Reduction Server, or leave it out
        Source: training/distributed-training.
    """
    if job.has_parameter_servers and not job.pool(1):
        yield "SL107", "worker pool 2 holds parameter servers, and there are no workers"
    servers = [pool for pool in job.pools if pool.is_reduction_server]
    for pool in servers:
        if pool.index != 2:
            yield "SL109", f"Reduction Server is worker pool {pool.index} ({_role(pool.index)})"
        if pool.accelerator_type:
            yield "SL110", f"the Reduction Server's machines have {pool.accelerator_type}"
    workers = job.pool(1)
    if servers and (not workers or is_surely_missing(workers.spec, "machine_spec", "accelerator_type")):
        yield "SL110", "the Reduction Server serves no workers with GPUs"


def _role(index: int) -> str:
    return ROLES[index] if index < len(ROLES) else "no role"


@rules(Job)
def scheduling(job: Job) -> Found:
    """Provisioning, timeouts and restarts of a custom job.

    All-reduce cannot continue without a peer: a worker that restarts alone finds no other worker.

    SL201 error: A timeout is not 0s, and FLEX_START's at most 7 days.
        Fix: write "86400s", or with FLEX_START at most "604800s"
        Source: GCPC, CustomTrainingJobOp; training/schedule-jobs-dws.
    SL207 warning: A SPOT job saves checkpoints.
        Fix: set base_output_directory, or pass the trainer a checkpoint directory
        Source: training/use-spot-vms.
    SL209 warning: Workers without parameter servers restart together.
        Fix: set restart_job_on_worker_restart without disable_retries, and resume from checkpoints
        Source: Scheduling.
    """
    timeout = literal_string(job.scheduling.get("timeout"))
    duration = duration_seconds(timeout)
    if duration == 0:
        yield "SL201", f"timeout is {timeout!r}"
    elif job.strategy == "FLEX_START" and (duration or 0) > 604_800:
        yield "SL201", f"the job is FLEX_START, and its timeout is {timeout}"
    has_place = not is_surely_missing(job.spec, "base_output_directory") or _has_place(job)
    if job.strategy == "SPOT" and not has_place:
        yield "SL207", "SPOT replicas can be preempted, and the job has no directory for checkpoints"
    alone = is_surely_missing(job.spec, "scheduling", "restart_job_on_worker_restart")
    if job.pool(1) and not job.has_parameter_servers and alone:
        yield "SL209", "the job has workers, no parameter servers, and restart_job_on_worker_restart is off"
    elif job.scheduling.get("disable_retries") and not alone:
        yield "SL209", "disable_retries switches restart_job_on_worker_restart off"


def _has_place(job: Job) -> bool:
    """Whether the trainer gets output artifacts, or an argument with "checkpoint" in it."""
    arguments = " ".join(part for pool in job.pools for part in pool.argv)
    outputs = mapping_at(job.task.component, "outputDefinitions", "artifacts")
    return bool(outputs and "--executor_input" in arguments) or "checkpoint" in arguments.lower()


@rules(Job)
def connections(job: Job) -> Found:
    """What the API refuses when the training task asks for its job, after the tasks before it.

    SL202 error: A job's machines, labels and TensorBoard are as the API takes them.
        Fix: use machines that are all alike with FLEX_START, labels of at most 63 lower-case letters, digits,
            _ and -, and a service_account with a tensorboard
        Source: Scheduling.Strategy; SDK, CustomJob.run.
    SL214 warning: A job with TensorBoard has a base_output_directory for its logs.
        Fix: set base_output_directory; the trainer writes its logs below it
        Source: CustomJobSpec.
    """
    spec = job.spec
    kinds = {str(sorted(pool.machine.items())) for pool in job.pools if pool.machine_type}
    if job.strategy == "FLEX_START" and len(kinds) > 1:
        yield "SL202", f"the job is FLEX_START, and its pools have {len(kinds)} kinds of machine"
    if wrong := wrong_label(mapping_at(job.content, "labels")):
        yield "SL202", f"a label is {wrong!r}"
    if spec.get("tensorboard") and is_surely_missing(spec, "service_account"):
        yield "SL202", "the job has a tensorboard and no service_account"
    if spec.get("tensorboard") and is_surely_missing(spec, "base_output_directory", "output_uri_prefix"):
        yield "SL214", "the job has a tensorboard and no base_output_directory"


@rules(Pipeline, Job)
def regions(part: Pipeline | Job) -> Found:
    """Resources of a run.

    SL217 error: What a run uses is in its region.
        Fix: use keys, TensorBoard, endpoint, model and reservations of the region in which it runs
        Source: EncryptionSpec.
    """
    if isinstance(part, Pipeline):
        executors = mapping_at(part.spec, "deploymentSpec", "executors")
        uris = strings([mapping_at(item, "importer", "artifactUri") for item in executors.values()])
        pipeline, used = part, [*part.environment.values(), *(uri.rpartition("/v1/")[2] for uri in uris)]
    else:
        pipeline, machines = part.task.pipeline, [pool.machine for pool in part.pools]
        held = {**part.spec, "worker_pool_specs": machines}
        used = [*strings(mapping_at(part.content, "encryption_spec")), *strings(held)]
    place, region = "the run", pipeline.location
    for text in map(literal_string, used):
        found = other_region(text, region) if text.startswith("projects/") else ""
        if region and found:
            yield "SL217", f"{text} is in {found}, and {place} in {region}"
        elif found:
            place, region = text, found


#: Parameters of GCPC's CustomTrainingJobOp (2.22).
_JOB = (
    "base_output_directory display_name enable_web_access encryption_spec_key_name labels location "
    "max_wait_duration network persistent_resource_id project psc_interface_config reserved_ip_ranges "
    "restart_job_on_worker_restart service_account strategy tensorboard timeout worker_pool_specs"
)
JOB_PARAMETERS = frozenset(_JOB.split())
_BREAKING = {'"': "a double quote", "\\": "a backslash"}


@rules(Job)
def payload(job: Job) -> Found:
    """Payload of a custom job. The platform inserts a text between the quotes of the JSON unescaped.

    SL301 error: The payload, with the parameters filled in, is JSON that the launcher's client takes.
        Fix: write fields as in CustomJobSpec (container_spec), and texts without double quotes and
            backslashes; a parameter inside an object becomes text, so let a component put a whole list of
            worker pools out
        Source: GCPC, job_remote_runner.py.
    SL305 error: A component's parameter has none of the custom job's names.
        Fix: rename the component's parameter
        Source: GCPC, custom_job/utils.py.
    """
    broken = list(_breaking_texts(job))
    if job.fault and not broken:
        yield "SL301", f"the payload is not JSON: {job.fault}"
    for why in broken:
        yield "SL301", why
    for why in refusals(job.content):
        yield "SL301", why
    parts = job.pools[0].argv if job.pools else []
    if "--function_to_execute" in parts[:-1]:
        function = parts[parts.index("--function_to_execute") + 1]
        source = next((part for part in parts if f"def {function}(" in part), "")
        signature = re.split(r"\)\s*(?:->|:)", source.partition(f"def {function}(")[2])[0]
        names = re.findall(r"(?m)(?:^|,)\s*(\w+)\s*:", signature)
        if clashes := sorted({*names} & JOB_PARAMETERS):
            yield "SL305", f"the component's parameter {', '.join(clashes)} overrides the job's own"


def _breaking_texts(job: Job) -> Iterator[str]:
    for name in sorted({match[1] for match in PARAMETER.finditer(job.template) if not match[2]}):
        value = job.task.value(name)
        # A list or a mapping goes in as JSON, which escapes its texts.
        if not isinstance(value, str) or f"\"{{{{$.inputs.parameters['{name}']}}}}\"" not in job.template:
            continue
        found = [word for character, word in _BREAKING.items() if character in value]
        if found:
            yield f"{name} has {' and '.join(found)}: {value[:60]!r}"
