"""Rules about worker pools: how many, in which place, and with what in them."""

from __future__ import annotations

import re
from itertools import pairwise

from shardline.components.vertex.payload import at, known_text, lacks, list_at, whole
from shardline.pipelines.check.job import Job, Pool
from shardline.pipelines.check.registry import Found, rules

ROLES = ("chief", "workers", "parameter servers or Reduction Server", "evaluators")

#: Arguments and parameters by which trainers are told their tf.distribute strategy.
_STRATEGY_NAMES = ("strategy", "distribution_strategy", "distribute_strategy", "training_strategy")


@rules(Job)
def slots(job: Job) -> Found:
    """Slots of worker pools.

    The launcher drops empty pools, so that each later pool moves up and gets another role.

    SL101 error: Pool 0 has exactly one replica.
        Fix: set replica_count to 1 and put further replicas into the second pool
        Source: docs.cloud.google.com, training/distributed-training: the primary replica.
    SL102 error: A job has at most four worker pools.
        Fix: use at most four pools: chief, workers, parameter servers or Reduction Server, evaluators
        Source: docs.cloud.google.com, training/distributed-training, the table of task roles.
    SL103 error: No pool comes after an empty one.
        Fix: keep the slot with {"replica_count": "0"}, as a text, or fill it
        Source: recursive_remove_empty in google_cloud_pipeline_components,
            container/v1/gcp_launcher/utils/json_util.py.
    SL104 error: A job has a worker pool.
        Fix: give worker_pool_specs with one pool at least
        Source: google.cloud.aiplatform_v1.types.CustomJobSpec: worker_pool_specs is required.
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
        yield "SL104", "no worker pool is left after the launcher has dropped the empty ones"


@rules(Pool)
def contents(pool: Pool) -> Found:
    """Contents of a worker pool. The launcher drops a count of zero, and the rest of the pool stays.

    SL105 error: A pool runs either a container or a Python package.
        Fix: give the pool a container_spec, or a python_package_spec, and not both
        Source: google.cloud.aiplatform_v1.types.WorkerPoolSpec: a oneof.
    SL106 error: replica_count is a whole number.
        Fix: give a whole number of replicas, 1 or more; leave the pool out for none
        Source: google.cloud.aiplatform_v1.types.WorkerPoolSpec; recursive_remove_empty of the launcher.
    SL124 warning: A Reduction Server's own machines have no GPUs.
        Fix: leave the accelerators out: n1-highcpu-16 is what is recommended
        Source: docs.cloud.google.com, training/distributed-training: "You do not use GPUs for the Reduction
            Server nodes".
    SL131 error: An NFS mount names server, path and mount point.
        Fix: give server, path and mount_point of every mount
        Source: google.cloud.aiplatform_v1.types.NfsMount: all three are required.
    """
    found = [key for key in ("container_spec", "python_package_spec") if not lacks(pool.spec, key)]
    if len(found) != 1 and not isinstance(pool.spec, str):
        what = " and ".join(found) or "neither container_spec nor python_package_spec"
        yield "SL105", f"the pool has {what}"
    written = at(pool.spec).get("replica_count")
    if written is None:
        if _was_zero(pool):
            yield "SL106", "replica_count is 0: the launcher drops the number and keeps the pool"
    elif "{{$" not in str(written) and (whole(written) is None or pool.replicas < 1):
        yield "SL106", f"replica_count is {written!r}"
    if pool.is_reduction_server and pool.accelerator_type:
        yield "SL124", f"the Reduction Server's machines have {pool.accelerator_type}"
    for mount in list_at(pool.spec, "nfs_mounts"):
        missing = [key for key in ("server", "path", "mount_point") if not at(mount).get(key)]
        if missing:
            yield "SL131", f"an NFS mount has no {', '.join(missing)}"


@rules(Job)
def roles(job: Job) -> Found:
    """Roles of worker pools: parameter servers, Reduction Server, evaluators; and NFS.

    SL107 error: Parameter servers belong to the parameter-server strategy.
        Fix: train with the parameter_server strategy, or leave the pool empty
        Source: tensorflow.org, tf.distribute.ParameterServerStrategy: no other strategy uses "ps" tasks.
    SL108 error: The parameter-server strategy has parameter servers.
        Fix: put the parameter servers into worker pool 2
        Source: tensorflow.org, tf.distribute.ParameterServerStrategy: variables live on "ps" tasks.
    SL109 error: Reduction Server is worker pool 2.
        Fix: put the Reduction Server into worker pool 2, after chief and workers
        Source: docs.cloud.google.com, training/distributed-training, "Reduction Server".
    SL110 warning: Reduction Server serves workers with GPUs.
        Fix: give chief and workers GPUs, or leave the Reduction Server out
        Source: docs.cloud.google.com, training/distributed-training, "Prerequisites": "You are performing
            distributed training with GPU workers".
    SL125 warning: A TensorFlow job has one evaluator at most.
        Fix: set replica_count of the evaluators' pool to 1
        Source: docs.cloud.google.com, training/distributed-training: "TensorFlow generally expects that you
            use no more than one evaluator".
    SL130 error: NFS mounts have a network to reach the server by.
        Fix: set network (or psc_interface_config) so that the replicas reach the NFS server
        Source: docs.cloud.google.com, training/train-nfs-share: set up Private Service Connect or VPC
            peering.
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
    if servers and all(lacks(pool.spec, "machine_spec", "accelerator_type") for pool in workers):
        yield "SL110", "there is a Reduction Server, and neither chief nor workers have GPUs"
    evaluators = job.pool(3)
    if evaluators and evaluators.replicas > 1:
        yield "SL125", f"worker pool 3 has {evaluators.replica_count} evaluators"
    mounted = [str(pool.index) for pool in job.pools if list_at(pool.spec, "nfs_mounts")]
    if mounted and lacks(job.spec, "network") and lacks(job.spec, "psc_interface_config"):
        yield "SL130", f"worker pool {', '.join(mounted)} mounts NFS, and the job has no network"


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
        for argument, following in pairwise([*pool.argv, ""]):
            option = re.fullmatch(r"--([\w-]+)(?:=(.*))?", argument, re.DOTALL)
            if option and option[1].replace("-", "_") in _STRATEGY_NAMES:
                return known_text(option[2] if option[2] is not None else following)
    return ""
