"""The fake's pipeline jobs and schedules, as the clients see them."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.api_core import exceptions
from google.cloud import aiplatform_v1
from google.cloud.aiplatform_v1.types import PipelineState, PipelineTaskDetail, Schedule
from google.rpc import code_pb2

from tests.contract.conftest import enter
from tests.contract.fake.pipeline_jobs import PipelineOutcome
from tests.contract.fake.requests import NOON, NUMBERED, PARENT, Waiting, job, schedule
from tests.contract.fake.vertex import LOCATION, FakeVertex, fake_vertex

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(params=["grpc", "rest"])
def client(request: pytest.FixtureRequest, vertex_environ: FakeVertex) -> Callable[[str], Any]:
    def make(service: str) -> Any:
        options = {"api_endpoint": f"{LOCATION}-aiplatform.googleapis.com"}
        return getattr(aiplatform_v1, service)(transport=request.param, client_options=options)

    return make


def test_a_job_is_created_seen_listed_and_deleted(client: Callable[[str], Any]) -> None:
    pipelines = client("PipelineServiceClient")
    for number in range(3):
        made = pipelines.create_pipeline_job(
            parent=PARENT, pipeline_job=job(labels={"n": str(number)}), pipeline_job_id=f"toy-{number}"
        )
        assert made.state == PipelineState.PIPELINE_STATE_PENDING
        assert made.name == f"{NUMBERED}/pipelineJobs/toy-{number}"
    for name in (PARENT, NUMBERED):
        got = pipelines.get_pipeline_job(name=f"{name}/pipelineJobs/toy-0")
        assert got.state == PipelineState.PIPELINE_STATE_SUCCEEDED
        assert got.runtime_config.parameter_values["count"] == 3

    def listed(**request: Any) -> list[str]:
        found = pipelines.list_pipeline_jobs(request={"parent": PARENT, **request})
        return [item.name.rpartition("/")[2] for item in found]

    assert listed() == ["toy-2", "toy-1", "toy-0"]
    assert listed(order_by="create_time", page_size=1) == ["toy-0", "toy-1", "toy-2"]
    assert listed(filter='labels.n="1" OR pipeline_job_user_id:"*-2"') == ["toy-2", "toy-1"]
    assert listed(filter='display_name="toy" AND NOT labels.n="1"') == ["toy-2", "toy-0"]
    assert listed(filter='state="PIPELINE_STATE_FAILED"') == []
    assert listed(filter=f'create_time>="{got.create_time.isoformat()}"', order_by="create_time") == [
        *("toy-0", "toy-1", "toy-2")
    ]
    pipelines.delete_pipeline_job(name=f"{PARENT}/pipelineJobs/toy-0").result()
    assert listed() == ["toy-2", "toy-1"]
    with pytest.raises(exceptions.BadRequest, match="no field 'color'"):
        listed(filter="color=1")
    with pytest.raises(exceptions.NotFound, match="The PipelineJob does not exist"):
        pipelines.get_pipeline_job(name=f"{PARENT}/pipelineJobs/toy-0")
    with pytest.raises(exceptions.Conflict):
        pipelines.create_pipeline_job(parent=PARENT, pipeline_job=job(), pipeline_job_id="toy-1")


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


def test_a_running_job_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_vertex(tmp_path, run_pipeline=Waiting()) as vertex:
        enter(vertex.environment, monkeypatch)
        pipelines = aiplatform_v1.PipelineServiceClient(
            client_options={"api_endpoint": f"{LOCATION}-aiplatform.googleapis.com"}
        )
        name = pipelines.create_pipeline_job(parent=PARENT, pipeline_job=job()).name
        with pytest.raises(exceptions.FailedPrecondition):
            pipelines.delete_pipeline_job(name=name)
        pipelines.cancel_pipeline_job(name=name)
        found = pipelines.get_pipeline_job(name=name)
        pipelines.cancel_pipeline_job(name=name)
    assert found.state == PipelineState.PIPELINE_STATE_CANCELLED
    assert found.error.code == code_pb2.CANCELLED


def test_a_run_says_what_becomes_of_its_tasks(tmp_path: Path) -> None:
    tasks = [PipelineTaskDetail(task_name="train", state=PipelineTaskDetail.State.FAILED)]
    outcome = PipelineOutcome(code_pb2.INTERNAL, "train failed", tasks)
    with fake_vertex(tmp_path, run_pipeline=lambda job: outcome) as vertex:
        request = aiplatform_v1.CreatePipelineJobRequest(parent=PARENT, pipeline_job=job())
        name = vertex.services.call("CreatePipelineJob", request).name
        found = vertex.services.call("GetPipelineJob", aiplatform_v1.GetPipelineJobRequest(name=name))
    assert found.state == PipelineState.PIPELINE_STATE_FAILED
    assert found.error.message == "train failed"
    assert [task.task_name for task in found.job_detail.task_details] == ["train"]


def test_a_schedule_is_made_changed_paused_resumed_and_deleted(
    client: Callable[[str], Any], vertex: FakeVertex
) -> None:
    schedules = client("ScheduleServiceClient")
    made = schedules.create_schedule(parent=PARENT, schedule=schedule())
    assert made.state == Schedule.State.ACTIVE
    assert made.next_run_time.hour in (4, 5)  # six in Vienna

    changed = schedules.update_schedule(
        schedule={"name": made.name, "cron": "0 7 * * 1", "max_run_count": 5, "display_name": "ignored"},
        update_mask={"paths": ["cron", "max_run_count"]},
    )
    assert (changed.cron, changed.max_run_count, changed.display_name) == ("0 7 * * 1", 5, "nightly")
    with pytest.raises(exceptions.BadRequest, match="max_run_count: cannot be unset"):
        schedules.update_schedule(schedule={"name": made.name}, update_mask={"paths": ["max_run_count"]})

    with pytest.raises(exceptions.BadRequest, match="is ACTIVE, not PAUSED"):
        schedules.resume_schedule(name=made.name)
    schedules.pause_schedule(name=made.name)
    assert schedules.get_schedule(name=made.name).state == Schedule.State.PAUSED
    assert vertex.services.fire(made.name, NOON) is None
    schedules.resume_schedule(request={"name": made.name, "catch_up": True})
    (found,) = schedules.list_schedules(
        request={"parent": PARENT, "filter": 'state="ACTIVE" AND display_name:"night*"'}
    )
    assert found.catch_up
    assert not list(schedules.list_schedules(request={"parent": PARENT, "filter": 'display_name="other"'}))
    schedules.delete_schedule(name=made.name).result()
    assert not vertex.services.schedules


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
