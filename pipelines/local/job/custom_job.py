"""Custom job on this machine: its replicas, and the environment of each as on the platform.

The formats are those of https://cloud.google.com/vertex-ai/docs/training/distributed-training and
https://cloud.google.com/vertex-ai/docs/training/code-requirements#environment-variables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardline.components.custom_job import (
    ROLES,
    JobSpec,
    PoolSpec,
    duration_seconds,
    list_at,
    mapping_at,
    read_payload,
    refusals,
    whole_number,
)
from shardline.trainer.base.errors import PipelineError

#: Replaces `{{$.json_escape[1]}}`, which kfp.local refuses, in a localized pipeline.
EXECUTOR_INPUT_MARKER = "@shardline.executor_input@"

#: Gets the name of a replica and each line of its output.
ShowLine = Callable[[str, str], None]


@dataclass(frozen=True)
class CustomJob:
    """A custom job that can run on this machine.

    Attributes:
        worker_pools: By index: chief, workers, parameter servers, evaluator (see `ROLES`). A pool without
            replicas keeps its slot. Machine and image are only reported: replicas run in the current
            Python environment.
        timeout: Seconds after which the job is stopped, or None for no limit.
        restart_job_on_worker_restart: Whether all replicas restart when one has failed.
        job_restarts: Restarts of all replicas together after failures.
        all_succeed: Whether the job succeeds only when its workers do too; on the platform it succeeds with
            the chief.
        disable_retries: Whether nothing restarts; overrides the other fields.
        base_output_directory: Root of AIP_MODEL_DIR and its siblings; "" for none.
        trial: Id of the trial, for a job of a tuning job; else "".
    """

    worker_pools: tuple[PoolSpec, ...]
    display_name: str = "custom-job"
    timeout: float | None = None
    restart_job_on_worker_restart: bool = False
    job_restarts: int = 1
    all_succeed: bool = False
    disable_retries: bool = False
    base_output_directory: str = ""
    trial: str = ""

    def __post_init__(self) -> None:
        if not 1 <= len(self.worker_pools) <= len(ROLES):
            raise PipelineError(
                f"a custom job has 1 to {len(ROLES)} worker pools, not {len(self.worker_pools)}"
            )
        for pool in self.worker_pools:
            if pool.replicas < 0:
                raise PipelineError(f"a worker pool cannot have {pool.replicas} replicas")
            if pool.replicas and not list_at(pool.container, "command"):
                raise PipelineError(
                    f"a worker pool with image {pool.image!r} has no command, and an image's entry point is "
                    "not known on this machine; state the command in container_spec"
                )
        if self.worker_pools[0].replicas != 1:
            raise PipelineError(
                "the first worker pool is the chief and must have replica_count 1, "
                f"not {self.worker_pools[0].replicas}; put further replicas into the second pool"
            )

    @classmethod
    def with_roles(
        cls, command: Sequence[str], replicas: int, *, ps: int = 0, evaluator: bool = False, **settings: Any
    ) -> CustomJob:
        """Returns a job of a chief and workers, all with the same command.

        Raises PipelineError when no replica trains, or parameter servers have no workers to serve.
        """
        if replicas < 1:
            raise PipelineError(f"a job needs at least 1 replica, not {replicas}")
        if ps > 0 and replicas < 2:
            raise PipelineError(
                f"{ps} parameter servers have no workers to serve: they need a chief and at least one "
                f"worker, so 2 replicas or more, not {replicas}"
            )
        counts = [1, replicas - 1, ps, int(evaluator)]
        while not counts[-1]:
            counts.pop()
        container = {"command": list(command)}
        pools = [{"replica_count": n, "container_spec": container if n else {}} for n in counts]
        return cls(worker_pools=tuple(map(PoolSpec, pools)), **settings)


def read_request(payload: str, kind: str) -> dict[str, Any]:
    """Reads the --payload of a launcher of this kind as it does; PipelineError when it is not JSON."""
    try:
        return dict(read_payload(payload))
    except ValueError as error:
        raise PipelineError(
            f"the payload of {kind} is not JSON ({error}); a double quote or backslash in display_name, "
            "labels or another text of the job breaks it"
        ) from None


def parse_payload(payload: str, executor_input: str) -> CustomJob:
    """Reads the launcher's --payload as the launcher does, and inserts the executor input.

    Raises PipelineError when the payload is not JSON or describes no job that can run here.
    """
    visible = executor_input.replace(EXECUTOR_INPUT_MARKER, "{{$.json_escape[1]}}")
    content = read_request(payload.replace(EXECUTOR_INPUT_MARKER, json.dumps(visible)[1:-1]), "CustomJob")
    if why := next(refusals(content), ""):
        raise PipelineError(f"the launcher's client refuses the custom job's payload: {why}")
    job = JobSpec(content)
    pools = list_at(job.spec, "worker_pool_specs")
    if not pools:
        raise PipelineError("the custom job's payload has no job_spec with worker_pool_specs")
    timeout = job.scheduling.get("timeout")
    return CustomJob(
        worker_pools=tuple(_read_pool(index, pool) for index, pool in enumerate(pools)),
        display_name=content.get("display_name", "custom-job"),
        timeout=None if timeout is None else duration_seconds(timeout),
        restart_job_on_worker_restart=bool(job.scheduling.get("restart_job_on_worker_restart", False)),
        disable_retries=bool(job.scheduling.get("disable_retries", False)),
        base_output_directory=job.base_output_directory,
    )


def _read_pool(index: int, spec: Any) -> PoolSpec:
    # The launcher drops zeros from the payload; the API reads a missing number as zero.
    value = mapping_at(spec).get("replica_count", 0)
    if (count := whole_number(value)) is None:  # the client takes true for 1
        raise PipelineError(f"worker pool {index}: replica_count must be a whole number, not {value!r}")
    pool = PoolSpec({**spec, "replica_count": count})
    # A Reduction Server speeds up nothing on one machine.
    if not count or pool.is_reduction_server:
        return PoolSpec({"replica_count": 0})
    if not mapping_at(spec, "container_spec"):
        raise PipelineError(
            f"worker pool {index} has no container_spec; only containers can run on this machine"
        )
    return pool


LOCAL_PROJECT = "local-project"


@dataclass(frozen=True)
class ReplicaId:
    """Id of one replica in its job: the index of its worker pool, and its index in the pool."""

    pool: int
    index: int

    @property
    def role(self) -> str:
        """Role: chief, worker, ps or evaluator."""
        return ROLES[self.pool]

    @property
    def name(self) -> str:
        """Role and number, as in "worker-0"."""
        return f"{self.role}-{self.index}"


def replicas(job: CustomJob) -> tuple[ReplicaId, ...]:
    """Returns all replicas of the job in the order of its pools, the chief first."""
    return tuple(
        ReplicaId(pool, index) for pool, spec in enumerate(job.worker_pools) for index in range(spec.replicas)
    )


def environment(job: CustomJob, replica: ReplicaId, addresses: Sequence[str], job_id: str) -> dict[str, str]:
    """Returns the variables that the platform sets for one replica.

    CLUSTER_SPEC is always set: by it KFP's executor decides which replica writes a task's outputs. TF_CONFIG
    is set when the job has more than one replica; it never lists evaluators, not even for themselves. The
    AIP_* directories are set for all replicas when the job has a base_output_directory. `addresses` has the
    "host:port" of each of `replicas(job)`, in that order.
    """
    members = replicas(job)
    by_pool: dict[str, list[str]] = {}
    by_role: dict[str, list[str]] = {}
    for member, address in zip(members, addresses, strict=True):
        by_pool.setdefault(f"workerpool{member.pool}", []).append(address)
        if member.role != "evaluator":
            by_role.setdefault(member.role, []).append(address)
    variables = {
        "CLUSTER_SPEC": _cluster_json(job, by_pool, f"workerpool{replica.pool}", replica.index),
        "CLOUD_ML_PROJECT_ID": LOCAL_PROJECT,
        "CLOUD_ML_JOB_ID": job_id,
    }
    if len(members) > 1:
        variables["TF_CONFIG"] = _cluster_json(job, by_role, replica.role, replica.index)
    if job.trial:
        variables["CLOUD_ML_TRIAL_ID"] = job.trial
    if job.base_output_directory:
        base = job.base_output_directory.rstrip("/")
        variables["AIP_MODEL_DIR"] = f"{base}/model/"
        variables["AIP_CHECKPOINT_DIR"] = f"{base}/checkpoints/"
        variables["AIP_TENSORBOARD_LOG_DIR"] = f"{base}/logs/"
    return variables


def _cluster_json(job: CustomJob, cluster: Mapping[str, list[str]], kind: str, index: int) -> str:
    """Returns the JSON of a cluster and one replica's role and index in it, as the platform writes it.

    The platform also repeats the job in it. Commands and arguments are left out: they hold component sources
    and the executor input, and one environment string is limited to 128 KiB.
    """
    pools = [
        {
            "machine_spec": pool.machine,
            "replica_count": pool.replicas,
            "container_spec": {"image_uri": pool.image},
        }
        for pool in job.worker_pools
    ]
    task = {"type": kind, "index": index, **({"trial": job.trial} if job.trial else {})}
    shown = {"worker_pool_specs": pools}
    return json.dumps({"cluster": cluster, "task": task, "environment": "cloud", "job": shown})
