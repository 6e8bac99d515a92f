"""google-cloud-aiplatform, as it is, submits custom jobs to the fake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.cloud import storage

from tests.contract.fake.requests import CONTAINER, POOL
from tests.contract.fake.services import PROJECT, PROJECT_NUMBER
from tests.contract.fake.vertex import BUCKET, LOCATION, FakeVertex
from tests.helpers import programs

pytestmark = pytest.mark.timeout(90)


def submit(vertex: FakeVertex, transport: str = "grpc", **request: Any) -> subprocess.CompletedProcess[str]:
    init = {"project": PROJECT, "location": LOCATION, "staging_bucket": f"gs://{BUCKET}"}
    if transport == "rest":
        init |= {"api_transport": "rest", "api_endpoint": vertex.rest_endpoint}
    return programs.run(
        [sys.executable, "-m", "tests.contract.fake.submit", json.dumps({"init": init, **request})],
        env=vertex.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("transport", ["grpc", "rest"])
def test_a_job_is_submitted_and_looked_at(vertex: FakeVertex, transport: str) -> None:
    evaluator = {**POOL, "container_spec": {"image_uri": "image:2"}}
    done = submit(
        vertex,
        transport,
        job={
            "display_name": 'a "name"',
            "worker_pool_specs": [POOL, {**POOL, "replica_count": 3}, {}, evaluator],
            "labels": {"team": "vision"},
        },
        submit={"timeout": 60, "restart_job_on_worker_restart": True, "service_account": "sa@x"},
    )

    assert done.returncode == 0, done.stderr
    name = f"projects/{PROJECT_NUMBER}/locations/{LOCATION}/customJobs/1"
    assert json.loads(done.stdout.splitlines()[-1]) == {"name": name, "state": "JOB_STATE_SUCCEEDED"}
    spec = vertex.job.job_spec
    assert vertex.job.display_name == 'a "name"'
    assert [pool.replica_count for pool in spec.worker_pool_specs] == [1, 3, 0, 1]
    assert list(spec.worker_pool_specs[0].container_spec.args) == CONTAINER["args"]
    assert spec.scheduling.timeout.total_seconds() == 60
    assert spec.base_output_directory.output_uri_prefix.startswith(f"gs://{BUCKET}/")
    assert set(vertex.services.calls) == {"CreateCustomJob", "GetCustomJob"}


def test_what_the_fake_refuses_reaches_the_user(vertex: FakeVertex) -> None:
    done = submit(
        vertex, "rest", job={"display_name": "a", "worker_pool_specs": [{**POOL, "replica_count": 2}]}
    )

    assert done.returncode == 1
    assert "worker_pool_specs[0].replica_count: must be 1 for the primary replica, got 2" in done.stderr
    assert not vertex.services.jobs


def test_a_local_script_is_staged_in_cloud_storage(
    vertex: FakeVertex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("print('training')\n")
    script = {"display_name": "a", "script_path": str(tmp_path / "train.py"), "container_uri": "image:1"}
    done = submit(vertex, "rest", script=script)

    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", vertex.environment["STORAGE_EMULATOR_HOST"])
    client = storage.Client.create_anonymous_client()
    (staged,) = (blob.name for blob in client.list_blobs(BUCKET))
    assert staged.endswith(".tar.gz")
    assert staged in " ".join(vertex.job.job_spec.worker_pool_specs[0].container_spec.command)
