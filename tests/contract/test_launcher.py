"""The GCPC launcher, as it is and in a process of its own, creates custom jobs at the fake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.cloud.aiplatform_v1.types import CustomJob

from shardline.components.code import pack
from shardline.components.train.component import custom_job
from tests.compile.test_code import POOLS, compiled, component
from tests.contract import toy
from tests.contract.fake.services import PROJECT, PROJECT_NUMBER
from tests.contract.fake.vertex import LOCATION, FakeVertex, fake_vertex
from tests.helpers import programs
from tests.helpers.markdown import ROOT
from tests.helpers.payloads import payload, received

pytestmark = pytest.mark.timeout(90)

LAUNCHER = "google_cloud_pipeline_components.container.v1.custom_job.launcher"
NOTE = 'say "hi" \\ {{ x }} \'\n\ttab, näïve ☃ 日本語 $HOME'
PLATFORM = {
    "{{$.pipeline_service_account}}": "sa@acme-vision.iam.gserviceaccount.com",
    "{{$.pipeline_network}}": "projects/123456/global/networks/net",
}
JOB = f"projects/{PROJECT_NUMBER}/locations/{LOCATION}/customJobs/1"


def launch(vertex: FakeVertex, text: str, resources: Path) -> subprocess.CompletedProcess[str]:
    where = ("--project", PROJECT, "--location", LOCATION, "--gcp_resources", str(resources))
    return programs.run(
        [sys.executable, "-m", LAUNCHER, "--type", "CustomJob", "--payload", text, *where],
        env=vertex.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def text(tmp_path: Path) -> str:
    """The payload of our own component, expanded, compiled, and filled in as the backend does."""
    spec = toy.compile_toy(tmp_path / "toy.yaml")
    spec["components"] = {"comp-train": spec["components"]["comp-train"]}
    return payload(spec, {"inputs": {"parameterValues": {"note": NOTE}}}, PLATFORM)


def test_our_job_arrives_as_it_was_meant(vertex: FakeVertex, text: str, tmp_path: Path) -> None:
    done = launch(vertex, text, tmp_path / "gcp_resources")

    assert done.returncode == 0, done.stderr
    pools = vertex.job.job_spec.worker_pool_specs
    assert [pool.replica_count for pool in pools] == [1, 1, 0, 1]
    assert pools[1].machine_spec.accelerator_count == 2
    assert pools[3].container_spec.env[0].value == toy.SMALL.env["NOTE"]
    for pool in (pools[0], pools[1], pools[3]):
        executor_input = json.loads(list(pool.container_spec.args)[1])
        assert executor_input["inputs"]["parameterValues"]["note"] == NOTE
    # What tests elsewhere work out for a payload is what the launcher sends.
    sent = CustomJob.to_dict(vertex.job)
    expected = CustomJob.to_dict(CustomJob(received(text)))
    assert (sent["job_spec"], sent["labels"]) == (expected["job_spec"], expected["labels"])
    (resource,) = json.loads((tmp_path / "gcp_resources").read_text())["resources"]
    assert resource == {
        "resourceType": "CustomJob",
        "resourceUri": f"https://{LOCATION}-aiplatform.googleapis.com/v1/{JOB}",
    }

    # A launcher that was preempted finds its job again.
    assert launch(vertex, text, tmp_path / "gcp_resources").returncode == 0
    assert list(vertex.services.jobs) == [JOB]


def test_the_command_of_a_replica_has_the_users_package_wherever_it_runs(
    vertex: FakeVertex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, elsewhere, output = tmp_path / "here", tmp_path / "elsewhere", tmp_path / "out.json"
    for directory, line in ((place, "return f'packed {count}'"), (elsewhere, "raise SystemExit")):
        (directory / "boxed").mkdir(parents=True)
        (directory / "boxed" / "model.py").write_text(f"def build(count):\n    {line}\n")
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = compiled(custom_job(component(pack(["boxed"])), POOLS))
    given = {"inputs": {"parameterValues": {"count": 3}}, "outputs": {"outputFile": str(output)}}

    assert launch(vertex, payload(spec, given, PLATFORM), tmp_path / "gcp_resources").returncode == 0

    pools = vertex.job.job_spec.worker_pool_specs
    assert len(pools) == 2
    for pool in pools:
        subprocess.run(
            [*pool.container_spec.command, *pool.container_spec.args],
            cwd=elsewhere,  # as the image may hold the package as it was
            env={"PATH": f"{Path(sys.executable).parent}:{os.defpath}", "PYTHONPATH": str(ROOT)},
            check=True,
        )
        assert "packed 3" in output.read_text()
        output.unlink()


def broken(text: str, change: str) -> str:
    """Returns the payload with one thing as other tools write it."""
    content: dict[str, Any] = json.loads(text)
    pools = content["job_spec"]["worker_pool_specs"]
    if change == "empty object":
        pools[2] = {}
    elif change == "zero replicas":
        pools[2] = {"replica_count": 0}
    elif change == "float accelerators":
        pools[1]["machine_spec"]["accelerator_count"] = 2.0
    elif change == "quote in the name":
        return text.replace('"display_name": "train"', '"display_name": "a "b""')
    return json.dumps(content)


@pytest.mark.parametrize("change", ["empty object", "zero replicas"])
def test_the_launcher_moves_pools_behind_an_empty_one(
    vertex: FakeVertex, text: str, tmp_path: Path, change: str
) -> None:
    """The defect that `EMPTY_POOL` is there for; when this fails, it can go."""
    done = launch(vertex, broken(text, change), tmp_path / "gcp_resources")

    assert done.returncode == 0, done.stderr
    assert [pool.replica_count for pool in vertex.job.job_spec.worker_pool_specs] == [1, 1, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("float accelerators", "'float' object cannot be interpreted as an integer"),
        ("quote in the name", "JSONDecodeError"),
    ],
)
def test_what_cannot_be_sent_or_is_refused(
    vertex: FakeVertex, text: str, tmp_path: Path, change: str, words: str
) -> None:
    done = launch(vertex, broken(text, change), tmp_path / "gcp_resources")

    assert done.returncode != 0
    assert words in done.stderr
    assert not vertex.services.jobs


def test_nobody_else_is_reached(tmp_path: Path, text: str) -> None:
    """The proxy refuses every host that is not the fake's, a region of the real one included."""
    with fake_vertex(tmp_path) as vertex:
        program = "import requests; requests.get('https://us-central1-aiplatform.googleapis.com/v1')"
        done = programs.run(
            [sys.executable, "-c", program],
            env=vertex.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert "403 Forbidden" in done.stderr
    assert vertex.refused == ["CONNECT us-central1-aiplatform.googleapis.com:443"]
