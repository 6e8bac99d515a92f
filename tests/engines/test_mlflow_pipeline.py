"""What a pipeline's run logs to a real MLflow server, as its UI's own API shows it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest

from shardline.components.runs import tracked
from shardline.components.runs.causes import Explanation
from shardline.components.runs.record import RunRecord
from tests.helpers.jobs import eventually
from tests.helpers.mlflow_server import MlflowServer, pairs
from tests.helpers.replicas import ROOT

pytestmark = pytest.mark.timeout(420)

SHARDLINE = str(Path(sys.executable).with_name("shardline"))


def command(runs: Path, **parameters: Any) -> list[str]:
    given = [part for name, value in parameters.items() for part in ("--param", f"{name}={value}")]
    return [SHARDLINE, "run", "compiled/retrain.yaml", "--runs-dir", str(runs), *given]


def environment(server: MlflowServer, experiment: str) -> dict[str, str]:
    return {**os.environ, "MLFLOW_TRACKING_URI": server.uri, "MLFLOW_EXPERIMENT_NAME": experiment}


def run(server: MlflowServer, experiment: str, runs: Path, **parameters: Any) -> tuple[int, str]:
    done = subprocess.run(
        command(runs, **parameters),
        cwd=ROOT,
        env=environment(server, experiment),
        capture_output=True,
        text=True,
    )
    assert "cannot log to MLflow" not in done.stdout + done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def digits(mlflow_server: MlflowServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The parameters of a run of two replicas that has succeeded, logged to the experiment "digits"."""
    runs = tmp_path_factory.mktemp("digits")
    parameters = {"epochs": 2, "min_accuracy": 0.2, "history_uri": runs / "history"}
    code, output = run(mlflow_server, "digits", runs, **parameters)
    assert code == 0, output
    return {"runs": runs, **parameters}


def test_a_run_shows_what_people_compare(mlflow_server: MlflowServer, digits: dict[str, Any]) -> None:
    shown = mlflow_server.runs("digits")[0]
    run_id, tags = shown["info"]["run_id"], pairs(shown, "tags")
    record = json.loads((digits["runs"] / "latest" / "run.json").read_text())

    assert shown["info"]["status"] == "FINISHED"
    parameters = pairs(shown, "params")
    assert (parameters["epochs"], parameters["source"], parameters["seed"]) == ("2", "digits", "0")
    assert "no run is recorded" in tags["changes"]
    assert "scikit-learn" in tags["source fingerprint"]
    assert tags["verdict"] == "blessed"
    assert not {"blocked by", "failed step", "continues"} & tags.keys()
    assert tags["reason"].startswith("First champion, accuracy")
    metrics = pairs(shown, "metrics")
    assert metrics["test/accuracy"] == pytest.approx(record["metrics"]["accuracy"])
    # The chief, in a network of its own, has logged while it trained; the rehearsal is no run.
    assert [step for step, _ in mlflow_server.history(run_id, "val_accuracy")] == [1, 2]
    assert len(mlflow_server.runs("digits")) == 1
    (dataset,) = shown["inputs"]["dataset_inputs"]
    assert dataset["dataset"]["name"] == "digits"
    assert f"sha256:{dataset['dataset']['digest']}" == record["facts"]["dataset"][: 7 + 36]
    assert json.loads(dataset["dataset"]["profile"])["fingerprint"] == record["facts"]["dataset"]
    assert dataset["tags"] == [{"key": "mlflow.data.context", "value": "training"}]
    files = {"report.html", "model_card.html", "model_card.md", "evaluation.json", "blessing.json"}
    assert files | {"dataset_card.html"} <= {*mlflow_server.artifacts(run_id)}
    assert json.loads(mlflow_server.artifact(run_id, "blessing.json"))["blessed"] is True
    assert "<svg" in mlflow_server.artifact(run_id, "dataset_card.html")
    assert "retrain succeeded: blessed" in tags["mlflow.note.content"]
    (model,) = shown["outputs"]["model_outputs"]
    champion = mlflow_server.ask("registered-models/alias", name="digits", alias="champion")["model_version"]
    assert (champion["run_id"], champion["source"]) == (run_id, f"models:/{model['model_id']}")


def test_a_run_without_changes_ends_with_its_verdict(
    mlflow_server: MlflowServer, digits: dict[str, Any]
) -> None:
    parameters = {name: value for name, value in digits.items() if name != "runs"}
    code, output = run(mlflow_server, "digits", digits["runs"], **parameters)
    assert code == 0, output

    shown = mlflow_server.runs("digits")[-1]
    tags = pairs(shown, "tags")
    assert (shown["info"]["status"], tags["verdict"]) == ("FINISHED", "unchanged")
    assert "settings and code are those of retrain-" in tags["reason"]
    assert len(mlflow_server.runs("digits")) == 2


def test_a_failed_run_shows_why(mlflow_server: MlflowServer, tmp_path: Path) -> None:
    code, _ = run(mlflow_server, "failed", tmp_path, model="tests.helpers.models:uncompiled")
    assert code == 2

    (shown,) = mlflow_server.runs("failed")
    tags = pairs(shown, "tags")
    assert (shown["info"]["status"], tags["failed step"]) == ("FAILED", "rehearse")
    assert "returned a model that is not compiled" in tags["error"]
    assert tags["next step"]
    assert shown["inputs"]["dataset_inputs"]


def test_a_run_that_ends_before_its_first_task_has_done_anything(
    mlflow_server: MlflowServer, tmp_path: Path
) -> None:
    code, _ = run(mlflow_server, "refused-at-once", tmp_path, history_uri="/proc/none")
    assert code == 2

    (shown,) = mlflow_server.runs("refused-at-once")
    assert (shown["info"]["status"], pairs(shown, "tags")["failed step"]) == ("FAILED", "configure")


def test_a_run_that_is_stopped_is_killed(mlflow_server: MlflowServer, tmp_path: Path) -> None:
    mlflow_server.ask("experiments/create", {"name": "stopped"})
    started = subprocess.Popen(
        command(tmp_path, epochs=1000),
        cwd=ROOT,
        env=environment(mlflow_server, "stopped"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: mlflow_server.runs("stopped"), seconds=60)
        started.send_signal(signal.SIGINT)
        started.wait(60)
    finally:
        started.kill()
        started.wait()

    (shown,) = mlflow_server.runs("stopped")
    assert shown["info"]["status"] == "KILLED"


def test_a_continued_run_goes_on_in_the_same_one(
    mlflow_server: MlflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(mlflow_server, "continued").items():
        monkeypatch.setenv(name, value)
    explanation = Explanation(failed="train", error="killed", cause="", next_step="run it again")
    failed = RunRecord(name="a", pipeline="retrain", state="failed", explanation=explanation)
    tracked.log("retrain-a", methodcaller("parameters", {"epochs": 2}))
    tracked.end("retrain-a", failed)
    (before,) = mlflow_server.runs("continued")
    tracked.log("retrain-b", methodcaller("parameters", {"epochs": 3}), continues="retrain-a")
    (during,) = mlflow_server.runs("continued")
    tracked.end("retrain-b", RunRecord(name="b", pipeline="retrain", state="succeeded"))

    (shown,) = mlflow_server.runs("continued")
    states = [each["info"]["status"] for each in (before, during, shown)]
    assert states == ["FAILED", "RUNNING", "FINISHED"]
    tags = pairs(shown, "tags")
    assert (tags["continues"], tags["shardline.run"]) == ("retrain-a", "retrain-b")
    assert not {"failed step", "next step"} & tags.keys()
    assert pairs(shown, "params") == {"epochs": "2"}


def test_the_run_that_mlflow_was_given_is_the_one(
    mlflow_server: MlflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As open-source KFP does, which makes and nests it itself."""
    mlflow_server.ask("experiments/create", {"name": "given"})
    found = mlflow_server.ask("experiments/get-by-name", experiment_name="given")["experiment"]
    made = mlflow_server.ask("runs/create", {"experiment_id": found["experiment_id"], "run_name": "mine"})
    for name, value in environment(mlflow_server, "elsewhere").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_RUN_ID", made["run"]["info"]["run_id"])
    tracked.log("retrain-c", methodcaller("tags", {"verdict": "blessed"}))
    tracked.end("retrain-c", RunRecord(name="c", pipeline="retrain", state="succeeded"))

    (shown,) = mlflow_server.runs("given")
    assert shown["info"]["status"] == "RUNNING"  # who made it ends it
    assert pairs(shown, "tags")["verdict"] == "blessed"
