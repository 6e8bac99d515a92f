"""The environment that the platform gives to each replica of a custom job; pure functions.

The shapes are those of https://cloud.google.com/vertex-ai/docs/training/distributed-training and
https://cloud.google.com/vertex-ai/docs/training/code-requirements#environment-variables.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from shardline.pipelines.local.job import ROLES, CustomJob

#: Variables that belong to one replica and must not be inherited from the shell.
PLATFORM_VARIABLES = (
    "TF_CONFIG",
    "CLUSTER_SPEC",
    "AIP_MODEL_DIR",
    "AIP_CHECKPOINT_DIR",
    "AIP_TENSORBOARD_LOG_DIR",
    "CLOUD_ML_PROJECT_ID",
    "CLOUD_ML_JOB_ID",
    "CLOUD_ML_TRIAL_ID",
    "CLOUD_ML_HP_METRIC_FILE",
)
LOCAL_PROJECT = "local-project"


@dataclass(frozen=True)
class ReplicaId:
    """The place of one replica in its job.

    Attributes:
        pool: Index of its worker pool.
        index: Its number within the pool.
    """

    pool: int
    index: int

    @property
    def role(self) -> str:
        """What the replica is for: chief, worker, ps or evaluator."""
        return ROLES[self.pool]

    @property
    def name(self) -> str:
        """Role and number, as in "worker-0"."""
        return f"{self.role}-{self.index}"


def replicas(job: CustomJob) -> tuple[ReplicaId, ...]:
    """Returns all replicas of the job in the order of its pools, the chief first."""
    return tuple(
        ReplicaId(pool, index)
        for pool, spec in enumerate(job.worker_pools)
        for index in range(spec.replica_count)
    )


def environment(job: CustomJob, replica: ReplicaId, addresses: Sequence[str], job_id: str) -> dict[str, str]:
    """Returns the variables that the platform sets for one replica.

    CLUSTER_SPEC is always there, because KFP's executor decides by it who writes a task's outputs.
    TF_CONFIG is there when the job has more than one replica; it never lists evaluators, not even to
    themselves. The AIP_* directories are there, for all replicas, when the job has a
    base_output_directory.

    Args:
        job: The job.
        replica: One of `replicas(job)`.
        addresses: "host:port" of each of `replicas(job)`, in that order.
        job_id: Identifier of the job.
    """
    members = replicas(job)
    variables = {
        "CLUSTER_SPEC": _cluster_spec(job, members, replica, addresses),
        "CLOUD_ML_PROJECT_ID": LOCAL_PROJECT,
        "CLOUD_ML_JOB_ID": job_id,
    }
    if len(members) > 1:
        variables["TF_CONFIG"] = _tf_config(job, members, replica, addresses)
    if job.trial:
        variables["CLOUD_ML_TRIAL_ID"] = job.trial
    if job.base_output_directory:
        base = job.base_output_directory.rstrip("/")
        variables["AIP_MODEL_DIR"] = f"{base}/model/"
        variables["AIP_CHECKPOINT_DIR"] = f"{base}/checkpoints/"
        variables["AIP_TENSORBOARD_LOG_DIR"] = f"{base}/logs/"
    return variables


def _cluster_spec(
    job: CustomJob, members: Sequence[ReplicaId], replica: ReplicaId, addresses: Sequence[str]
) -> str:
    cluster: dict[str, list[str]] = {}
    for member, address in zip(members, addresses, strict=True):
        cluster.setdefault(f"workerpool{member.pool}", []).append(address)
    task = _task(job, f"workerpool{replica.pool}", replica.index)
    return json.dumps({"cluster": cluster, "environment": "cloud", "task": task, "job": _job(job)})


def _tf_config(
    job: CustomJob, members: Sequence[ReplicaId], replica: ReplicaId, addresses: Sequence[str]
) -> str:
    cluster: dict[str, list[str]] = {}
    for member, address in zip(members, addresses, strict=True):
        if member.role != "evaluator":
            cluster.setdefault(member.role, []).append(address)
    task = _task(job, replica.role, replica.index)
    return json.dumps({"cluster": cluster, "task": task, "environment": "cloud", "job": _job(job)})


def _task(job: CustomJob, kind: str, index: int) -> dict[str, object]:
    return {"type": kind, "index": index, **({"trial": job.trial} if job.trial else {})}


def _job(job: CustomJob) -> dict[str, object]:
    """The job as the platform repeats it to the replicas.

    Commands and arguments are left out: they hold component sources and the executor input, and one
    environment string is limited to 128 KiB.
    """
    return {
        "worker_pool_specs": [
            {
                "machine_spec": dict(pool.machine_spec),
                "replica_count": pool.replica_count,
                "container_spec": {"image_uri": pool.image_uri},
            }
            for pool in job.worker_pools
        ]
    }
