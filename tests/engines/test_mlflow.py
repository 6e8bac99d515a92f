"""What runs log to a real MLflow server at their end; `make engines` installs SHARDLINE_TEST_MLFLOW."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardline.components.runs.causes import Explanation
from shardline.components.runs.mlflow_log import log_run
from shardline.components.runs.run import Run
from tests.helpers.datasets import write_dataset
from tests.helpers.jobs import eventually
from tests.helpers.replicas import ROOT, free_ports

pytestmark = pytest.mark.timeout(420)

SHARDLINE = str(Path(sys.executable).with_name("shardline"))
PROGRAM = os.environ.get("SHARDLINE_TEST_MLFLOW", "")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server, which starts in ten seconds."""
    if not Path(PROGRAM).is_file():
        pytest.skip("SHARDLINE_TEST_MLFLOW names no mlflow: make engines")
    directory, port = tmp_path_factory.mktemp("mlflow"), str(free_ports(1)[0])
    places = ("--backend-store-uri", f"sqlite:///{directory}/db", "--artifacts-destination", f"{directory}/a")
    # The shell ends its group, with the server, when standard input ends: also if its owner was killed.
    shell = ["sh", "-c", '"$@" & read -r _; kill -9 0', "sh", PROGRAM, "server", "--port", port]
    log, environ = (directory / "log").open("wb"), {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (
        log,
        subprocess.Popen(
            [*shell, "--workers", "1", *places],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=directory,
            env={**os.environ, **environ},
            start_new_session=True,
        ) as process,
    ):

        def answers() -> bool:
            try:
                return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5))
            except OSError:
                return False

        try:
            eventually(answers, seconds=90)
            yield f"http://127.0.0.1:{port}"
        finally:
            assert process.stdin is not None
            process.stdin.close()


def shardline(server: str, experiment: str, *arguments: str, cwd: Path = ROOT) -> None:
    environ = {**os.environ, "MLFLOW_TRACKING_URI": server, "MLFLOW_EXPERIMENT_NAME": experiment}
    done = subprocess.run([SHARDLINE, *arguments], cwd=cwd, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cannot log" not in done.stdout + done.stderr


def logged(server: str, experiment: str) -> tuple[Any, Any]:
    """Returns MLflow's client, and the only run of an experiment."""
    from mlflow import MlflowClient

    client = MlflowClient(server)
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return client, run


def check_epochs(client: Any, run: Any, metric: str) -> None:
    """Checks that two epochs were logged, the second one later."""
    found = client.get_metric_history(run.info.run_id, metric)
    first, second = sorted(found, key=lambda each: each.step)
    assert (first.step, second.step) == (1, 2)
    assert first.timestamp < second.timestamp


def test_a_pipeline_logs_what_people_compare(server: str, tmp_path: Path) -> None:
    given = ("--param", "epochs=2", "--param", 'rules=["accuracy >= 0.2"]')
    shardline(server, "digits", "run", "compiled/retrain.yaml", "--runs-dir", str(tmp_path), *given)
    record = json.loads((tmp_path / "latest" / "run.json").read_text())

    client, run = logged(server, "digits")
    parameters, tags = run.data.params, run.data.tags
    assert run.info.status == "FINISHED"
    assert (parameters["epochs"], parameters["source"], parameters["seed"]) == ("2", "digits", "0")
    assert tags["verdict"] == "blessed"
    assert "retrain succeeded: blessed" in tags["mlflow.note.content"]
    assert run.data.metrics["test/accuracy"] == pytest.approx(record["metrics"]["accuracy"])
    check_epochs(client, run, "val_accuracy")
    (item,) = run.inputs.dataset_inputs
    assert json.loads(item.dataset.profile)["fingerprint"] == record["facts"]["dataset"]
    kept = {each.path for each in client.list_artifacts(run.info.run_id, "model")}
    assert {f"model/{name}" for name in ("report.html", "blessing.json", "saved_model")} <= kept


def test_a_training_without_a_pipeline_is_logged(server: str, tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", records={"train": 32, "validation": 8, "test": 8})
    options = ("--epochs", "2", "--per-replica-batch-size", "4")
    shardline(server, "train", "train", "data", "out", "--replicas", "2", "--", *options, cwd=tmp_path)
    client, run = logged(server, "train")
    assert (run.info.status, run.info.run_name) == ("FINISHED", str(tmp_path / "out"))
    check_epochs(client, run, "val_loss")
    copy = client.download_artifacts(run.info.run_id, "training/history.csv", str(tmp_path))
    assert Path(copy).read_bytes() == (tmp_path / "out" / "history.csv").read_bytes()


def test_a_failed_run_shows_why_and_is_one_run_however_often_it_is_logged(
    server: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "failed")
    explanation = Explanation(failed="train", error="x" * 9000, cause="", next_step="run it again")
    parameters = {"a:b/c?": 1, "empty": "", "long": "y" * 9000}
    failed = Run(name="a", pipeline="retrain", state="failed", explanation=explanation, parameters=parameters)
    for _ in range(2):
        log_run("retrain-o'a", failed)
    assert capfd.readouterr() == ("", "")
    _, run = logged(server, "failed")
    assert (run.info.status, run.data.tags["failed step"]) == ("FAILED", "train")
    assert run.data.tags["next step"] == "run it again"
    assert run.data.params == {"a_b/c_": "1", "long": "y" * 5000}
