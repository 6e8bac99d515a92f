"""The fake's registry, logs, secrets and tuning jobs, and the failures it makes, as the clients see them."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import google.auth
import pytest
import requests
import yaml
from google.api_core import exceptions, retry
from google.auth.transport.requests import AuthorizedSession
from google.cloud import aiplatform_v1, secretmanager, storage
from google.cloud.logging_v2.services.logging_service_v2 import LoggingServiceV2Client
from google.rpc import code_pb2
from kfp import compiler
from kfp.registry import RegistryClient

from tests.contract.conftest import enter
from tests.contract.fake.pipelines import LocalRuns
from tests.contract.fake.requests import PARENT, SPEC, job
from tests.contract.fake.services import PROJECT
from tests.contract.fake.vertex import BUCKET, LOCATION, FakeVertex, fake_vertex
from tests.helpers import toy_pipeline
from tests.helpers.execution import without_tensorflow

pytestmark = pytest.mark.timeout(120)

HOST = f"https://{LOCATION}-kfp.pkg.dev/{PROJECT}/pipelines"
ENDPOINT = {"api_endpoint": f"{LOCATION}-aiplatform.googleapis.com"}


def pipelines() -> aiplatform_v1.PipelineServiceClient:
    return aiplatform_v1.PipelineServiceClient(client_options=ENDPOINT)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(SPEC))
    return path


def test_a_pipeline_is_uploaded_and_tags_are_moved(
    vertex_environ: FakeVertex, toy: Path, tmp_path: Path
) -> None:
    client = RegistryClient(HOST)
    package, first = client.upload_pipeline(str(toy), tags=["latest", "v1"])
    assert (package, first[:7]) == ("toy", "sha256:")
    assert client.upload_pipeline(str(toy)) == (package, first)
    toy.write_text(yaml.safe_dump({**SPEC, "sdkVersion": "2"}))
    _, second = client.upload_pipeline(str(toy), tags="latest")

    assert {item["name"].rpartition("/")[2] for item in client.list_versions("toy")} == {first, second}
    tags = {item["name"].rpartition("/")[2]: item["version"] for item in client.list_tags("toy")}
    assert {tag: version.rpartition("/")[2] for tag, version in tags.items()} == {
        "latest": second,
        "v1": first,
    }
    client.create_tag("toy", first, "good")
    client.update_tag("toy", second, "good")
    assert client.get_tag("toy", "good")["version"].endswith(second)
    assert client.get_version("toy", second)["relatedTags"]
    with pytest.raises(requests.HTTPError, match="409"):
        client.create_tag("toy", first, "good")
    client.delete_tag("toy", "good")
    with pytest.raises(requests.HTTPError, match="404"):
        client.get_tag("toy", "good")
    path = client.download_pipeline("toy", tag="v1", file_name=str(tmp_path / "down.yaml"))
    assert yaml.safe_load(Path(path).read_text()) == SPEC

    template = job(pipeline_spec={}, template_uri=f"{HOST}/toy/v1")
    made = pipelines().create_pipeline_job(parent=PARENT, pipeline_job=template)
    assert made.template_metadata.version == first
    assert made.pipeline_spec["pipelineInfo"] == {"name": "toy"}


def test_logs_are_found(vertex_environ: FakeVertex) -> None:
    logs = vertex_environ.services.logs
    noon = datetime.datetime(2030, 1, 1, 12, tzinfo=datetime.UTC)
    for number, severity in enumerate(["INFO", "WARNING", "ERROR"]):
        at = noon + datetime.timedelta(minutes=number)
        names = {"job_id": str(number), "task_name": "workerpool0-0"}
        logs.add(f"line {number}", ("ml_job", names), severity=severity, at=at)

    def found(text: str, **request: Any) -> list[str]:
        where = {"resource_names": [f"projects/{PROJECT}"], "filter": text, **request}
        entries = LoggingServiceV2Client().list_log_entries(request=where)
        return [entry.json_payload["message"] for entry in entries]

    assert found('resource.type="ml_job"') == ["line 0", "line 1", "line 2"]
    assert found('resource.labels.job_id=("0" OR "2")', page_size=1) == ["line 0", "line 2"]
    assert found("severity>=WARNING", order_by="timestamp desc") == ["line 2", "line 1"]
    assert found('timestamp>"2030-01-01T12:00:00Z" AND NOT severity=ERROR') == ["line 1"]
    assert found('jsonPayload.message:"line" resource.labels.task_name="x"') == []


def test_a_secret_is_read(vertex_environ: FakeVertex) -> None:
    name = f"projects/{PROJECT}/secrets/hook/versions/latest"
    vertex_environ.services.project.secrets[name] = "https://hooks/1"
    client = secretmanager.SecretManagerServiceClient()
    assert client.access_secret_version(name=name).payload.data == b"https://hooks/1"
    with pytest.raises(exceptions.NotFound):
        client.access_secret_version(name=f"{name}x")


def tuning_job(**changes: Any) -> dict[str, Any]:
    pool = {
        "machine_spec": {"machine_type": "n1-standard-4"},
        "replica_count": 1,
        "container_spec": {"image_uri": "image:1"},
    }
    study = {
        "metrics": [{"metric_id": "accuracy", "goal": "MAXIMIZE"}],
        "parameters": [
            {"parameter_id": "rate", "double_value_spec": {"min_value": 0.1, "max_value": 1}},
            {"parameter_id": "size", "discrete_value_spec": {"values": [16, 32]}},
        ],
    }
    spec = {"worker_pool_specs": [pool]}
    return {
        **{"display_name": "tune", "study_spec": study, "max_trial_count": 2, "parallel_trial_count": 1},
        **{"trial_job_spec": spec, **changes},
    }


def test_a_tuning_job_has_trials(vertex_environ: FakeVertex) -> None:
    client = aiplatform_v1.JobServiceClient(client_options=ENDPOINT)
    made = client.create_hyperparameter_tuning_job(parent=PARENT, hyperparameter_tuning_job=tuning_job())
    found = client.get_hyperparameter_tuning_job(name=made.name)
    assert found.state == aiplatform_v1.JobState.JOB_STATE_SUCCEEDED
    parameters = [{item.parameter_id: item.value for item in trial.parameters} for trial in found.trials]
    assert parameters == [
        {"rate": pytest.approx(0.325), "size": 16},
        {"rate": pytest.approx(0.775), "size": 32},
    ]
    with pytest.raises(exceptions.InvalidArgument, match="parallel_trial_count"):
        client.create_hyperparameter_tuning_job(
            parent=PARENT, hyperparameter_tuning_job=tuning_job(parallel_trial_count=3)
        )


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (
            code_pb2.PERMISSION_DENIED,
            exceptions.Forbidden,
            "Permission 'aiplatform.pipelineJobs.list' denied",
        ),
        (code_pb2.RESOURCE_EXHAUSTED, exceptions.TooManyRequests, "Quota exceeded for quota metric"),
        (code_pb2.NOT_FOUND, exceptions.NotFound, "not found"),
        (code_pb2.UNAVAILABLE, exceptions.ServiceUnavailable, "currently unavailable"),
    ],
)
@pytest.mark.parametrize("transport", ["grpc", "rest"])
def test_calls_fail_once_as_the_platform_fails(
    vertex_environ: FakeVertex, transport: str, code: int, error: type[Exception], words: str
) -> None:
    vertex_environ.services.fail("ListPipelineJobs", code)
    client = aiplatform_v1.PipelineServiceClient(client_options=ENDPOINT, transport=transport)
    with pytest.raises(error, match=words) as caught:
        client.list_pipeline_jobs(parent=PARENT)
    if code == code_pb2.PERMISSION_DENIED:
        assert caught.value.reason == "IAM_PERMISSION_DENIED"  # type: ignore[attr-defined]
    assert not list(client.list_pipeline_jobs(parent=PARENT))


@pytest.mark.parametrize(("drop", "made"), [("request", 0), ("answer", 1)])
@pytest.mark.parametrize("transport", ["grpc", "rest"])
def test_a_connection_is_lost_before_or_after_the_work(
    vertex_environ: FakeVertex, transport: str, drop: Any, made: int
) -> None:
    client = aiplatform_v1.PipelineServiceClient(client_options=ENDPOINT, transport=transport)
    list(client.list_pipeline_jobs(parent=PARENT))
    vertex_environ.services.fail("CreatePipelineJob", drop=drop)
    lost = (exceptions.ServiceUnavailable, requests.RequestException)
    with pytest.raises(lost):
        client.create_pipeline_job(parent=PARENT, pipeline_job=job())
    assert len(vertex_environ.services.pipeline_jobs) == made
    # gRPC may still be closing the connection that was lost.
    again = retry.Retry(retry.if_exception_type(exceptions.ServiceUnavailable), initial=0.05, timeout=30)
    assert len(list(client.list_pipeline_jobs(parent=PARENT, retry=again))) == made


def test_an_upload_is_cut_off(vertex_environ: FakeVertex, toy: Path) -> None:
    with toy.open("a") as file:
        file.write("#" * 1_000_000)
    vertex_environ.services.fail("UploadPipeline", drop="request")
    client = RegistryClient(HOST)
    with pytest.raises(requests.ConnectionError):
        client.upload_pipeline(str(toy))
    assert not vertex_environ.services.registry.packages
    client.upload_pipeline(str(toy))


def test_a_token_expires(vertex_environ: FakeVertex, toy: Path) -> None:
    client = RegistryClient(HOST)
    client.upload_pipeline(str(toy))
    vertex_environ.services.tokens.expire()
    # kfp's client does not ask for another one; google-auth's own session does.
    with pytest.raises(requests.HTTPError, match="401"):
        client.list_tags("toy")
    session = AuthorizedSession(client._auth)
    assert session.get(f"{HOST}/toy/nosuch").status_code == 404
    assert client.list_tags("toy") == []


def test_a_pipeline_job_runs_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.Compiler().compile(toy_pipeline.toy, str(tmp_path / "toy.yaml"))
    spec = yaml.safe_load((tmp_path / "toy.yaml").read_text())
    runs = LocalRuns(tmp_path / "jobs", {"PYTHONPATH": without_tensorflow(tmp_path)})
    with fake_vertex(tmp_path, run_pipeline=runs) as vertex:
        enter(vertex.environment, monkeypatch)
        client = pipelines()
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


def test_the_project_says_what_it_has(vertex_environ: FakeVertex) -> None:
    services = vertex_environ.services
    services.project.denied = {"aiplatform.schedules.create"}
    services.project.disabled_apis = {"logging.googleapis.com"}
    email = "runs@acme-vision.iam.gserviceaccount.com"
    services.project.service_accounts = {email: True}
    services.project.quotas = {"custom_model_training_cpus": 42}
    services.registry.add_image(f"{LOCATION}-docker.pkg.dev/{PROJECT}/images/a/train:v1")
    session = AuthorizedSession(google.auth.default()[0])

    def ask(verb: str, address: str, **content: Any) -> dict[str, Any]:
        response = session.request(verb, f"https://{address}", **content)
        assert response.status_code in (200, 404), response.text
        return dict(response.json())

    project = f"cloudresourcemanager.googleapis.com/v3/projects/{PROJECT}"
    assert ask("GET", project)["projectId"] == PROJECT
    wanted = {"permissions": ["aiplatform.schedules.create", "aiplatform.pipelineJobs.create"]}
    granted = ask("POST", f"{project}:testIamPermissions", json=wanted)
    assert granted == {"permissions": ["aiplatform.pipelineJobs.create"]}
    account = f"iam.googleapis.com/v1/projects/-/serviceAccounts/{email}"
    assert "disabled" not in ask("GET", account)
    assert ask("GET", f"{account}x")["error"]["status"] == "NOT_FOUND"
    usage = f"serviceusage.googleapis.com/v1/projects/{PROJECT}/services:batchGet"
    names = [f"projects/{PROJECT}/services/{api}.googleapis.com" for api in ("logging", "iam")]
    states = [item["state"] for item in ask("GET", usage, params={"names": names})["services"]]
    assert states == ["DISABLED", "ENABLED"]
    metric = "aiplatform.googleapis.com%2Fcustom_model_training_cpus"
    quota = ask(
        "GET",
        f"serviceusage.googleapis.com/v1beta1/projects/{PROJECT}/services/aiplatform.googleapis.com"
        f"/consumerQuotaMetrics/{metric}",
    )
    assert quota["consumerQuotaLimits"][0]["quotaBuckets"][1]["effectiveLimit"] == "42"
    image = f"projects/{PROJECT}/locations/{LOCATION}/repositories/images/packages/a%2Ftrain/tags/v1"
    assert "sha256:" in ask("GET", f"artifactregistry.googleapis.com/v1/{image}")["version"]
    bucket = storage.Client().get_bucket(BUCKET)
    assert bucket.location == LOCATION.upper()
    assert bucket.test_iam_permissions(["storage.objects.get"]) == ["storage.objects.get"]
