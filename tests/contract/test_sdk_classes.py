"""The classes of google-cloud-aiplatform, as a user has them, against the fake, and their traps.

Each trap that the product steers around has a test here: when it fails, the detour can go.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google.auth
import pytest
import yaml
from google.api_core import exceptions
from google.cloud import aiplatform
from google.rpc import code_pb2

from tests.contract.conftest import enter
from tests.contract.fake.requests import SPEC, Waiting
from tests.contract.fake.services import PROJECT
from tests.contract.fake.vertex import BUCKET, LOCATION, FakeVertex, fake_vertex
from tests.helpers.markdown import ROOT as REPOSITORY
from tests.helpers.markdown import blocks

pytestmark = pytest.mark.timeout(120)

ROOT = f"gs://{BUCKET}/root"


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


def test_a_custom_job_is_started_as_a_page_says(fake: FakeVertex) -> None:
    (snippet,) = blocks(REPOSITORY / "docs" / "training.md", "python")

    exec(snippet.replace("my-bucket", BUCKET), {})

    assert [pool.replica_count for pool in fake.job.job_spec.worker_pool_specs] == [1, 3]


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


def test_a_schedule_created_twice_is_two(fake: FakeVertex, toy: Path) -> None:
    """A trap: names of schedules are not unique."""
    for _ in range(2):
        job = pipeline_job(toy)
        job.create_schedule(display_name="nightly", cron="0 6 * * *")
    names = [item.display_name for item in fake.services.schedules.values()]
    assert names == ["nightly", "nightly"]


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
