"""The classes of google-cloud-aiplatform, as a user has them, against the fake, and their traps.

Each trap that the product steers around has a test here: when it fails, the detour can go.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google.auth
import pytest
import yaml
from google.api_core import exceptions
from google.cloud import aiplatform
from google.cloud.aiplatform import hyperparameter_tuning as hpt
from google.cloud.aiplatform_v1.types import PipelineJob, Schedule
from google.rpc import code_pb2

from tests.contract.conftest import enter
from tests.contract.fake.pipeline_jobs import PipelineOutcome
from tests.contract.fake.requests import NOON, POOL, SPEC, Waiting
from tests.contract.fake.services import PROJECT
from tests.contract.fake.vertex import BUCKET, LOCATION, FakeVertex, fake_vertex

pytestmark = pytest.mark.timeout(120)

ROOT = f"gs://{BUCKET}/root"
ACCOUNT = "runs@acme-vision.iam.gserviceaccount.com"


def signed_in() -> None:
    aiplatform.init(
        project=PROJECT,
        location=LOCATION,
        staging_bucket=f"gs://{BUCKET}",
        credentials=google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])[0],
    )


@pytest.fixture
def fake(vertex_environ: FakeVertex) -> Iterator[FakeVertex]:
    signed_in()
    yield vertex_environ
    aiplatform.initializer.global_pool.shutdown(wait=True)
    aiplatform.initializer.global_config.__init__()  # type: ignore[misc]


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(SPEC))
    return path


def pipeline_job(toy: Path, **changes: Any) -> aiplatform.PipelineJob:
    return aiplatform.PipelineJob(
        **{
            "display_name": "toy",
            "template_path": str(toy),
            "pipeline_root": ROOT,
            "parameter_values": {"count": 3},
            **changes,
        }
    )


def test_a_pipeline_job(fake: FakeVertex, toy: Path) -> None:
    job = pipeline_job(toy, job_id="toy-1", labels={"team": "vision"}, enable_caching=False)
    job.submit(service_account=ACCOUNT)

    received = fake.services.ended(job.resource_name)
    assert received.name.endswith("/pipelineJobs/toy-1")
    assert received.service_account == ACCOUNT
    assert received.labels["team"] == "vision"
    assert received.runtime_config.gcs_output_directory == ROOT
    assert received.runtime_config.parameter_values["count"] == 3
    assert aiplatform.PipelineJob.get("toy-1").state.name == "PIPELINE_STATE_SUCCEEDED"
    found = aiplatform.PipelineJob.list(filter='state="PIPELINE_STATE_SUCCEEDED" AND labels.team="vision"')
    assert [item.name for item in found] == ["toy-1"]
    with pytest.raises(exceptions.AlreadyExists):
        pipeline_job(toy, job_id="toy-1").submit()
    job.delete()
    assert not fake.services.pipeline_jobs


def test_a_parameter_of_the_wrong_type_is_sent(fake: FakeVertex, toy: Path) -> None:
    """A trap: the platform refuses what the class might have; `submit` looks itself."""
    with pytest.raises(exceptions.InvalidArgument, match="must be NUMBER_INTEGER, got 'three'"):
        pipeline_job(toy, parameter_values={"count": "three"}).submit()
    with pytest.raises(exceptions.InvalidArgument, match="'count' is required"):
        pipeline_job(toy, parameter_values={}).submit()


def test_waiting_for_a_cancelled_job_does_not_raise(
    tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trap: to a program that waits, a cancelled run looks like one that has succeeded."""
    with fake_vertex(tmp_path, run_pipeline=Waiting()) as fake:
        enter(fake.environment, monkeypatch)
        signed_in()
        job = pipeline_job(toy)
        job.submit()
        job.cancel()
        job.wait()
        assert job.state.name == "PIPELINE_STATE_CANCELLED"


def test_waiting_for_a_failed_job_raises(tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(job: PipelineJob) -> PipelineOutcome:
        return PipelineOutcome(code_pb2.INTERNAL, "train failed")

    with fake_vertex(tmp_path, run_pipeline=run) as fake:
        enter(fake.environment, monkeypatch)
        signed_in()
        job = pipeline_job(toy)
        job.submit()
        fake.services.ended(job.resource_name)
        with pytest.raises(RuntimeError, match="train failed"):
            job.wait()


def test_a_schedule(fake: FakeVertex, toy: Path) -> None:
    schedule = aiplatform.PipelineJobSchedule(pipeline_job=pipeline_job(toy), display_name="nightly")
    schedule.create(cron="TZ=Europe/Vienna 0 6 * * *", max_concurrent_run_count=1, max_run_count=5)
    (received,) = fake.services.schedules.values()
    assert received.create_pipeline_job_request.pipeline_job.pipeline_spec["pipelineInfo"] == {"name": "toy"}
    assert fake.services.fire(received.name, NOON) is not None
    assert len(schedule.list_jobs(enable_simple_view=False)) == 1
    assert [item.display_name for item in aiplatform.PipelineJobSchedule.list()] == ["nightly"]

    schedule.update(cron="0 7 * * *", max_run_count=7)
    received = fake.services.schedules[received.name]
    assert (received.cron, received.max_run_count) == ("0 7 * * *", 7)
    schedule.pause()
    assert fake.services.schedules[received.name].state == Schedule.State.PAUSED
    schedule.resume(catch_up=True)
    found = fake.services.schedules[received.name]
    assert found.state == Schedule.State.ACTIVE
    assert not found.catch_up, "a trap that is gone: resume() sends catch_up"
    schedule.delete()
    assert not fake.services.schedules


def test_a_schedule_created_twice_is_two(fake: FakeVertex, toy: Path) -> None:
    """A trap: names of schedules are not unique."""
    for _ in range(2):
        job = pipeline_job(toy)
        job.create_schedule(display_name="nightly", cron="0 6 * * *")
    names = [item.display_name for item in fake.services.schedules.values()]
    assert names == ["nightly", "nightly"]


def test_a_cron_expression_is_not_looked_at_before_it_is_sent(fake: FakeVertex, toy: Path) -> None:
    with pytest.raises(exceptions.InvalidArgument, match="unknown time zone 'Europe/Wien'"):
        pipeline_job(toy).create_schedule(display_name="a", cron="TZ=Europe/Wien 0 6 * * *")


def test_a_custom_job(fake: FakeVertex) -> None:
    job = aiplatform.CustomJob(display_name="train", worker_pool_specs=[POOL])
    job.submit(timeout=60)
    assert job.state.name == "JOB_STATE_SUCCEEDED"
    assert fake.job.job_spec.scheduling.timeout == datetime.timedelta(seconds=60)
    assert [item.resource_name for item in aiplatform.CustomJob.list()] == [job.resource_name]


def test_a_tuning_job(fake: FakeVertex) -> None:
    job = aiplatform.HyperparameterTuningJob(
        display_name="tune",
        custom_job=aiplatform.CustomJob(display_name="train", worker_pool_specs=[POOL]),
        metric_spec={"accuracy": "maximize"},
        parameter_spec={
            "rate": hpt.DoubleParameterSpec(min=0.001, max=0.1, scale="log"),
            "size": hpt.DiscreteParameterSpec(values=[16, 32], scale=None),
        },
        max_trial_count=3,
        parallel_trial_count=1,
    )
    job.run()
    best = max(job.trials, key=lambda trial: trial.final_measurement.metrics[0].value)
    assert (len(job.trials), best.id) == (3, "3")
    (received,) = fake.services.tuning_jobs.values()
    assert received.trial_job_spec.worker_pool_specs[0].container_spec.image_uri == "image:1"


def test_a_model(fake: FakeVertex) -> None:
    container = {
        "serving_container_image_uri": "image:1",
        "serving_container_predict_route": "/predict",
        "serving_container_health_route": "/health",
    }
    first = aiplatform.Model.upload(
        display_name="digits", artifact_uri=f"{ROOT}/model", version_aliases=["champion"], **container
    )
    second = aiplatform.Model.upload(
        display_name="digits",
        artifact_uri=f"{ROOT}/model",
        parent_model=first.resource_name,
        is_default_version=False,
        **container,
    )
    assert (first.version_id, second.version_id) == ("1", "2")
    assert first.resource_name == second.resource_name
    (versions,) = fake.services.models.values()
    assert list(versions[0].version_aliases) == ["champion", "default"]
    assert [item.display_name for item in aiplatform.Model.list()] == ["digits"]


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (code_pb2.PERMISSION_DENIED, exceptions.PermissionDenied, "aiplatform.pipelineJobs.create"),
        (code_pb2.RESOURCE_EXHAUSTED, exceptions.ResourceExhausted, "resource_management_requests"),
        (code_pb2.UNAVAILABLE, exceptions.ServiceUnavailable, "currently unavailable"),
    ],
)
def test_a_class_tries_nothing_again(
    fake: FakeVertex, toy: Path, code: int, error: type[Exception], words: str
) -> None:
    """A trap: one busy moment of the platform ends a program that submits with the class."""
    fake.services.fail("CreatePipelineJob", code)
    with pytest.raises(error, match=words):
        pipeline_job(toy).submit()
    assert not fake.services.pipeline_jobs
