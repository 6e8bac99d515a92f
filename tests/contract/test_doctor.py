"""`shardline doctor`: what it says of the platform, and of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from google.cloud import resourcemanager_v3
from google.cloud.storage import Client
from google.rpc import code_pb2

from shardline.pipelines import doctor
from shardline.pipelines.cli.main import main
from shardline.pipelines.doctor import Diagnosis, connect, examine_machine, examine_platform, find_image
from shardline.pipelines.settings import Environment, load_settings
from tests.contract.fake.services import PROJECT
from tests.contract.fake.vertex import BUCKET, LOCATION, FakeVertex

pytestmark = pytest.mark.timeout(120)

ACCOUNT = f"runs@{PROJECT}.iam.gserviceaccount.com"
IMAGE = f"{LOCATION}-docker.pkg.dev/{PROJECT}/shardline/shardline"
SETTINGS = f"""
image = "{IMAGE}:1"
[train]
replica_count = 4
machine_type = "n1-standard-8"
accelerator_type = "NVIDIA_TESLA_T4"
accelerator_count = 1
"""


@pytest.fixture
def project(vertex_environ: FakeVertex) -> Any:
    """A project in which everything is as a run needs it."""
    found = vertex_environ.services.project
    found.service_accounts[ACCOUNT] = True
    return found


def environment(**values: Any) -> Environment:
    given = {"pipeline_root": f"gs://{BUCKET}/runs", "service_account": ACCOUNT, **values}
    return Environment(**{"project": PROJECT, "location": LOCATION, **given})


def diagnoses(**values: Any) -> dict[str, Diagnosis]:
    return {item.what: item for item in examine_platform(environment(**values))}


def test_a_platform_that_is_ready_is_said_to_be(project: Any) -> None:
    assert {item.level for item in diagnoses().values()} == {"ok"}


@pytest.mark.parametrize(
    ("image", "level"),
    [
        (f"{IMAGE}:1", "ok"),
        (f"{IMAGE}:2", "error"),
        (f"{IMAGE}@sha256:{'0' * 64}", "error"),
        (IMAGE, "error"),  # of the tag latest
        ("shardline:0.1.0", "warning"),  # nobody's registry
    ],
)
def test_an_image_is_looked_for_in_artifact_registry(
    vertex_environ: FakeVertex, image: str, level: str
) -> None:
    vertex_environ.services.registry.add_image(f"{IMAGE}:1")

    assert find_image(image, environment(), connect()[0]).level == level


def test_what_is_missing_is_named_with_what_mends_it(project: Any) -> None:
    project.disabled_apis.add("logging.googleapis.com")
    project.denied |= {"aiplatform.schedules.create", "iam.serviceAccounts.actAs"}
    project.state = resourcemanager_v3.Project.State.DELETE_REQUESTED

    found = diagnoses()

    levels = {what: item.level for what, item in found.items() if item.level != "ok"}
    assert levels == dict.fromkeys(("project", "APIs", "permissions", "service account"), "error")
    assert found["project"].found == f"{PROJECT} is DELETE_REQUESTED"
    assert "gcloud services enable logging.googleapis.com" in found["APIs"].fix
    assert "aiplatform.schedules.create" in found["permissions"].found


@pytest.mark.parametrize(
    ("account", "words"),
    [
        (f"nobody@{PROJECT}.iam.gserviceaccount.com", "does not exist"),
        (f"old@{PROJECT}.iam.gserviceaccount.com", "is disabled"),
        ("", "use the project's default"),
    ],
)
def test_a_service_account_that_cannot_be_used(project: Any, account: str, words: str) -> None:
    project.service_accounts[f"old@{PROJECT}.iam.gserviceaccount.com"] = False

    assert words in diagnoses(service_account=account)["service account"].found


@pytest.mark.parametrize(
    ("root", "level", "words"),
    [
        ("gs://nowhere-at-all/x", "error", "does not exist"),
        ("", "warning", "not set"),
        ("gs://far-away/runs", "warning", "is in us"),
    ],
)
def test_a_bucket_that_cannot_be_used(project: Any, root: str, level: str, words: str) -> None:
    Client(project=PROJECT).create_bucket("far-away", location="US")
    found = diagnoses(pipeline_root=root)["bucket"]

    assert found.level == level
    assert words in found.found


def test_what_may_not_be_looked_at_is_a_warning_and_the_rest_goes_on(
    project: Any, vertex: FakeVertex
) -> None:
    permission = "resourcemanager.projects.get"
    words = f"Permission '{permission}' denied on resource '//cloudresourcemanager.googleapis.com/{PROJECT}'"
    vertex.services.fail("TestProjectPermissions", code_pb2.PERMISSION_DENIED, words)

    found = diagnoses()

    assert found["permissions"].level == "warning"
    assert permission in found["permissions"].found
    assert found["service account"].level == "ok"


def settings(tmp_path: Path) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text(SETTINGS)
    return path


@pytest.mark.parametrize(
    ("job", "network", "level"),
    [
        ("", "", "ok"),
        ("", "projects/1/global/networks/mine", "warning"),
        ('extra.psc_interface_config = { network_attachment = "mine" }', "", "warning"),
    ],
)
def test_it_is_said_who_reaches_the_replicas(
    project: Any, tmp_path: Path, job: str, network: str, level: str
) -> None:
    path = settings(tmp_path)
    path.write_text(f"{SETTINGS}\n[train.job]\n{job}\n")
    found = {item.what: item for item in examine_platform(environment(network=network), load_settings(path))}
    assert found["training network"].level == level
    assert ("mine" in found["training network"].found) == (level == "warning")


def test_without_credentials_it_is_said_what_was_not_looked_at(
    project: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    found = {item.what: item for item in examine_platform(environment(), load_settings(settings(tmp_path)))}

    assert [what for what, item in found.items() if item.level == "error"] == ["credentials"]
    assert "gcloud auth application-default login" in found["credentials"].fix
    assert found["not checked"].level == "warning"
    assert found["training network"].level == "ok"  # which settings say


def test_placeholders_are_no_project_and_this_machine_is_checked_all_the_same() -> None:
    example = Path(__file__).parents[2] / "settings" / "vertex.toml.example"
    result = CliRunner().invoke(main, ["doctor", "--settings", str(example)])

    assert result.exit_code == 2
    assert "where my-project is a placeholder" in result.stderr
    assert "toy job: not run" in result.stdout


def test_a_machine_without_the_packages_of_local_runs_is_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda package: None)
    found = {item.what: item for item in examine_machine(Path("runs"))}

    assert found["not checked"].found == "memory, network, toy job: psutil is not installed"
    assert found["not checked"].fix == "pip install 'shardline[local]'"
    assert "toy job" not in found


def test_the_command_checks_the_platform_and_this_machine(project: Any, tmp_path: Path) -> None:
    path = settings(tmp_path)
    path.write_text(f'{SETTINGS}\n[vertex]\nproject = "{PROJECT}"\nlocation = "{LOCATION}"\n')
    runs = tmp_path / "runs"

    result = CliRunner().invoke(main, ["doctor", "--settings", str(path), "--runs-dir", str(runs), "--json"])

    content = json.loads(result.stdout)
    assert result.exit_code == 1
    assert content["healthy"] is False
    levels = {item["what"]: item["level"] for item in content["findings"]}
    assert [what for what, level in levels.items() if level == "error"] == ["image"]
    assert "not run" in next(item["found"] for item in content["findings"] if item["what"] == "toy job")
    assert {"packages", "cores", "memory", "disk", "network"} <= set(levels)
    assert not runs.exists()
