"""Rules about custom jobs: worker pools, provisioning, restarts, labels, access."""

from __future__ import annotations

import re
from itertools import pairwise

from shardline.components.vertex import forms
from shardline.components.vertex.forms import DURATION, LABEL_KEY, LABEL_VALUE, MAX_LABELS, seconds
from shardline.components.vertex.job import SEVEN_DAYS_S, STRATEGIES
from shardline.components.vertex.payload import (
    is_surely_missing,
    list_at,
    literal_string,
    mapping_at,
    whole_number,
)
from shardline.pipelines.check.job import Job, Pool
from shardline.pipelines.check.pipeline import Pipeline
from shardline.pipelines.check.registry import Found, rules

ROLES = ("chief", "workers", "parameter servers or Reduction Server", "evaluators")

#: Arguments and parameters with which trainers take their tf.distribute strategy.
_STRATEGY_NAMES = ("strategy", "distribution_strategy", "distribute_strategy", "training_strategy")


@rules(Job)
def slots(job: Job) -> Found:
    """Slots of worker pools.

    The launcher drops empty pools, which moves each later pool up into another role.

    SL101 error: Worker pool 0 has one replica.
        Fix: set replica_count to 1, and put more replicas into worker pool 1
        Source: training/distributed-training.
    SL102 error: A job has at most four worker pools.
        Fix: use at most four: chief, workers, parameter servers or Reduction Server, evaluators
        Source: training/distributed-training.
    SL103 error: No worker pool follows an empty one.
        Fix: keep the slot with {"replica_count": "0"}, a string, or fill it
        Source: GCPC, json_util.py.
    SL104 error: A job has a worker pool.
        Fix: set worker_pool_specs, with at least one pool
        Source: CustomJobSpec.
    """
    chief = job.pool(0)
    if chief and chief.replica_count not in (1, None):
        yield "SL101", f"worker pool 0 has replica_count {chief.replica_count}"
    elif job.pools and not chief:
        yield "SL101", "worker pool 0 is empty"
    count = len(list_at(job.spec, "worker_pool_specs"))
    if count > len(ROLES):
        yield "SL102", f"the job has {count} worker pools"
    kept = [index for index, pool in enumerate(job.written_pools) if pool]
    for index, after in enumerate(kept):
        if index != after:
            moved = f"pool {after} ({_role(after)}) becomes {index} ({_role(index)})"
            yield "SL103", f"pool {index} is empty: {moved}"
            break
    if not job.fault and not job.pools and "{{$" not in str(job.spec.get("worker_pool_specs", "")):
        yield "SL104", "no worker pool is left after the launcher drops the empty ones"


@rules(Pool)
def pools(pool: Pool) -> Found:
    """Contents of a worker pool. The launcher drops a count of 0 and keeps the rest of the pool.

    SL105 error: A worker pool runs a container or a Python package.
        Fix: set container_spec or python_package_spec, not both
        Source: WorkerPoolSpec.
    SL106 error: replica_count is a whole number of 1 or more.
        Fix: set 1 or more, or leave out the pool
        Source: WorkerPoolSpec; the launcher drops 0.
    SL124 warning: Reduction Server runs without GPUs.
        Fix: leave out the accelerators; n1-highcpu-16 is recommended
        Source: training/distributed-training.
    SL131 error: An NFS mount has a server, a path and a mount point.
        Fix: set server, path and mount_point of every mount
        Source: NfsMount.
    """
    found = [
        key for key in ("container_spec", "python_package_spec") if not is_surely_missing(pool.spec, key)
    ]
    if len(found) != 1 and not isinstance(pool.spec, str):
        what = " and ".join(found) or "neither container_spec nor python_package_spec"
        yield "SL105", f"the pool has {what}"
    written = mapping_at(pool.spec).get("replica_count")
    if written is None:
        kept = [before for before in pool.job.written_pools if before]
        if pool.index < len(kept) and mapping_at(kept[pool.index]).get("replica_count") == 0:
            yield "SL106", "replica_count is 0: the launcher drops the count and keeps the pool"
    elif "{{$" not in str(written) and (whole_number(written) is None or pool.replicas < 1):
        yield "SL106", f"replica_count is {written!r}"
    if pool.is_reduction_server and pool.accelerator_type:
        yield "SL124", f"the Reduction Server's machines have {pool.accelerator_type}"
    for mount in list_at(pool.spec, "nfs_mounts"):
        missing = [key for key in ("server", "path", "mount_point") if not mapping_at(mount).get(key)]
        if missing:
            yield "SL131", f"an NFS mount has no {', '.join(missing)}"


@rules(Job)
def roles(job: Job) -> Found:
    """Roles of worker pools: parameter servers, Reduction Server, evaluators; and NFS.

    SL107 error: Only the parameter_server strategy uses parameter servers.
        Fix: train with the parameter_server strategy, or leave worker pool 2 empty
        Source: tf.distribute.ParameterServerStrategy.
    SL108 error: The parameter_server strategy has parameter servers.
        Fix: put parameter servers into worker pool 2
        Source: tf.distribute.ParameterServerStrategy.
    SL109 error: Reduction Server is worker pool 2.
        Fix: put Reduction Server into worker pool 2
        Source: training/distributed-training.
    SL110 warning: Reduction Server serves GPU workers.
        Fix: give chief and workers GPUs, or leave out Reduction Server
        Source: training/distributed-training.
    SL125 warning: A job has at most one evaluator.
        Fix: set replica_count of worker pool 3 to 1
        Source: training/distributed-training.
    SL130 error: A job with NFS mounts has a network.
        Fix: set network or psc_interface_config to reach the NFS server
        Source: training/train-nfs-share.
    """
    strategy = _training_strategy(job)
    if strategy and strategy not in ("parameter_server", "auto") and job.has_parameter_servers:
        yield "SL107", f"worker pool 2 holds parameter servers, and the strategy is {strategy}"
    if strategy == "parameter_server" and not job.has_parameter_servers:
        yield "SL108", "the strategy is parameter_server, and worker pool 2 holds no parameter servers"
    servers = [pool for pool in job.pools if pool.is_reduction_server]
    for pool in servers:
        if pool.index != 2:
            yield "SL109", f"Reduction Server is worker pool {pool.index} ({_role(pool.index)})"
    workers = [pool for pool in job.pools if pool.index < 2]
    if servers and all(is_surely_missing(pool.spec, "machine_spec", "accelerator_type") for pool in workers):
        yield "SL110", "there is a Reduction Server, and neither chief nor workers have GPUs"
    evaluators = job.pool(3)
    if evaluators and evaluators.replicas > 1:
        yield "SL125", f"worker pool 3 has {evaluators.replica_count} evaluators"
    mounted = [str(pool.index) for pool in job.pools if list_at(pool.spec, "nfs_mounts")]
    if mounted and all(is_surely_missing(job.spec, key) for key in ("network", "psc_interface_config")):
        yield "SL130", f"worker pool {', '.join(mounted)} mounts NFS, and the job has no network"


def _role(index: int) -> str:
    return ROLES[index] if index < len(ROLES) else "no role"


def _training_strategy(job: Job) -> str:
    """Returns the tf.distribute strategy that the trainer gets; "" when it is not set or not known.

    The job's own parameter `strategy` says how machines are provisioned, not how training is distributed.
    """
    for name in _STRATEGY_NAMES[1:]:
        if name in job.task.declared("parameters"):
            return literal_string(job.task.value(name))
    for pool in job.pools[:1]:
        for argument, following in pairwise([*pool.argv, ""]):
            option = re.fullmatch(r"--([\w-]+)(?:=(.*))?", argument, re.DOTALL)
            if option and option[1].replace("-", "_") in _STRATEGY_NAMES:
                return literal_string(option[2] if option[2] is not None else following)
    return ""


_DEPRECATED = ("ON_DEMAND", "LOW_COST")
_FLEX_START_GPUS = ("L4", "A100", "H100", "H200", "B200")


@rules(Job)
def scheduling(job: Job) -> Found:
    """Scheduling and restarts of a custom job.

    All-reduce cannot continue without a peer: a worker that restarts alone finds no other worker.

    SL201 error: A duration is in seconds and ends in "s".
        Fix: write seconds and an s, as in "86400s"
        Source: GCPC, CustomTrainingJobOp.
    SL202 error: The scheduling strategy is STANDARD, SPOT or FLEX_START.
        Fix: use STANDARD, SPOT or FLEX_START
        Source: Scheduling.Strategy.
    SL203 warning: The scheduling strategy is not one of the deprecated ON_DEMAND and LOW_COST.
        Fix: use STANDARD instead of ON_DEMAND, SPOT instead of LOW_COST
        Source: Scheduling.Strategy.
    SL209 warning: Workers without parameter servers restart together.
        Fix: set restart_job_on_worker_restart, and resume from checkpoints
        Source: Scheduling.
    SL210 warning: disable_retries and restart_job_on_worker_restart are not both set.
        Fix: leave out one of the two
        Source: Scheduling.
    """
    for name in ("timeout", "max_wait_duration"):
        found = literal_string(job.scheduling.get(name))
        if found and not DURATION.fits(found):
            yield "SL201", f"{name} is {found!r}"
    if job.strategy and job.strategy not in (*STRATEGIES, *_DEPRECATED, "STRATEGY_UNSPECIFIED"):
        yield "SL202", f"strategy is {job.strategy!r}"
    if job.strategy in _DEPRECATED:
        yield "SL203", f"strategy {job.strategy} is deprecated"
    alone = is_surely_missing(job.spec, "scheduling", "restart_job_on_worker_restart")
    if job.pool(1) and not job.has_parameter_servers and alone:
        yield "SL209", "the job has workers, no parameter servers, and restart_job_on_worker_restart is off"
    if job.scheduling.get("disable_retries") and job.scheduling.get("restart_job_on_worker_restart"):
        yield "SL210", "disable_retries switches restart_job_on_worker_restart off"


@rules(Job)
def strategies(job: Job) -> Found:
    """Strategies FLEX_START and SPOT, and what they need.

    SL204 error: A FLEX_START job has one kind of machine.
        Fix: give all worker pools the same machine type and accelerators, or use SPOT or STANDARD
        Source: training/schedule-jobs-dws.
    SL205 error: A FLEX_START job has L4, A100, H100, H200 or B200 GPUs.
        Fix: use L4, A100, H100, H200 or B200 GPUs, or another strategy
        Source: training/schedule-jobs-dws.
    SL206 error: A FLEX_START job has a timeout of at most 7 days.
        Fix: set a timeout of at most "604800s"
        Source: training/schedule-jobs-dws.
    SL207 warning: A SPOT job saves checkpoints.
        Fix: set base_output_directory, or pass the trainer a checkpoint directory
        Source: training/use-spot-vms.
    """
    has_place = not is_surely_missing(job.spec, "base_output_directory") or _has_place(job)
    if job.strategy == "SPOT" and not has_place:
        yield "SL207", "SPOT replicas can be preempted, and the job has no directory for checkpoints"
    if job.strategy != "FLEX_START":
        return
    kinds = {
        (pool.machine_type, pool.accelerator_type, str(pool.machine.get("accelerator_count")))
        for pool in job.pools
    }
    if len(kinds) > 1:
        listing = ", ".join(f"{pool.index}: {pool.machine_type}" for pool in job.pools)
        yield (
            "SL204",
            f"the strategy is FLEX_START, and the pools have {len(kinds)} kinds of machine: {listing}",
        )
    timeout = literal_string(job.scheduling.get("timeout"))
    if (seconds(timeout) or 0) > SEVEN_DAYS_S:
        yield "SL206", f"the strategy is FLEX_START, and the timeout is {timeout}"
    for pool in job.pools:
        written = str(pool.machine.get("accelerator_type", ""))
        supported = "{{$" in written or set(_FLEX_START_GPUS) & set(pool.accelerator_type.split("_"))
        if not supported:
            yield (
                "SL205",
                f"the job is FLEX_START; worker pool {pool.index} has {pool.accelerator_type or 'no GPUs'}",
            )


def _has_place(job: Job) -> bool:
    """Whether the trainer gets output artifacts, or an argument with "checkpoint" in it."""
    arguments = " ".join(part for pool in job.pools for part in pool.argv)
    outputs = mapping_at(job.task.component, "outputDefinitions", "artifacts")
    return bool(outputs and "--executor_input" in arguments) or "checkpoint" in arguments.lower()


@rules(Job)
def connections(job: Job) -> Found:
    """Accounts, networks and paths of a custom job.

    SL211 error: A job with TensorBoard has a service account.
        Fix: set service_account; {{$.pipeline_service_account}} is the pipeline's
        Source: SDK, CustomJob.run.
    SL212 error: A job uses a peered network or Private Service Connect.
        Fix: leave out network or psc_interface_config
        Source: training/psc-i-egress; general/vpc-peering.
    SL213 warning: A job on a persistent resource has a service account.
        Fix: set service_account; {{$.pipeline_service_account}} is the pipeline's
        Source: ServiceAccountSpec.
    SL214 warning: A job with TensorBoard has a base_output_directory for its logs.
        Fix: set base_output_directory; the trainer writes its logs below it
        Source: CustomJobSpec.
    SL220 warning: Reserved IP ranges belong to a network.
        Fix: set network, or leave out reserved_ip_ranges
        Source: CustomJobSpec.
    SL215 error: A TensorBoard is named projects/PROJECT/locations/LOCATION/tensorboards/ID.
        Fix: write projects/PROJECT/locations/LOCATION/tensorboards/ID
        Source: CustomJobSpec.
    SL216 error: A network is named projects/PROJECT_NUMBER/global/networks/NAME.
        Fix: write projects/PROJECT_NUMBER/global/networks/NAME
        Source: CustomJobSpec.
    SL217 error: An encryption key is named projects/PROJECT/locations/LOCATION/keyRings/RING/cryptoKeys/KEY.
        Fix: write projects/PROJECT/locations/LOCATION/keyRings/RING/cryptoKeys/KEY
        Source: EncryptionSpec.
    SL218 error: A service account is an email address.
        Fix: write NAME@PROJECT.iam.gserviceaccount.com
        Source: training/custom-service-account.
    SL219 error: base_output_directory is in Cloud Storage.
        Fix: write gs://BUCKET/PATH
        Source: GcsDestination.
    """
    spec = job.spec
    if spec.get("tensorboard") and is_surely_missing(spec, "service_account"):
        yield "SL211", "the job has a tensorboard and no service_account"
    if literal_string(spec.get("network")) and spec.get("psc_interface_config"):
        yield "SL212", "the job has both network and psc_interface_config"
    if literal_string(spec.get("persistent_resource_id")) and is_surely_missing(spec, "service_account"):
        yield "SL213", "the job runs on a persistent resource and has no service_account"
    if spec.get("tensorboard") and is_surely_missing(spec, "base_output_directory", "output_uri_prefix"):
        yield "SL214", "the job has a tensorboard and no base_output_directory"
    if spec.get("reserved_ip_ranges") and is_surely_missing(spec, "network"):
        yield "SL220", "the job has reserved_ip_ranges and no network"
    key = mapping_at(job.content, "encryption_spec").get("kms_key_name")
    for code, form, name, value in (
        ("SL215", forms.TENSORBOARD, "tensorboard", spec.get("tensorboard")),
        ("SL216", forms.NETWORK, "network", spec.get("network")),
        ("SL217", forms.ENCRYPTION_KEY, "kms_key_name", key),
        ("SL218", forms.SERVICE_ACCOUNT, "service_account", spec.get("service_account")),
        ("SL219", forms.BUCKET_PATH, "base_output_directory", job.base_output_directory),
    ):
        if (text := literal_string(value)) and not form.fits(text):
            yield code, f"{name} is {text!r}"


@rules(Job, Pipeline)
def labels(part: Job | Pipeline) -> Found:
    """Labels of custom jobs and of runs.

    SL801 error: A label of a custom job has at most 63 lower-case letters, digits, _ and -.
        Fix: use at most 63 lower-case letters, digits, _ and -
        Source: CustomJob.
    SL802 error: A label of a run has at most 63 lower-case letters, digits, _ and -.
        Fix: use at most 63 lower-case letters, digits, _ and -
        Source: PipelineJob.
    """
    if isinstance(part, Job):
        code, found = "SL801", mapping_at(part.content, "labels")
    else:
        code, found = "SL802", dict(part.labels or {})
    if len(found) > MAX_LABELS:
        yield code, f"there are {len(found)} labels, at most {MAX_LABELS} are allowed"
    for key, value in found.items():
        if "{{$" in f"{key}{value}":
            continue
        if not isinstance(value, str):
            yield code, f"the label {key} is {value!r}, not a string"
        elif key != key.lower() or not LABEL_KEY.fits(key):
            yield code, f"the label key {key[:80]!r} is not allowed"
        elif value != value.lower() or not LABEL_VALUE.fits(value):
            yield code, f"the value {value[:80]!r} of the label {key} is not allowed"
