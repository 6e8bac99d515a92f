"""A model is deployed only if it answers as it was judged: agreement, disagreement, failures, repetition."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from google.api_core.operation import Operation
from google.cloud.aiplatform_v1.types import DeployedModel, Endpoint, Model
from google.rpc import code_pb2
from kfp import dsl

from shardline.components.model_store.champions import check_judged, publish
from shardline.components.register import deployment
from shardline.components.register.component import model_deploy
from shardline.components.register.deployment import Deployment
from shardline.components.register.settings import Deploy
from shardline.components.vertex.client import Platform
from shardline.pipelines.cli.main import main
from shardline.trainer.base import progress
from shardline.trainer.base.errors import ModelError, PlatformError, RunError
from tests.contract.fake.certificates import DEDICATED
from tests.contract.fake.services import PROJECT, PROJECT_NUMBER, FakeServices
from tests.contract.fake.vertex import LOCATION, FakeVertex
from tests.helpers.evaluations import EVALUATION
from tests.helpers.exports import golden_answers, write_export, write_golden

PARENT = f"projects/{PROJECT_NUMBER}/locations/{LOCATION}"
MODEL = f"{PARENT}/models/7@1"
ENDPOINT = f"{PARENT}/endpoints/9"
DEPLOY = Deploy(endpoint=ENDPOINT, machine_type="n1-standard-2")
BEFORE = {"5": 60, "6": 40}


def wrong(instances: list[Any]) -> list[Any]:
    """Returns what a model with the labels in another order answers."""
    names = {"cat": "dog", "dog": "cat"}
    return [{**row, "label_name": names[row["label_name"]]} for row in golden_answers(instances)]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "_POLL_S", 0.01)


@pytest.fixture
def services(vertex_environ: FakeVertex) -> FakeServices:
    """A registered model, and an endpoint with two models that share the traffic and one without."""
    services = vertex_environ.services
    services.models[MODEL.partition("@")[0]] = [Model()]
    noon = datetime.datetime(2030, 1, 1, 12, tzinfo=datetime.UTC)
    present = [
        DeployedModel(id=key, create_time=noon + datetime.timedelta(hours=int(key)))
        for key in ("5", "6", "8")
    ]
    services.endpoints[ENDPOINT] = Endpoint(
        name=ENDPOINT, display_name="digits", deployed_models=present, traffic_split=BEFORE
    )
    services.serving.serve = lambda endpoint, model, instances: golden_answers(instances)
    return services


@pytest.fixture
def reports() -> Iterator[list[str]]:
    lines: list[str] = []
    with progress.sink(lambda event: lines.append(event.text)):
        yield lines


def deploy(directory: Path, settings: Deploy = DEPLOY, check: Callable[[], None] = lambda: None) -> str:
    """Does what the task does, as an attempt that knows nothing of the one before."""
    return Deployment(
        platform=Platform(PROJECT, LOCATION),
        settings=settings,
        model=MODEL,
        exported=write_golden(directory / "exported"),
        run="retrain-1",
        labels={"pipeline": "retrain"},
        check=check,
    ).deploy()


def ids(services: FakeServices) -> list[str]:
    return [model.id for model in services.endpoints[ENDPOINT].deployed_models]


def splits(services: FakeServices, new: str) -> list[dict[str, int]]:
    """Returns each split that the endpoint has had, with the id of the new model as "new"."""
    had = [split for name, split in services.serving.traffic if name == ENDPOINT]
    return [{"new" if key == new else key: share for key, share in split.items()} for split in had]


def test_traffic_moves_after_a_probe_that_nobody_else_sees(
    services: FakeServices, tmp_path: Path, reports: list[str]
) -> None:
    asked: list[tuple[str, str]] = []

    def serve(endpoint: str, model: DeployedModel, instances: list[Any]) -> list[Any]:
        asked.append((endpoint.rpartition("/")[2].partition("-")[0], model.id))
        return golden_answers(instances)

    services.serving.serve = serve
    assert deploy(tmp_path, replace(DEPLOY, traffic_percent=10)) == ENDPOINT

    # Without traffic it answers on an endpoint of its own; the last one before it stays, for a rollback.
    new = asked[0][1]
    assert asked[0][0] == "probe"
    assert {kind for kind, _ in asked} == {"probe"}
    assert splits(services, new)[0] == {"new": 10, "5": 54, "6": 36}
    assert ids(services) == ["5", "6", "8", new]
    assert list(services.endpoints) == [ENDPOINT]
    assert "kept without traffic, at the cost of machines: 8" in reports
    machines = services.endpoints[ENDPOINT].deployed_models[-1].dedicated_resources
    assert machines.machine_spec.machine_type == "n1-standard-2"


def test_a_model_that_answers_otherwise_never_gets_traffic(services: FakeServices, tmp_path: Path) -> None:
    services.serving.serve = lambda endpoint, model, instances: wrong(instances)
    with pytest.raises(RunError, match=r"does not answer as it did in validation: .* instead of"):
        deploy(tmp_path)

    assert splits(services, "") == []
    assert ids(services) == ["5", "6", "8"]
    assert list(services.endpoints) == [ENDPOINT], "the endpoint of the probe is gone"


#: Each call of an attempt, and those of them that are refused in every run of the tests.
CALLS = {"GetEndpoint": 7, "CreateEndpoint": 1, "DeployModel": 2, "Predict": 1, "UpdateEndpoint": 1}
USUAL = (("GetEndpoint", 0), ("CreateEndpoint", 0), ("DeployModel", 1), ("Predict", 0), ("UpdateEndpoint", 0))


@pytest.mark.parametrize(
    ("method", "number"),
    [
        pytest.param(method, number, marks=[] if (method, number) in USUAL else pytest.mark.matrix)
        for method, count in CALLS.items()
        for number in range(count)
    ],
)
def test_an_attempt_that_is_refused_changes_no_traffic_and_the_next_one_ends_well(
    services: FakeServices, tmp_path: Path, method: str, number: int
) -> None:
    if number:
        services.fail(method, times=number)  # lets them through
    services.fail(method, code_pb2.PERMISSION_DENIED)
    with pytest.raises(PlatformError, match=r"permission aiplatform\.endpoints"):
        deploy(tmp_path)

    assert dict(services.endpoints[ENDPOINT].traffic_split) == BEFORE
    deploy(tmp_path)
    assert services.endpoints[ENDPOINT].traffic_split[ids(services)[-1]] == 100
    assert len(ids(services)) == 2
    assert list(services.endpoints) == [ENDPOINT]


@pytest.mark.parametrize("method", ["CreateEndpoint", "DeployModel", "UpdateEndpoint", "UndeployModel"])
def test_an_answer_that_is_lost_makes_nothing_twice(
    services: FakeServices, tmp_path: Path, method: str
) -> None:
    services.fail(method, drop="answer")
    deploy(tmp_path)

    assert len(ids(services)) == 2
    assert list(services.endpoints) == [ENDPOINT]


@pytest.mark.parametrize("method", ["UndeployModel", "DeleteEndpoint"])
def test_machines_that_cannot_be_given_back_are_said(
    services: FakeServices, tmp_path: Path, reports: list[str], method: str
) -> None:
    services.fail(method, code_pb2.PERMISSION_DENIED)
    deploy(tmp_path)

    assert any(line.startswith("warning: cannot ") and "it costs machines" in line for line in reports)
    assert dict(services.endpoints[ENDPOINT].traffic_split).popitem()[1] == 100


@pytest.mark.parametrize("where", ["endpoints/probe-", "endpoints/9"])
def test_machines_that_do_not_start_in_time_are_taken_off(
    services: FakeServices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The future of Google's client raises the built-in TimeoutError."""
    result = Operation.result

    def late(self: Operation, *arguments: Any, **options: Any) -> Any:
        if where in self.operation.name and self.operation.response.type_url.endswith(".DeployModelResponse"):
            raise TimeoutError("Operation did not complete within the designated timeout.")
        return result(self, *arguments, **options)

    monkeypatch.setattr(Operation, "result", late)
    with pytest.raises(PlatformError, match=r"^cannot deploy .*: the platform was not done after 3,600 s"):
        deploy(tmp_path)

    assert dict(services.endpoints[ENDPOINT].traffic_split) == BEFORE
    assert ids(services) == ["5", "6", "8"]
    assert list(services.endpoints) == [ENDPOINT]


def test_idle_models_that_cannot_be_seen_fail_nothing(
    services: FakeServices, tmp_path: Path, reports: list[str]
) -> None:
    services.fail("GetEndpoint", times=CALLS["GetEndpoint"])
    services.fail("GetEndpoint", code_pb2.PERMISSION_DENIED)
    assert deploy(tmp_path) == ENDPOINT

    assert any(line.startswith("warning: cannot read the endpoint") for line in reports)
    assert list(services.endpoints[ENDPOINT].traffic_split.values()) == [100]


@pytest.mark.parametrize("models", [[], [DeployedModel(id="5")]], ids=["empty", "without traffic"])
def test_the_first_model_of_an_endpoint_gets_all(
    services: FakeServices, tmp_path: Path, models: list[DeployedModel]
) -> None:
    services.endpoints[ENDPOINT].deployed_models, services.endpoints[ENDPOINT].traffic_split = models, {}
    deploy(tmp_path)

    assert splits(services, ids(services)[-1])[0] == {"new": 100}
    assert len(ids(services)) == len(models) + 1


def test_a_model_without_traffic_stays_without(services: FakeServices, tmp_path: Path) -> None:
    deploy(tmp_path, Deploy(endpoint=ENDPOINT, machine_type="m-1", traffic_percent=0, keep=0))

    assert dict(services.endpoints[ENDPOINT].traffic_split) == BEFORE
    assert ids(services)[:2] == ["5", "6"]
    assert len(ids(services)) == 3


def test_the_task_puts_out_the_endpoint(services: FakeServices, tmp_path: Path) -> None:
    exported = dsl.Model(uri=str(write_golden(tmp_path / "exported")))
    endpoint, numbers = dsl.Artifact(), {"keep": 0.0, "traffic_percent": 50.0}
    model_deploy(
        exported=exported,
        model=dsl.Artifact(metadata={"resourceName": MODEL}),
        endpoint=endpoint,
        deploy={"endpoint": ENDPOINT, "machine_type": "n1-standard-2", **numbers},
        labels={},
        gate={"champion_uri": ""},
        job_name="retrain-1",
        project=PROJECT,
        location=LOCATION,
    )

    assert endpoint.metadata["resourceName"] == ENDPOINT
    assert services.endpoints[ENDPOINT].traffic_split[ids(services)[-1]] == 50


def test_a_model_that_can_become_the_champion_no_more_gets_no_traffic(
    services: FakeServices, tmp_path: Path
) -> None:
    """Another run publishes while this one deploys."""
    exported = write_golden(write_export(tmp_path / "exported"))
    (exported / "evaluation.json").write_text(json.dumps(EVALUATION))

    def check() -> None:
        champion = str(tmp_path / "champion")
        if len(ids(services)) > 3:
            publish(write_export(tmp_path / "other"), champion, quality="accuracy 0.9000")
        check_judged(exported, champion, "retrain-1")

    with pytest.raises(ModelError, match="was judged against no champion, "):
        deploy(tmp_path, check=check)

    assert dict(services.endpoints[ENDPOINT].traffic_split) == BEFORE
    assert ids(services) == ["5", "6", "8"]


def probe(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["probe", *arguments, "--json"])


def test_the_command_asks_an_endpoint(services: FakeServices, tmp_path: Path) -> None:
    exported = str(write_golden(tmp_path / "exported"))
    result = probe(ENDPOINT, exported)

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["models"] in (["5", "6"], ["5"], ["6"])

    services.serving.serve = lambda endpoint, model, instances: wrong(instances)
    assert probe(ENDPOINT, exported).exit_code == 1

    missing = probe(f"{PARENT}/endpoints/1", exported)
    assert missing.exit_code == 3
    assert "cannot read the endpoint" in missing.output
    services.endpoints[ENDPOINT].traffic_split = {}
    idle = probe(ENDPOINT, exported)
    assert idle.exit_code == 2
    assert "no deployed model of" in idle.output


def test_the_command_asks_a_dedicated_endpoint_at_its_own_host(
    services: FakeServices, tmp_path: Path
) -> None:
    endpoint = services.endpoints[ENDPOINT]
    endpoint.dedicated_endpoint_enabled, endpoint.dedicated_endpoint_dns = True, DEDICATED
    exported = str(write_golden(tmp_path / "exported"))

    assert probe(ENDPOINT, exported).exit_code == 0
    endpoint.dedicated_endpoint_dns = "elsewhere.example.com"
    refused = probe(ENDPOINT, exported)
    assert refused.exit_code == 2
    assert "'elsewhere.example.com' is not a host of Vertex AI" in refused.output
