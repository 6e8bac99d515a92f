"""What runs log to a real MLflow server at their end, as its UI's own API shows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardline.components.runs.causes import Explanation
from shardline.components.runs.mlflow_log import log_run
from shardline.components.runs.record import RunRecord
from tests.helpers.datasets import write_dataset
from tests.helpers.mlflow_server import MlflowServer, pairs
from tests.helpers.replicas import ROOT

pytestmark = pytest.mark.timeout(420)

SHARDLINE = str(Path(sys.executable).with_name("shardline"))


def shardline(server: MlflowServer, experiment: str, *arguments: str, cwd: Path = ROOT) -> None:
    environ = {**os.environ, "MLFLOW_TRACKING_URI": server.uri, "MLFLOW_EXPERIMENT_NAME": experiment}
    done = subprocess.run([SHARDLINE, *arguments], cwd=cwd, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cannot log" not in done.stdout + done.stderr


def check_epochs(server: MlflowServer, run: dict[str, Any], metric: str) -> None:
    """Checks that two epochs were logged, the second one later."""
    asked = {"run_id": run["info"]["run_id"], "metric_key": metric}
    first, second = server.ask("metrics/get-history", **asked)["metrics"]
    first, second = sorted((first, second), key=lambda item: int(item["step"]))
    assert (int(first["step"]), int(second["step"])) == (1, 2)
    assert int(first["timestamp"]) < int(second["timestamp"])


def test_a_pipeline_logs_what_people_compare(mlflow_server: MlflowServer, tmp_path: Path) -> None:
    given = ("--param", "epochs=2", "--param", "min_accuracy=0.2")
    shardline(mlflow_server, "digits", "run", "compiled/retrain.yaml", "--runs-dir", str(tmp_path), *given)
    record = json.loads((tmp_path / "latest" / "run.json").read_text())

    (shown,) = mlflow_server.runs("digits")
    run_id, tags, parameters = shown["info"]["run_id"], pairs(shown, "tags"), pairs(shown, "params")
    assert shown["info"]["status"] == "FINISHED"
    assert (parameters["epochs"], parameters["source"], parameters["seed"]) == ("2", "digits", "0")
    assert tags["verdict"] == "blessed"
    assert "retrain succeeded: blessed" in tags["mlflow.note.content"]
    assert pairs(shown, "metrics")["test/accuracy"] == pytest.approx(record["metrics"]["accuracy"])
    check_epochs(mlflow_server, shown, "val_accuracy")
    (dataset,) = shown["inputs"]["dataset_inputs"]
    assert json.loads(dataset["dataset"]["profile"])["fingerprint"] == record["facts"]["dataset"]
    files = {"report.html", "blessing.json", "saved_model"}
    assert {f"model/{name}" for name in files} <= {*mlflow_server.artifacts(run_id, "model")}
    assert json.loads(mlflow_server.artifact(run_id, "model/blessing.json"))["blessed"] is True


def test_a_training_without_a_pipeline_is_logged(mlflow_server: MlflowServer, tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", records={"train": 32, "validation": 8, "test": 8})
    options = ("--epochs", "2", "--per-replica-batch-size", "4")
    shardline(mlflow_server, "train", "train", "data", "out", "--replicas", "2", "--", *options, cwd=tmp_path)
    (shown,) = mlflow_server.runs("train")
    assert (shown["info"]["status"], shown["info"]["run_name"]) == ("FINISHED", str(tmp_path / "out"))
    check_epochs(mlflow_server, shown, "val_loss")
    kept = (tmp_path / "out" / "history.csv").read_bytes().decode()
    assert mlflow_server.artifact(shown["info"]["run_id"], "training/history.csv") == kept


def test_a_failed_run_shows_why_and_is_one_run_however_often_it_is_logged(
    mlflow_server: MlflowServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server.uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "failed")
    explanation = Explanation(failed="train", error="x" * 9000, cause="", next_step="run it again")
    parameters = {"a:b/c?": 1, "empty": "", "long": "y" * 9000}
    failed = RunRecord(
        name="a", pipeline="retrain", state="failed", explanation=explanation, parameters=parameters
    )
    for _ in range(2):
        log_run("retrain-o'a", failed)
    assert capfd.readouterr() == ("", "")
    (shown,) = mlflow_server.runs("failed")
    tags = pairs(shown, "tags")
    assert (shown["info"]["status"], tags["failed step"]) == ("FAILED", "train")
    assert tags["next step"] == "run it again"
    assert pairs(shown, "params") == {"a_b/c_": "1", "long": "y" * 5000}
