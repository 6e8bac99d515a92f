"""The launcher's payload becomes the job that the API would receive."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardline.components.custom_job import REDUCTION_SERVER_IMAGE
from shardline.pipelines.local.job.custom_job import EXECUTOR_INPUT_MARKER, parse_payload, replicas
from shardline.trainer.base.errors import PipelineError


def _pool(**fields: Any) -> dict[str, Any]:
    container = {"image_uri": "toy:1", "command": ["run"], "args": [], "env": []}
    return {"container_spec": container | fields.pop("container", {}), "replica_count": 1.0, **fields}


def _payload(*pools: Any, **spec: Any) -> str:
    content = {"display_name": "toy", "job_spec": {"worker_pool_specs": list(pools), **spec}, "labels": None}
    return json.dumps(content)


def test_a_whole_job() -> None:
    chief = _pool(
        container={"args": ["--dataset", "d"], "env": [{"name": "A", "value": "1"}]},
        machine_spec={"machine_type": "n1-standard-4"},
    )
    job = parse_payload(
        _payload(
            chief,
            _pool(replica_count=3.0),
            scheduling={"timeout": "90s", "restart_job_on_worker_restart": True, "disable_retries": True},
            base_output_directory={"output_uri_prefix": "gs://b/o"},
        ),
        "{}",
    )
    assert job.display_name == "toy"
    assert [pool.replica_count for pool in job.worker_pools] == [1, 3]
    assert isinstance(job.worker_pools[1].replica_count, int)
    assert job.worker_pools[0].argv == ["run", "--dataset", "d"]
    assert job.worker_pools[0].variables == {"A": "1"}
    assert job.worker_pools[0].machine == {"machine_type": "n1-standard-4"}
    assert job.timeout == 90.0
    assert job.restart_job_on_worker_restart
    assert job.disable_retries
    assert job.base_output_directory == "gs://b/o"


def test_empty_fields_mean_nothing() -> None:
    job = parse_payload(
        _payload(_pool(), scheduling={"timeout": ""}, base_output_directory={"output_uri_prefix": ""}), "{}"
    )
    assert job.timeout is None
    assert job.base_output_directory == ""
    assert not job.restart_job_on_worker_restart


def test_an_empty_pool_vanishes_as_it_does_in_the_launcher() -> None:
    # On the platform this evaluator would become a parameter server: the third of three pools.
    job = parse_payload(_payload(_pool(), _pool(), {}, _pool()), "{}")
    assert [pool.replica_count for pool in job.worker_pools] == [1, 1, 1]


@pytest.mark.parametrize(
    "slot",
    [
        {"machine_spec": {"machine_type": "n1-standard-4"}, "replica_count": 0},
        _pool(replica_count=0),
        _pool(container={"image_uri": REDUCTION_SERVER_IMAGE, "command": []}),
    ],
)
def test_a_pool_of_no_replicas_keeps_its_slot(slot: dict[str, Any]) -> None:
    job = parse_payload(_payload(_pool(), _pool(replica_count=2.0), slot, _pool()), "{}")
    assert [pool.replica_count for pool in job.worker_pools] == [1, 2, 0, 1]
    assert [member.name for member in replicas(job)] == ["chief-0", "worker-0", "worker-1", "evaluator-0"]


def test_the_executor_input_arrives_intact() -> None:
    executor_input = json.dumps({"note": 'it\'s "q" \\ {x} {{y}}\nnew é', "specs": EXECUTOR_INPUT_MARKER})
    job = parse_payload(
        _payload(_pool(container={"args": ["--executor_input", EXECUTOR_INPUT_MARKER]})), executor_input
    )
    seen = json.loads(job.worker_pools[0].argv[2])
    assert seen["note"] == 'it\'s "q" \\ {x} {{y}}\nnew é'
    assert seen["specs"] == "{{$.json_escape[1]}}"  # what a replica on the platform sees there


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ('{"display_name": "a "quoted" name"}', "the payload of CustomJob is not JSON"),
        ("[]", "no job_spec"),
        ("{}", "no job_spec"),
        (_payload(), "no job_spec with worker_pool_specs"),
        (_payload({"replica_count": 1, "python_package_spec": {"args": []}}), "pool 0 has no container_spec"),
        (_payload(_pool(container={"command": []})), "'toy:1' has no command"),
        (_payload(_pool(replica_count=1.5)), "replica_count must be a whole number, got 1.5"),
        (
            _payload(_pool(), _pool(replica_count=True)),
            "pool 1: replica_count must be a whole number, not True",
        ),
        (
            _payload(_pool(), scheduling={"timeout": "1h"}),
            r"scheduling\.timeout must be seconds and an 's', .*'1h'",
        ),
    ],
)
def test_payloads_that_cannot_run(payload: str, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        parse_payload(payload, "{}")
