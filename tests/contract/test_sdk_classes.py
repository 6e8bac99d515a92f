"""What a page says of the classes of google-cloud-aiplatform, against the fake."""

from __future__ import annotations

from collections.abc import Iterator

import google.auth
import pytest
from google.cloud import aiplatform

from tests.contract.fake.services import PROJECT
from tests.contract.fake.vertex import BUCKET, LOCATION, FakeVertex
from tests.helpers.markdown import ROOT as REPOSITORY
from tests.helpers.markdown import blocks

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def fake(vertex_environ: FakeVertex) -> Iterator[FakeVertex]:
    aiplatform.init(
        project=PROJECT,
        location=LOCATION,
        staging_bucket=f"gs://{BUCKET}",
        credentials=google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])[0],
    )
    yield vertex_environ
    aiplatform.initializer.global_pool.shutdown(wait=True)
    aiplatform.initializer.global_config.__init__()  # type: ignore[misc]


def test_a_custom_job_is_started_as_a_page_says(fake: FakeVertex) -> None:
    pages = blocks(REPOSITORY / "docs" / "training.md", "python")
    (snippet,) = [each for each in pages if "aiplatform" in each]

    exec(snippet.replace("my-bucket", BUCKET), {})

    assert [pool.replica_count for pool in fake.job.job_spec.worker_pool_specs] == [1, 3]
