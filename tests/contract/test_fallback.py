"""The launcher of a training job with alternatives of machines, in a process of its own, at the fake."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.cloud.aiplatform_v1.types import CustomJob, JobState, Scheduling
from google.rpc import code_pb2

from shardline.components.runs.causes import Failure, explain
from shardline.components.vertex.job import CustomJobSettings
from shardline.components.vertex.pools import Cluster, WorkerPool
from shardline.trainer.base.errors import EXIT_PLATFORM
from tests.contract.fake.api import Outcome
from tests.contract.fake.services import PROJECT
from tests.contract.fake.vertex import LOCATION, FakeVertex, fake_vertex
from tests.helpers import programs
from tests.helpers.jobs import eventually

pytestmark = pytest.mark.timeout(90)

STOCKOUT = "Resources are insufficient in region: europe-west4. Please try a different region."
QUOTA = (
    "The following quota metrics exceed quota limits: "
    "aiplatform.googleapis.com/custom_model_training_nvidia_t4_gpus"
)
#: The launcher, which looks at jobs often, and does not repeat what is refused for a minute.
PROGRAM = """
from shardline.components.train import launcher
from shardline.components.vertex import client
launcher.POLL_S, client._RETRY_S = 0.05, 0.0
launcher.main()
"""
GPU = WorkerPool(machine_type="n1-standard-8", accelerator_type="NVIDIA_TESLA_T4", accelerator_count=1)
CPU = WorkerPool(machine_type="n1-highmem-16")
SPOT = CustomJobSettings(cluster=Cluster.of(replace(GPU, replica_count=3)), strategy="SPOT")
ON_DEMAND = replace(SPOT, strategy="STANDARD")
ELSEWHERE = replace(
    ON_DEMAND, cluster=Cluster.of(replace(CPU, replica_count=3)), location="europe-west1", cross_region=True
)


def command(path: Path, *jobs: CustomJobSettings) -> list[str]:
    """Returns the launcher's command line for a job, and the same job on other machines."""
    specs = jobs[0].cluster.specs({"image_uri": "image:1", "command": ["train"], "args": ["--x"]})
    job_spec = {
        "worker_pool_specs": specs,
        "scheduling": {"strategy": jobs[0].strategy, "max_wait_duration": "86400s"},
        "base_output_directory": {"output_uri_prefix": "gs://staging/jobs/run-1"},
    }
    options = {
        "--type": "CustomJob",
        "--project": PROJECT,
        "--location": LOCATION,
        "--payload": json.dumps({"display_name": "train", "labels": {}, "job_spec": job_spec}),
        "--gcp_resources": str(path / "gcp_resources"),
        "--fallback": json.dumps(replace(jobs[0], fallback=jobs[1:]).choices),
    }
    return [sys.executable, "-c", PROGRAM, *(part for item in options.items() for part in item)]


def launch(vertex: FakeVertex, path: Path, *jobs: CustomJobSettings) -> subprocess.CompletedProcess[str]:
    arguments = command(path, *jobs)
    return programs.run(arguments, env=vertex.environment, capture_output=True, text=True, timeout=60)


def resources(path: Path) -> list[dict[str, Any]]:
    return list(json.loads((path / "gcp_resources").read_text())["resources"])


def kinds(vertex: FakeVertex) -> list[tuple[str, str, str]]:
    """Returns strategy, machines and state of each job that was created."""
    return [
        (
            Scheduling.Strategy(job.job_spec.scheduling.strategy).name,
            job.job_spec.worker_pool_specs[1].machine_spec.machine_type,
            JobState(job.state).name.removeprefix("JOB_STATE_"),
        )
        for job in vertex.services.jobs.values()
    ]


def is_spot(job: CustomJob) -> bool:
    return job.job_spec.scheduling.strategy == Scheduling.Strategy.SPOT


@pytest.fixture
def ends() -> dict[str, Outcome]:
    """How jobs end, by their strategy; others succeed."""
    return {}


@pytest.fixture
def vertex(tmp_path: Path, ends: dict[str, Outcome]) -> Any:
    def run(job: CustomJob) -> Outcome:
        return ends.get(Scheduling.Strategy(job.job_spec.scheduling.strategy).name, Outcome())

    with fake_vertex(tmp_path, run) as fake:
        yield fake
        assert fake.refused == []


@pytest.fixture
def start(vertex: FakeVertex, tmp_path: Path) -> Any:
    """Starts the launcher, and returns it once it has created a job."""
    started: list[subprocess.Popen[str]] = []

    def starting(count: int, *jobs: CustomJobSettings) -> subprocess.Popen[str]:
        process = subprocess.Popen(command(tmp_path, *jobs), env=vertex.environment, text=True)
        started.append(process)
        path, pause = tmp_path / "gcp_resources", threading.Event()
        while process.poll() is None and not (path.is_file() and len(resources(tmp_path)) == count):
            pause.wait(0.05)
        return process

    yield starting
    for process in started:
        process.kill()
        process.wait()


Start = Callable[..., "subprocess.Popen[str]"]


def test_after_a_stockout_the_next_machines_train_into_the_same_directory(
    vertex: FakeVertex, ends: dict[str, Outcome], tmp_path: Path
) -> None:
    ends["SPOT"] = Outcome(code_pb2.RESOURCE_EXHAUSTED, STOCKOUT)

    done = launch(vertex, tmp_path, SPOT, ELSEWHERE)

    assert done.returncode == 0, done.stderr
    assert kinds(vertex) == [("SPOT", "n1-standard-8", "FAILED"), ("STANDARD", "n1-highmem-16", "SUCCEEDED")]
    first, second = vertex.services.jobs.values()
    assert "/locations/europe-west1/" in second.name
    assert first.job_spec.base_output_directory == second.job_spec.base_output_directory
    env = [[item.value for item in pool.container_spec.env] for pool in first.job_spec.worker_pool_specs]
    assert env == [["1 NVIDIA_TESLA_T4"]] * 2
    assert not any(pool.container_spec.env for pool in second.job_spec.worker_pool_specs)
    tried = resources(tmp_path)
    assert [item["resourceUri"].partition("/v1/")[2] for item in tried] == [first.name, second.name]
    assert tried[0]["error"]["message"] == STOCKOUT
    assert "error" not in tried[1]


def test_spot_machines_that_do_not_come_are_given_up_before_others_are_asked_for(
    vertex: FakeVertex, tmp_path: Path
) -> None:
    vertex.services.let_wait(is_spot)

    done = launch(vertex, tmp_path, replace(SPOT, wait="0.2s"), ON_DEMAND)

    assert done.returncode == 0, done.stderr
    assert [state for _, _, state in kinds(vertex)] == ["CANCELLED", "SUCCEEDED"]
    calls = [call for call in vertex.services.calls if call not in ("GetCustomJob", "ListCustomJobs")]
    assert calls == ["CreateCustomJob", "CancelCustomJob", "CreateCustomJob"]
    assert resources(tmp_path)[0]["error"]["message"] == "not there after 0 s"


def test_a_job_that_ends_while_it_is_given_up_has_ended(
    vertex: FakeVertex, start: Start, tmp_path: Path
) -> None:
    vertex.services.let_wait(is_spot)
    vertex.services.fail("CancelCustomJob", code_pb2.FAILED_PRECONDITION, delay_s=1.0)
    process = start(1, replace(SPOT, wait="0s"), ON_DEMAND)
    eventually(lambda: "CancelCustomJob" in vertex.services.calls)
    (job,) = vertex.services.jobs.values()
    job.state = JobState.JOB_STATE_SUCCEEDED

    assert process.wait(30) == 0
    assert len(vertex.services.jobs) == 1


def test_no_job_begins_while_another_cannot_be_cancelled(vertex: FakeVertex, tmp_path: Path) -> None:
    vertex.services.let_wait(is_spot)
    vertex.services.fail("CancelCustomJob", code_pb2.PERMISSION_DENIED, "you may not", times=9)

    done = launch(vertex, tmp_path, replace(SPOT, wait="0s"), ON_DEMAND)

    assert done.returncode == EXIT_PLATFORM
    assert "you may not" in done.stderr
    assert len(vertex.services.jobs) == 1


def test_a_job_whose_creation_lost_its_answer_is_found_by_its_label(
    vertex: FakeVertex, tmp_path: Path
) -> None:
    vertex.services.fail("CreateCustomJob", drop="answer")

    assert launch(vertex, tmp_path, SPOT, ON_DEMAND).returncode == 0
    (job,) = vertex.services.jobs.values()
    assert resources(tmp_path)[0]["resourceUri"].endswith(job.name)

    # Killed before it had written the name.
    (tmp_path / "gcp_resources").unlink()
    assert launch(vertex, tmp_path, SPOT, ON_DEMAND).returncode == 0
    assert len(vertex.services.jobs) == 1


def test_a_creation_that_did_not_arrive_fails_the_task(vertex: FakeVertex, tmp_path: Path) -> None:
    vertex.services.fail("CreateCustomJob", drop="request")

    assert launch(vertex, tmp_path, SPOT, ON_DEMAND).returncode == EXIT_PLATFORM
    assert not vertex.services.jobs


def test_a_quota_that_is_used_up_is_refused_at_creation(vertex: FakeVertex, tmp_path: Path) -> None:
    vertex.services.fail("CreateCustomJob", code_pb2.RESOURCE_EXHAUSTED, QUOTA)

    done = launch(vertex, tmp_path, SPOT, ON_DEMAND)

    assert done.returncode == 0, done.stderr
    assert kinds(vertex) == [("STANDARD", "n1-standard-8", "SUCCEEDED")]
    assert QUOTA in resources(tmp_path)[0]["error"]["message"]


@pytest.mark.parametrize(
    "message",
    [
        "The replica workerpool1-0 exited with a non-zero status of 1. Resources are insufficient in region",
        "Internal error encountered.",
    ],
)
def test_another_failure_tries_nothing_else(
    vertex: FakeVertex, ends: dict[str, Outcome], tmp_path: Path, message: str
) -> None:
    ends["SPOT"] = Outcome(code_pb2.INTERNAL, message)

    done = launch(vertex, tmp_path, SPOT, ON_DEMAND)

    assert done.returncode == 13
    assert message in done.stderr
    assert len(vertex.services.jobs) == 1


def test_too_many_calls_are_no_lack_of_machines(vertex: FakeVertex, tmp_path: Path) -> None:
    vertex.services.fail("CreateCustomJob", code_pb2.RESOURCE_EXHAUSTED)

    assert launch(vertex, tmp_path, SPOT, ON_DEMAND).returncode == EXIT_PLATFORM
    assert not vertex.services.jobs


def test_a_spot_job_that_is_preempted_for_good_goes_on_on_demand(
    vertex: FakeVertex, ends: dict[str, Outcome], tmp_path: Path
) -> None:
    ends["SPOT"] = Outcome(code_pb2.INTERNAL, "The job was preempted too many times.")

    assert launch(vertex, tmp_path, SPOT, ON_DEMAND).returncode == 0
    assert len(vertex.services.jobs) == 2


def test_when_nothing_is_there_one_line_names_each_choice_and_why(
    vertex: FakeVertex, ends: dict[str, Outcome], tmp_path: Path
) -> None:
    ends["STANDARD"] = Outcome(code_pb2.RESOURCE_EXHAUSTED, STOCKOUT)
    vertex.services.let_wait(is_spot)

    done = launch(vertex, tmp_path, replace(SPOT, wait="0s"), ON_DEMAND)

    assert done.returncode == EXIT_PLATFORM
    (line,) = [line for line in done.stderr.splitlines() if "train: error:" in line]
    assert "no such machine free" in explain(Failure(error=line, is_own_message=True)).cause
    assert "n1-standard-8, 1 NVIDIA_TESLA_T4, SPOT: not there after 0 s" in line
    assert f"n1-standard-8, 1 NVIDIA_TESLA_T4, STANDARD: {STOCKOUT}" in line


@pytest.mark.parametrize("jobs", [(SPOT, ON_DEMAND), (ON_DEMAND, SPOT)])
def test_a_killed_launcher_finds_its_job_again_and_begins_none_anew(
    vertex: FakeVertex,
    ends: dict[str, Outcome],
    start: Start,
    tmp_path: Path,
    jobs: Sequence[CustomJobSettings],
) -> None:
    vertex.services.let_wait(is_spot)
    ends["STANDARD"] = Outcome(code_pb2.RESOURCE_EXHAUSTED, STOCKOUT)
    process = start(1 if jobs[0] is SPOT else 2, *jobs)
    process.kill()
    process.wait()
    (waiting,) = [job for job in vertex.services.jobs.values() if is_spot(job)]
    created = list(vertex.services.jobs)
    waiting.state = JobState.JOB_STATE_SUCCEEDED

    assert launch(vertex, tmp_path, *jobs).returncode == 0
    assert list(vertex.services.jobs) == created


def test_a_launcher_that_was_killed_while_it_gave_a_job_up_gives_it_up_again(
    vertex: FakeVertex, start: Start, tmp_path: Path
) -> None:
    vertex.services.let_wait(is_spot)
    process = start(1, SPOT, ON_DEMAND)
    process.kill()
    process.wait()
    (entry,) = resources(tmp_path)
    entry["error"] = {"message": "not there after 0 s"}
    (tmp_path / "gcp_resources").write_text(json.dumps({"resources": [entry]}))

    assert launch(vertex, tmp_path, SPOT, ON_DEMAND).returncode == 0
    assert [state for _, _, state in kinds(vertex)] == ["CANCELLED", "SUCCEEDED"]


def test_a_cancelled_task_cancels_its_job(vertex: FakeVertex, start: Start) -> None:
    vertex.services.let_wait(is_spot)
    process = start(1, SPOT, ON_DEMAND)

    process.send_signal(signal.SIGTERM)
    process.wait(30)

    assert kinds(vertex) == [("SPOT", "n1-standard-8", "CANCELLED")]
