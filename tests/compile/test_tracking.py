"""Settings of a tracking server, and what the compiled pipelines tell their tasks of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardline.components.runs.tracked import SECRET_VARIABLE, TOKEN_VARIABLE, TrackingSettings, sign_in
from shardline.components.vertex.job import TaskMachine
from shardline.pipelines import settings as environments
from shardline.pipelines.compile import compile_pipeline
from shardline.trainer.base.errors import PlatformError, SettingsError
from tests.helpers.checks import check_pipeline

ROOT = Path(__file__).resolve().parents[2]
SECRET = "projects/my-project/secrets/mlflow/versions/latest"
TRACKING = TrackingSettings(
    mlflow_uri="https://mlflow.corp:8443/ml", experiment="digits", token_secret=SECRET
)
VARIABLES = {
    "MLFLOW_TRACKING_URI": "https://mlflow.corp:8443/ml",
    "MLFLOW_EXPERIMENT_NAME": "digits",
    SECRET_VARIABLE: SECRET,
}


def variables(container: dict[str, Any]) -> dict[str, str]:
    """Returns a container's variables, but for those that each task has of its own."""
    found = {item["name"]: item["value"] for item in container.get("env", [])}
    return {name: value for name, value in found.items() if "MLFLOW" in name}


def pools(node: Any) -> list[dict[str, Any]]:
    """Returns the containers of all worker pools in a compiled pipeline, as values or as text."""
    if isinstance(node, dict):
        own = [node["container_spec"]] if "container_spec" in node else []
        return own + [found for value in node.values() for found in pools(value)]
    if isinstance(node, list):
        return [found for value in node for found in pools(value)]
    return []


STUDY = {
    "metric": "val_accuracy",
    "parameter": [{"name": "learning_rate", "type": "double", "min": 0.001, "max": 0.1}],
}


@pytest.mark.parametrize("study", [None, json.dumps(STUDY)], ids=["retrain", "tune"])
def test_every_task_and_every_pool_has_the_server_and_no_secret(study: str | None) -> None:
    local = environments.load(ROOT / "settings" / "local.toml")
    settings = replace(local, tracking=TRACKING, validate=TaskMachine(machine_type="n1-standard-8"))
    text = compile_pipeline(settings, study)

    spec = yaml.safe_load(text)
    executors = spec["deploymentSpec"]["executors"].values()
    own = [item["container"] for item in executors if item["container"]["image"] == local.image]
    assert len(own) > 3
    assert all(variables(container) == VARIABLES for container in own)
    found = pools(spec)
    assert len(found) >= 4  # chief and workers of the training, rehearsal, validation
    assert all(variables(container) == VARIABLES for container in found)
    assert TOKEN_VARIABLE not in text
    assert check_pipeline(spec) == []


def test_without_the_table_nothing_is_said_of_a_server() -> None:
    assert "MLFLOW" not in json.dumps(yaml.safe_load((ROOT / "compiled" / "retrain.yaml").read_text()))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"mlflow_uri": "https://me:hunter2@mlflow.corp"},
            "a token's secret is token_secret",
        ),
        (
            {"mlflow_uri": "https://hunter2@mlflow.corp"},
            "a token's secret is token_secret",
        ),
        ({"mlflow_uri": "mlflow.corp:5000"}, "mlflow_uri must be http"),
        ({"mlflow_uri": "sqlite:///runs.db"}, "mlflow_uri must be http"),
        ({"mlflow_uri": "https://"}, "mlflow_uri must be http"),
        ({"experiment": "digits"}, "mlflow_uri must be http"),
        ({"mlflow_uri": "https://mlflow.corp/?token=hunter2"}, "mlflow_uri must be http"),
        ({"mlflow_uri": "https://mlflow.corp", "token_secret": "hunter2"}, "token_secret must be projects/"),
    ],
)
def test_a_secret_or_a_wrong_address_is_refused_and_not_repeated(given: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as refused:
        TrackingSettings(**given)
    assert "hunter2" not in str(refused.value)


def test_the_table_of_a_file_is_read_and_excludes_emails(tmp_path: Path) -> None:
    local = (ROOT / "settings" / "local.toml").read_text()
    lines = "[tracking]", *(f'{name} = "{value}"' for name, value in vars(TRACKING).items()), ""
    table = "\n".join(["", *lines])
    path = tmp_path / "own.toml"
    path.write_text(local + table)
    assert environments.load(path).tracking == TRACKING
    path.write_text(f'{local}{table}[notify]\nemails = ["a@b.c"]\n')
    with pytest.raises(SettingsError, match=r"notify\.emails takes the place of .*, \[tracking\]"):
        environments.load(path)


def test_the_token_is_in_the_environment_of_the_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "shardline.components.runs.tracked.read_secret", lambda name: asked.append(name) or "T0PS3CRET"
    )
    environ = dict(VARIABLES)
    sign_in(environ)
    sign_in(environ)  # there is one now
    assert environ == {**VARIABLES, TOKEN_VARIABLE: "T0PS3CRET"}
    untracked = {SECRET_VARIABLE: SECRET}
    sign_in(untracked)
    assert untracked == {SECRET_VARIABLE: SECRET}
    assert asked == [SECRET]


def test_a_secret_that_cannot_be_read_costs_no_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str) -> str:
        raise PlatformError(f"cannot read the secret {name}: permission denied")

    monkeypatch.setattr("shardline.components.runs.tracked.read_secret", refuse)
    environ = dict(VARIABLES)
    sign_in(environ)
    assert environ == VARIABLES
    assert (
        f"no token for MLflow: cannot read the secret {SECRET}: permission denied" in capsys.readouterr().out
    )
