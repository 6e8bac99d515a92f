"""Environment of each replica: TF_CONFIG and CLUSTER_SPEC as the platform sets them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardline.pipelines.local.job.custom_job import CustomJob, ReplicaId, environment, replicas
from shardline.trainer.base.errors import PipelineError
from tests.helpers.jobs import pool


def _job(*counts: int, **settings: Any) -> CustomJob:
    pools = tuple(
        pool("run", replica_count=count, machine_spec={"machine_type": "n1-standard-4"}) for count in counts
    )
    return CustomJob(worker_pools=pools, **settings)


def _environments(job: CustomJob) -> dict[str, dict[str, str]]:
    members = replicas(job)
    addresses = [f"127.0.0.1:{2000 + number}" for number in range(len(members))]
    return {member.name: environment(job, member, addresses, "42") for member in members}


def test_chief_workers_and_parameter_servers() -> None:
    variables = _environments(_job(1, 2, 1))
    assert list(variables) == ["chief-0", "worker-0", "worker-1", "ps-0"]
    config = json.loads(variables["worker-1"]["TF_CONFIG"])
    groups = ["127.0.0.1:2000"], ["127.0.0.1:2001", "127.0.0.1:2002"], ["127.0.0.1:2003"]
    assert config["cluster"] == dict(zip(("chief", "worker", "ps"), groups, strict=True))
    assert config["task"] == {"type": "worker", "index": 1}
    assert config["environment"] == "cloud"
    spec = json.loads(variables["ps-0"]["CLUSTER_SPEC"])
    assert spec["cluster"] == {f"workerpool{index}": group for index, group in enumerate(groups)}
    assert spec["task"] == {"type": "workerpool2", "index": 0}
    assert spec["job"]["worker_pool_specs"][1]["replica_count"] == 2


def test_a_job_of_one_replica_has_no_tf_config() -> None:
    (variables,) = _environments(_job(1)).values()
    assert "TF_CONFIG" not in variables
    assert json.loads(variables["CLUSTER_SPEC"])["task"] == {"type": "workerpool0", "index": 0}
    assert variables["CLOUD_ML_JOB_ID"] == "42"
    assert variables["CLOUD_ML_PROJECT_ID"]


def test_output_directories_are_on_all_replicas() -> None:
    for variables in _environments(_job(1, 1)).values():
        assert not [name for name in variables if name.startswith("AIP_")]
    for variables in _environments(_job(1, 1, base_output_directory="gs://bucket/job/")).values():
        assert variables["AIP_MODEL_DIR"] == "gs://bucket/job/model/"
        assert variables["AIP_CHECKPOINT_DIR"] == "gs://bucket/job/checkpoints/"
        assert variables["AIP_TENSORBOARD_LOG_DIR"] == "gs://bucket/job/logs/"


def test_large_commands_do_not_end_up_in_the_environment() -> None:
    job = CustomJob(worker_pools=(pool("run", "x" * 200_000),))
    variables = environment(job, ReplicaId(0, 0), ["127.0.0.1:1"], "42")
    assert max(map(len, variables.values())) < 10_000  # one environment string is limited to 128 KiB


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((), "1 to 4 worker pools, not 0"),
        ((1, 1, 1, 1, 1), "1 to 4 worker pools, not 5"),
        ((2,), "the chief and must have replica_count 1, not 2"),
        ((0, 1), "the chief and must have replica_count 1, not 0"),
        ((1, -1), "cannot have -1 replicas"),
    ],
)
def test_impossible_pools(counts: tuple[int, ...], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        _job(*counts)


def test_an_empty_slot_keeps_the_roles_behind_it() -> None:
    variables = _environments(_job(1, 2, 0, 1))
    assert list(variables) == ["chief-0", "worker-0", "worker-1", "evaluator-0"]
    config = json.loads(variables["evaluator-0"]["TF_CONFIG"])
    assert config["task"] == {"type": "evaluator", "index": 0}
    assert list(config["cluster"]) == ["chief", "worker"]
    spec = json.loads(variables["evaluator-0"]["CLUSTER_SPEC"])
    assert spec["task"] == {"type": "workerpool3", "index": 0}
    assert list(spec["cluster"]) == ["workerpool0", "workerpool1", "workerpool3"]
    assert [pool["replica_count"] for pool in spec["job"]["worker_pool_specs"]] == [1, 2, 0, 1]


@pytest.mark.parametrize(
    ("replicas", "ps", "evaluator", "counts"),
    [
        (1, 0, False, [1]),
        (4, 0, False, [1, 3]),
        (3, 2, False, [1, 2, 2]),
        (2, 1, True, [1, 1, 1, 1]),
        (2, 0, True, [1, 1, 0, 1]),
        (1, 0, True, [1, 0, 0, 1]),
    ],
)
def test_with_roles(replicas: int, ps: int, evaluator: bool, counts: list[int]) -> None:
    job = CustomJob.with_roles(["run"], replicas, ps=ps, evaluator=evaluator)
    assert [pool.replica_count for pool in job.worker_pools] == counts
    with pytest.raises(PipelineError, match="have no workers to serve"):
        CustomJob.with_roles(["run"], 1, ps=2)
