"""A model is deployed only if it answers as it was judged: agreement, disagreement, failures, repetition."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator
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
from shardline.components.register import probe as probes
from shardline.components.register.component import model_deploy
from shardline.components.register.deployment import Deployment
from shardline.components.register.settings import Deploy
from shardline.components.vertex.client import Platform
from shardline.pipelines.cli.main import main
from shardline.trainer import progress
from shardline.trainer.errors import ModelError, PlatformError, RunError
from tests.contract.fake.api import ApiError
from tests.contract.fake.certificates import DEDICATED
from tests.contract.fake.services import PROJECT, PROJECT_NUMBER, FakeServices
from tests.contract.fake.vertex import LOCATION, FakeVertex
from tests.helpers.evaluations import EVALUATION
from tests.helpers.exports import golden_answers, write_export, write_golden

PLACE = f"projects/{PROJECT_NUMBER}/locations/{LOCATION}"
MODEL = f"{PLACE}/models/7@1"
ENDPOINT = f"{PLACE}/endpoints/9"
STEPS = Deploy(endpoint=ENDPOINT, machine_type="n1-standard-2", traffic_steps=(10, 50))
BEFORE = {"5": 60, "6": 40}


def wrong(instances: list[Any]) -> list[Any]:
    """Returns what a model with the labels in another order answers."""
    names = {"cat": "dog", "dog": "cat"}
    return [{**row, "label_name": names[row["label_name"]]} for row in golden_answers(instances)]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "_POLL_S", 0.01)
    monkeypatch.setattr(probes, "_PAUSE_S", 0)


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
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    with progress.sink(lambda event: lines.append(event.text)):
        yield lines


def deploy(directory: Path, settings: Deploy = STEPS, check: Callable[[], None] = lambda: None) -> str:
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


def test_traffic_moves_in_steps_after_a_probe_that_nobody_else_sees(
    services: FakeServices, tmp_path: Path, said: list[str]
) -> None:
    asked: list[tuple[str, str]] = []

    def serve(endpoint: str, model: DeployedModel, instances: list[Any]) -> list[Any]:
        asked.append((endpoint.rpartition("/")[2].partition("-")[0], model.id))
        return golden_answers(instances)

    services.serving.serve = serve
    assert deploy(tmp_path) == ENDPOINT

    # Without traffic it answers on an endpoint of its own; the last one before it stays, for a rollback.
    new = asked[0][1]
    assert asked[0][0] == "probe"
    assert ("9", new) in asked
    assert splits(services, new)[:3] == [
        {"new": 10, "5": 54, "6": 36},
        {"new": 50, "5": 30, "6": 20},
        {"new": 100},
    ]
    assert ids(services) == ["6", new]
    assert list(services.endpoints) == [ENDPOINT]
    assert "kept without traffic, at the price of machines: 6" in said
    machines = services.endpoints[ENDPOINT].deployed_models[-1].dedicated_resources
    assert machines.machine_spec.machine_type == "n1-standard-2"


def test_a_model_that_answers_otherwise_never_gets_traffic(services: FakeServices, tmp_path: Path) -> None:
    services.serving.serve = lambda endpoint, model, instances: wrong(instances)
    with pytest.raises(RunError, match=r"does not answer as it did when it was judged: .* instead of"):
        deploy(tmp_path)

    assert splits(services, "") == []
    assert ids(services) == ["5", "6", "8"]
    assert list(services.endpoints) == [ENDPOINT], "the endpoint of the probe is gone"


@pytest.mark.parametrize("share", [10, 50, 100])
def test_a_model_that_disagrees_on_the_way_is_taken_off(
    services: FakeServices, tmp_path: Path, share: int
) -> None:
    def serve(endpoint: str, model: DeployedModel, instances: list[Any]) -> list[Any]:
        given = services.endpoints[endpoint].traffic_split[model.id]
        return wrong(instances) if (endpoint, given) == (ENDPOINT, share) else golden_answers(instances)

    services.serving.serve = serve
    with pytest.raises(
        RunError,
        match=rf"does not answer as .*; the traffic of {ENDPOINT} is without it again: 5 60 %, 6 40 %$",
    ):
        deploy(tmp_path)

    assert dict(services.endpoints[ENDPOINT].traffic_split) == BEFORE
    assert ids(services) == ["5", "6", "8"]


#: Each call of an attempt, and those of them that are refused in every run of the tests.
CALLS = {"GetEndpoint": 13, "CreateEndpoint": 1, "DeployModel": 2, "Predict": 2, "UpdateEndpoint": 3}
USUAL = (("GetEndpoint", 0), ("CreateEndpoint", 0), ("DeployModel", 1), ("Predict", 1), ("UpdateEndpoint", 1))


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
    services: FakeServices, tmp_path: Path, said: list[str], method: str
) -> None:
    services.fail(method, code_pb2.PERMISSION_DENIED)
    deploy(tmp_path)

    assert any(line.startswith("warning: cannot ") and "it costs machines" in line for line in said)
    assert dict(services.endpoints[ENDPOINT].traffic_split).popitem()[1] == 100


@pytest.mark.parametrize("where", ["endpoints/probe-", "endpoints/9", "endpoints/run-"])
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
    alone = Deploy(display_name="digits", machine_type="n1-standard-2")
    with pytest.raises(PlatformError, match=r"^cannot deploy .*: the platform was not done after 3,600 s"):
        deploy(tmp_path, alone if "run" in where else STEPS)

    assert dict(services.endpoints[ENDPOINT].traffic_split) == BEFORE
    assert ids(services) == ["5", "6", "8"]
    assert list(services.endpoints) == [ENDPOINT]


class Killed(BaseException):
    """The end of a process, as a task sees it that can do nothing any more."""


@pytest.mark.parametrize("share", [10, 50, 100])
@pytest.mark.parametrize("answer", [golden_answers, wrong])
def test_an_attempt_goes_on_where_the_one_before_was_killed(
    services: FakeServices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: int, answer: Any
) -> None:
    """It asks the model, whose traffic nobody may have asked for, and knows the shares of before."""

    def killed(self: Deployment, name: str, *_: Any) -> None:
        if name == ENDPOINT and services.endpoints[ENDPOINT].traffic_split.get(self.id) == share:
            raise Killed

    with monkeypatch.context() as attempt:
        attempt.setattr(Deployment, "_probe", killed)
        attempt.setattr(Deployment, "_give_back", killed)
        with pytest.raises(Killed):
            deploy(tmp_path)
    new = ids(services)[-1]
    services.serving.traffic.clear()
    services.serving.serve = lambda endpoint, model, instances: answer(instances)
    if answer is golden_answers:
        deploy(tmp_path)
        assert [split["new"] for split in splits(services, new)][: 2 - (10, 50, 100).index(share)] == [
            step for step in (50, 100) if step > share
        ]
        assert dict(services.endpoints[ENDPOINT].traffic_split) == {new: 100}
        return
    with pytest.raises(RunError, match=r"is without it again: 5 60 %, 6 40 %$"):
        deploy(tmp_path)
    assert dict(services.endpoints[ENDPOINT].traffic_split) == BEFORE


def test_models_of_other_inputs_beside_it_are_not_it(services: FakeServices, tmp_path: Path) -> None:
    def serve(endpoint: str, model: DeployedModel, instances: list[Any]) -> list[Any]:
        if model.id in BEFORE:
            raise ApiError(code_pb2.INVALID_ARGUMENT, "Failed to process element: 0 key: y of instances")
        return golden_answers(instances)

    services.serving.serve = serve
    assert deploy(tmp_path) == ENDPOINT

    services.endpoints[ENDPOINT].traffic_split = {"6": 100}
    result = probe(ENDPOINT, str(tmp_path / "exported"), "--deployed-model", "6")
    assert result.exit_code == 1
    assert "answered none of 100 requests; the last that was refused: cannot ask" in result.output


@pytest.mark.parametrize("answer", [golden_answers, wrong])
def test_what_somebody_else_sets_meanwhile_stays(services: FakeServices, tmp_path: Path, answer: Any) -> None:
    def serve(endpoint: str, model: DeployedModel, instances: list[Any]) -> list[Any]:
        if endpoint != ENDPOINT:
            return golden_answers(instances)
        services.endpoints[endpoint].traffic_split = {"8": 100}
        return answer(instances)

    services.serving.serve = serve
    with pytest.raises(RunError, match=r"somebody else has changed .*, and it is left so: 8 100 %$"):
        deploy(tmp_path)

    assert dict(services.endpoints[ENDPOINT].traffic_split) == {"8": 100}
    assert ids(services) == ["5", "6", "8"], "it had no traffic any more"


def test_idle_models_that_cannot_be_seen_fail_nothing(
    services: FakeServices, tmp_path: Path, said: list[str]
) -> None:
    services.fail("GetEndpoint", times=CALLS["GetEndpoint"])
    services.fail("GetEndpoint", code_pb2.PERMISSION_DENIED)
    assert deploy(tmp_path) == ENDPOINT

    assert any(line.startswith("warning: cannot read the endpoint") for line in said)
    assert list(services.endpoints[ENDPOINT].traffic_split.values()) == [100]


def test_traffic_that_cannot_be_given_back_is_said_with_the_command(
    services: FakeServices, tmp_path: Path
) -> None:
    def serve(endpoint: str, model: DeployedModel, instances: list[Any]) -> list[Any]:
        if endpoint == ENDPOINT:
            services.fail("UpdateEndpoint", code_pb2.PERMISSION_DENIED)
            return wrong(instances)
        return golden_answers(instances)

    services.serving.serve = serve
    with pytest.raises(PlatformError, match=r"could not be given back .* --traffic-split=5=60,6=40$"):
        deploy(tmp_path)


@pytest.mark.parametrize("models", [[], [DeployedModel(id="5")]], ids=["empty", "without traffic"])
def test_the_first_model_of_an_endpoint_gets_all(
    services: FakeServices, tmp_path: Path, models: list[DeployedModel]
) -> None:
    services.endpoints[ENDPOINT].deployed_models, services.endpoints[ENDPOINT].traffic_split = models, {}
    deploy(tmp_path)

    assert splits(services, ids(services)[-1])[0] == {"new": 100}
    assert len(ids(services)) == len(models) + 1


def test_traffic_of_more_models_than_can_be_noted_is_left(services: FakeServices, tmp_path: Path) -> None:
    endpoint = services.endpoints[ENDPOINT]
    endpoint.deployed_models = [DeployedModel(id=f"{number:019d}") for number in range(10)]
    endpoint.traffic_split = {model.id: 10 for model in endpoint.deployed_models}
    with pytest.raises(RunError, match="10 models share the traffic"):
        deploy(tmp_path)

    assert "CreateEndpoint" not in services.calls


def test_a_model_without_traffic_stays_without(services: FakeServices, tmp_path: Path) -> None:
    deploy(tmp_path, Deploy(endpoint=ENDPOINT, machine_type="m-1", traffic_percent=0, keep=0))

    assert dict(services.endpoints[ENDPOINT].traffic_split) == BEFORE
    assert ids(services)[:2] == ["5", "6"]
    assert len(ids(services)) == 3


@pytest.mark.parametrize("answer", [golden_answers, wrong])
def test_a_new_endpoint_is_there_only_with_a_model_that_agrees(
    services: FakeServices, tmp_path: Path, answer: Any
) -> None:
    services.serving.serve = lambda endpoint, model, instances: answer(instances)
    settings = Deploy(display_name="digits", machine_type="n1-standard-2")
    if answer is wrong:
        with pytest.raises(RunError, match="does not answer as it did"):
            deploy(tmp_path, settings)
        assert list(services.endpoints) == [ENDPOINT]
        return
    name = deploy(tmp_path, settings)
    assert deploy(tmp_path, settings) == name, "an attempt that is repeated"

    made = services.endpoints[f"{PLACE}/endpoints/{name.rpartition('/')[2]}"]
    (model,) = made.deployed_models
    assert (made.display_name, made.labels["pipeline"]) == ("digits", "retrain")
    assert dict(made.traffic_split) == {model.id: 100}


def test_the_task_puts_out_the_endpoint(services: FakeServices, tmp_path: Path) -> None:
    exported = dsl.Model(uri=str(write_golden(tmp_path / "exported")))
    endpoint, numbers = dsl.Artifact(), {"traffic_steps": [10.0], "keep": 0.0, "traffic_percent": 50.0}
    model_deploy(
        exported=exported,
        model=dsl.Artifact(metadata={"resourceName": MODEL}),
        endpoint=endpoint,
        deploy={"endpoint": ENDPOINT, "machine_type": "n1-standard-2", **numbers},
        labels={},
        gate={"champion_uri": ""},
        encryption_key="",
        job_name="retrain-1",
        project=PROJECT,
        location=LOCATION,
    )

    assert endpoint.metadata["resourceName"] == ENDPOINT
    assert services.endpoints[ENDPOINT].traffic_split[ids(services)[-1]] == 50


@pytest.mark.parametrize("lost_at", [0, 10, 50])
def test_a_model_that_can_become_the_champion_no_more_gets_no_traffic(
    services: FakeServices, tmp_path: Path, lost_at: int
) -> None:
    """Another run publishes while this one deploys, in the moment when its model has `lost_at` percent."""
    exported = write_golden(write_export(tmp_path / "exported"))
    (exported / "evaluation.json").write_text(json.dumps(EVALUATION))

    def check() -> None:
        champion = str(tmp_path / "champion")
        if services.endpoints[ENDPOINT].traffic_split.get(ids(services)[-1], 0) == lost_at:
            publish(write_export(tmp_path / "other"), champion, quality="accuracy 0.9000")
        check_judged(exported, champion, "retrain-1")

    with pytest.raises(ModelError, match="was judged against no champion, ") as refused:
        deploy(tmp_path, check=check)

    assert ("is without it again" in str(refused.value)) == bool(lost_at)

    assert dict(services.endpoints[ENDPOINT].traffic_split) == BEFORE
    assert ids(services) == ["5", "6", "8"]


def probe(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["probe", *arguments, "--json"])


def test_the_command_asks_an_endpoint(services: FakeServices, tmp_path: Path) -> None:
    exported = str(write_golden(tmp_path / "exported"))
    result = probe(ENDPOINT, exported)

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["models"] in (["5", "6"], ["5"], ["6"])

    services.serving.serve = lambda endpoint, model, instances: (
        wrong(instances) if model.id == "6" else golden_answers(instances)
    )
    assert probe(ENDPOINT, exported, "--deployed-model", "5").exit_code == 0
    assert probe(ENDPOINT, exported, "--deployed-model", "6").exit_code == 1
    without = probe(ENDPOINT, exported, "--deployed-model", "8")
    assert without.exit_code == 2
    assert "'8' of" in without.output
    assert "some are 5 (60 %), 6 (40 %)" in without.output

    missing = probe(f"{PLACE}/endpoints/1", exported)
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
    assert "'elsewhere.example.com' is no host of Vertex AI" in refused.output
