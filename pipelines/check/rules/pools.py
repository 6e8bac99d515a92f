"""Rules about worker pools: how many, in which place, and with what in them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardline.components.vertex.payload import at, known_text, lacks, list_at, whole
from shardline.pipelines.check.job import Job, Pool
from shardline.pipelines.check.registry import error, warning

ROLES = ("chief", "workers", "parameter servers or Reduction Server", "evaluators")

#: Arguments and parameters by which trainers are told their tf.distribute strategy.
_STRATEGY_NAMES = ("strategy", "distribution_strategy", "distribute_strategy", "training_strategy")


@error("SL101", Job, fix="set replica_count to 1 and put further replicas into the second pool")
def first_pool_is_one_chief(job: Job) -> Iterator[str]:
    """Pool 0 has exactly one replica.

    Source: docs.cloud.google.com, training/distributed-training: the primary replica.
    """
    chief = job.pool(0)
    if chief and chief.replica_count not in (1, None):
        yield f"worker pool 0 has replica_count {chief.replica_count}"
    elif job.pools and not chief:
        yield "worker pool 0 is empty"


@error("SL102", Job, fix="use at most four pools: " + ", ".join(ROLES))
def pools_are_four_at_most(job: Job) -> Iterator[str]:
    """A job has at most four worker pools.

    Source: docs.cloud.google.com, training/distributed-training, the table of task roles.
    """
    count = len(list_at(job.spec, "worker_pool_specs"))
    if count > len(ROLES):
        yield f"the job has {count} worker pools"


@error("SL103", Job, fix='keep the slot with {"replica_count": "0"}, as a text, or fill it')
def empty_pool_shifts_no_role(job: Job) -> Iterator[str]:
    """No pool comes after an empty one.

    The launcher drops empty pools, so that each later pool moves up and gets another role.

    Source: recursive_remove_empty in google_cloud_pipeline_components,
    container/v1/gcp_launcher/utils/json_util.py.
    """
    written = job.written_pools
    for index, pool in enumerate(written):
        if not pool and any(written[index + 1 :]):
            after = next(later for later in range(index + 1, len(written)) if written[later])
            yield f"pool {index} is empty: pool {after} ({_role(after)}) becomes {index} ({_role(index)})"
            return


@error("SL104", Job, fix="give worker_pool_specs with one pool at least")
def job_has_a_pool(job: Job) -> Iterator[str]:
    """A job has a worker pool.

    Source: google.cloud.aiplatform_v1.types.CustomJobSpec: worker_pool_specs is required.
    """
    if not job.fault and not job.pools and "{{$" not in str(job.spec.get("worker_pool_specs", "")):
        yield "no worker pool is left after the launcher has dropped the empty ones"


@error("SL105", Pool, fix="give the pool a container_spec, or a python_package_spec, and not both")
def pool_runs_one_thing(pool: Pool) -> Iterator[str]:
    """A pool runs either a container or a Python package.

    Source: google.cloud.aiplatform_v1.types.WorkerPoolSpec: a oneof.
    """
    found = [key for key in ("container_spec", "python_package_spec") if not lacks(pool.spec, key)]
    if len(found) != 1 and not isinstance(pool.spec, str):
        yield f"the pool has {' and '.join(found) or 'neither container_spec nor python_package_spec'}"


@error("SL106", Pool, fix="give a whole number of replicas, 1 or more; leave the pool out for none")
def replicas_are_counted(pool: Pool) -> Iterator[str]:
    """replica_count is a whole number.

    A count of zero is dropped by the launcher, and the rest of the pool stays.

    Source: google.cloud.aiplatform_v1.types.WorkerPoolSpec; recursive_remove_empty of the launcher.
    """
    written = at(pool.spec).get("replica_count")
    if written is None:
        if _was_zero(pool):
            yield "replica_count is 0: the launcher drops the number and keeps the pool"
    elif "{{$" not in str(written) and (whole(written) is None or (pool.replica_count or 0) < 1):
        yield f"replica_count is {written!r}"


@error("SL107", Job, fix="train with the parameter_server strategy, or leave the pool empty")
def parameter_servers_are_used(job: Job) -> Iterator[str]:
    """Parameter servers belong to the parameter-server strategy.

    Source: tensorflow.org, tf.distribute.ParameterServerStrategy: no other strategy uses "ps" tasks.
    """
    strategy = _training_strategy(job)
    if strategy and strategy not in ("parameter_server", "auto") and job.has_parameter_servers:
        yield f"worker pool 2 holds parameter servers, and the strategy is {strategy}"


@error("SL108", Job, fix="put the parameter servers into worker pool 2")
def parameter_server_strategy_has_servers(job: Job) -> Iterator[str]:
    """The parameter-server strategy has parameter servers.

    Source: tensorflow.org, tf.distribute.ParameterServerStrategy: variables live on "ps" tasks.
    """
    if _training_strategy(job) == "parameter_server" and not job.has_parameter_servers:
        yield "the strategy is parameter_server, and worker pool 2 holds no parameter servers"


@error("SL109", Job, fix="put the Reduction Server into worker pool 2, after chief and workers")
def reduction_server_is_third(job: Job) -> Iterator[str]:
    """Reduction Server is worker pool 2.

    Source: docs.cloud.google.com, training/distributed-training, "Reduction Server".
    """
    for pool in job.pools:
        if pool.is_reduction_server and pool.index != 2:
            yield f"Reduction Server is worker pool {pool.index} ({_role(pool.index)})"


@warning("SL110", Job, fix="give chief and workers GPUs, or leave the Reduction Server out")
def reduction_server_has_gpus(job: Job) -> Iterator[str]:
    """Reduction Server serves workers with GPUs.

    Source: docs.cloud.google.com, training/distributed-training, "Prerequisites": "You are performing
    distributed training with GPU workers".
    """
    workers = [pool for pool in job.pools if pool.index < 2]
    if any(pool.is_reduction_server for pool in job.pools) and all(
        lacks(pool.spec, "machine_spec", "accelerator_type") for pool in workers
    ):
        yield "there is a Reduction Server, and neither chief nor workers have GPUs"


@warning("SL124", Pool, fix="leave the accelerators out: n1-highcpu-16 is what is recommended")
def reduction_server_has_no_gpus(pool: Pool) -> Iterator[str]:
    """A Reduction Server's own machines have no GPUs.

    Source: docs.cloud.google.com, training/distributed-training: "You do not use GPUs for the Reduction
    Server nodes".
    """
    if pool.is_reduction_server and pool.accelerator_type:
        yield f"the Reduction Server's machines have {pool.accelerator_type}"


@warning("SL125", Job, fix="set replica_count of the evaluators' pool to 1")
def evaluator_is_one(job: Job) -> Iterator[str]:
    """A TensorFlow job has one evaluator at most.

    Source: docs.cloud.google.com, training/distributed-training: "TensorFlow generally expects that you use
    no more than one evaluator".
    """
    evaluators = job.pool(3)
    if evaluators and (evaluators.replica_count or 1) > 1:
        yield f"worker pool 3 has {evaluators.replica_count} evaluators"


@error("SL130", Job, fix="set network (or psc_interface_config) so that the replicas reach the NFS server")
def nfs_has_a_network(job: Job) -> Iterator[str]:
    """NFS mounts have a network to reach the server by.

    Source: docs.cloud.google.com, training/train-nfs-share: set up Private Service Connect or VPC peering.
    """
    mounted = [str(pool.index) for pool in job.pools if list_at(pool.spec, "nfs_mounts")]
    if mounted and lacks(job.spec, "network") and lacks(job.spec, "psc_interface_config"):
        yield f"worker pool {', '.join(mounted)} mounts NFS, and the job has no network"


@error("SL131", Pool, fix="give server, path and mount_point of every mount")
def nfs_mount_is_complete(pool: Pool) -> Iterator[str]:
    """An NFS mount names server, path and mount point.

    Source: google.cloud.aiplatform_v1.types.NfsMount: all three are required.
    """
    for mount in list_at(pool.spec, "nfs_mounts"):
        missing = [key for key in ("server", "path", "mount_point") if not at(mount).get(key)]
        if missing:
            yield f"an NFS mount has no {', '.join(missing)}"


def _role(index: int) -> str:
    return ROLES[index] if index < len(ROLES) else "no role"


def _was_zero(pool: Pool) -> bool:
    kept = [written for written in pool.job.written_pools if written]
    return pool.index < len(kept) and at(kept[pool.index]).get("replica_count") == 0


def _training_strategy(job: Job) -> str:
    """Returns the tf.distribute strategy that the trainer is told; "" when it is not said or not known.

    The job's own parameter `strategy` is how machines are provisioned, not how training is distributed.
    """
    for name in _STRATEGY_NAMES[1:]:
        if name in job.task.declared("parameters"):
            return known_text(job.task.value(name))
    for pool in job.pools[:1]:
        for argument, following in zip(pool.argv, [*pool.argv[1:], ""], strict=False):
            option = re.fullmatch(r"--([\w-]+)(?:=(.*))?", argument, re.DOTALL)
            if option and option[1].replace("-", "_") in _STRATEGY_NAMES:
                return known_text(option[2] if option[2] is not None else following)
    return ""
