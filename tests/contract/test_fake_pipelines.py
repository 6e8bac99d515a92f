"""The fake's pipeline jobs and schedules, as the clients see them."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.cloud import aiplatform_v1
from google.cloud.aiplatform_v1.types import Schedule
from kfp import compiler

from tests.contract.conftest import enter
from tests.contract.fake.pipelines import LocalRuns
from tests.contract.fake.requests import NOON, PARENT, Waiting, job, schedule
from tests.contract.fake.vertex import LOCATION, FakeVertex, fake_vertex
from tests.helpers import toy_pipeline
from tests.helpers.execution import without_tensorflow

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize(
    ("changes", "job_id", "words"),
    [
        ({}, "Toy_1", "pipeline_job_id"),
        ({"service_account": "me"}, "", "service_account"),
        ({"runtime_config": {"gcs_output_directory": "/tmp"}}, "", "must be gs://BUCKET"),
        ({"runtime_config": {"gcs_output_directory": "gs://bucket"}}, "", "'count' is required"),
        ({"labels": {"Team": "a"}}, "", "invalid key 'Team'"),
        ({"pipeline_spec": {}}, "", "pipeline_spec: is required"),
    ],
)
def test_a_job_that_is_wrong_is_refused(
    vertex: FakeVertex, changes: dict[str, Any], job_id: str, words: str
) -> None:
    request = aiplatform_v1.CreatePipelineJobRequest(
        parent=PARENT, pipeline_job=job(**changes), pipeline_job_id=job_id
    )
    with pytest.raises(Exception, match=words):
        vertex.services.call("CreatePipelineJob", request)
    assert not vertex.services.pipeline_jobs


@pytest.mark.parametrize(("value", "fits"), [(3, True), (3.5, False), ("3", False), (True, False)])
def test_parameters_have_the_types_that_the_pipeline_declares(
    vertex: FakeVertex, value: Any, fits: bool
) -> None:
    config = {"gcs_output_directory": "gs://bucket", "parameter_values": {"count": value}}
    request = aiplatform_v1.CreatePipelineJobRequest(parent=PARENT, pipeline_job=job(runtime_config=config))
    if fits:
        vertex.services.call("CreatePipelineJob", request)
    else:
        with pytest.raises(Exception, match="must be NUMBER_INTEGER"):
            vertex.services.call("CreatePipelineJob", request)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cron": "0 6 * *"}, "five fields"),
        ({"cron": "61 6 * * *"}, "cron: "),
        ({"cron": "TZ=Europe/Wien 0 6 * * *"}, "unknown time zone 'Europe/Wien'"),
        ({"max_concurrent_run_count": 0}, "max_concurrent_run_count"),
        ({"display_name": ""}, "display_name"),
        (
            {"create_pipeline_job_request": {"parent": PARENT, "pipeline_job": job(labels={"A": ""})}},
            "labels",
        ),
        (
            {"create_pipeline_job_request": {"parent": "projects/acme-vision/locations/us-east1"}},
            "another location",
        ),
    ],
)
def test_a_schedule_that_is_wrong_is_refused(vertex: FakeVertex, changes: dict[str, Any], words: str) -> None:
    request = aiplatform_v1.CreateScheduleRequest(parent=PARENT, schedule=schedule(**changes))
    with pytest.raises(Exception, match=words):
        vertex.services.call("CreateSchedule", request)


def make(vertex: FakeVertex, **changes: Any) -> str:
    request = aiplatform_v1.CreateScheduleRequest(parent=PARENT, schedule=schedule(**changes))
    return vertex.services.call("CreateSchedule", request).name


def test_a_schedule_fires(vertex: FakeVertex) -> None:
    values = {"count": 1.0, "when": "{{$.pipeline_job_schedule_time_utc}}"}
    config = {"gcs_output_directory": "gs://bucket", "parameter_values": values}
    request = {"parent": PARENT, "pipeline_job": job(runtime_config=config)}
    name = make(vertex, max_run_count=2, create_pipeline_job_request=request)
    first, second, third = (
        vertex.services.fire(name, NOON + datetime.timedelta(days=day)) for day in range(3)
    )
    assert first is not None
    assert second is not None
    assert third is None
    assert first.schedule_name == name
    assert first.runtime_config.parameter_values["when"] == "2030-01-01T12:00:00Z"
    found = vertex.services.schedules[name]
    assert (found.state, found.started_run_count) == (Schedule.State.COMPLETED, 2)
    request = aiplatform_v1.ListPipelineJobsRequest(parent=PARENT, filter=f"schedule_name={name}")
    assert len(vertex.services.call("ListPipelineJobs", request).pipeline_jobs) == 2


@pytest.mark.parametrize("queue", [True, False])
def test_a_schedule_keeps_to_its_limit(tmp_path: Path, queue: bool) -> None:
    run = Waiting()
    with fake_vertex(tmp_path, run_pipeline=run) as vertex:
        name = make(vertex, max_concurrent_active_run_count=1, allow_queueing=queue)
        first = vertex.services.fire(name, NOON)
        assert first is not None
        assert vertex.services.fire(name, NOON + datetime.timedelta(days=1)) is None
        request = aiplatform_v1.CancelPipelineJobRequest(name=first.name)
        vertex.services.call("CancelPipelineJob", request)
        assert len(vertex.services.pipeline_jobs) == (2 if queue else 1)


def test_a_pipeline_job_runs_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.Compiler().compile(toy_pipeline.toy, str(tmp_path / "toy.yaml"))
    spec = yaml.safe_load((tmp_path / "toy.yaml").read_text())
    runs = LocalRuns(tmp_path / "jobs", {"PYTHONPATH": without_tensorflow(tmp_path)})
    with fake_vertex(tmp_path, run_pipeline=runs) as vertex:
        enter(vertex.environment, monkeypatch)
        client = aiplatform_v1.PipelineServiceClient(
            client_options={"api_endpoint": f"{LOCATION}-aiplatform.googleapis.com"}
        )
        for way in ("succeed", "mistake"):
            config = {"gcs_output_directory": "gs://bucket/root", "parameter_values": {"way": way}}
            client.create_pipeline_job(
                parent=PARENT,
                pipeline_job=job(pipeline_spec=spec, runtime_config=config),
                pipeline_job_id=way,
            )
        jobs = [vertex.services.ended(f"{PARENT}/pipelineJobs/{way}") for way in ("succeed", "mistake")]

        states = [{task.task_name: task.state.name for task in job.job_detail.task_details} for job in jobs]
        assert states == [
            dict.fromkeys(["prepare", "train", "judge", "publish"], "SUCCEEDED"),
            {"prepare": "SUCCEEDED", "train": "FAILED"},
        ]
        assert jobs[1].error.message.endswith("[train].")
        train = jobs[1].job_detail.task_details[1]
        custom_job = vertex.services.jobs[train.executor_detail.container_detail.main_job]
        assert custom_job.error.message == "The replica workerpool1-0 exited with a non-zero status of 2."
        printed = [entry.json_payload["message"] for entry in vertex.services.logs.entries]
        assert any("no such model 'nosuch'" in text for text in printed)
        assert jobs[0].job_detail.task_details[2].execution.metadata["output:blessed"] is True
