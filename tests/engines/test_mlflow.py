"""What trainings log to a real MLflow server, as its UI's own API shows it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from shardline.components.tune.study import plan
from shardline.trainer.base import tracking
from shardline.trainer.base.errors import EXIT_RESTART, SettingsError
from shardline.trainer.base.tracking import open_run
from tests.helpers import mlflow_server as servers
from tests.helpers import programs, replicas
from tests.helpers.datasets import write_dataset
from tests.helpers.fitting import classes, classifier, fitted
from tests.helpers.jobs import eventually
from tests.helpers.mlflow_server import MlflowServer, pairs

pytestmark = pytest.mark.timeout(180)

EPOCHS = [1, 2, 3, 4]
SHARDLINE = str(Path(sys.executable).with_name("shardline"))


@pytest.fixture
def experiment(
    mlflow_server: MlflowServer, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> str:
    """Name of an experiment of the test's own, to which all it runs are logged."""
    name = request.node.name
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server.uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", name)
    return str(name)


def steps(server: MlflowServer, run: dict[str, Any], metric: str) -> list[int]:
    return [step for step, _ in server.history(run["info"]["run_id"], metric)]


def status(run: dict[str, Any]) -> str:
    return str(run["info"]["status"])


def test_a_run_of_a_name_is_found_again_with_its_children(mlflow_server: MlflowServer) -> None:
    environ = {"MLFLOW_TRACKING_URI": mlflow_server.uri, "MLFLOW_EXPERIMENT_NAME": "names"}
    run, child = open_run("o'run", environ=environ), open_run("o'run", child="trial 1", environ=environ)
    assert run
    assert child
    run.parameters({"epochs": 3})
    run.metrics({"loss": 0.5}, 1)
    run.close("FINISHED")
    child.close("FAILED")
    again = open_run("o'run", environ=environ)
    fresh = open_run("o'run", fresh=True, environ=environ)
    assert again
    assert fresh
    assert again.id == run.id != fresh.id
    shown, nested, other = mlflow_server.runs("names")
    assert [nested] == mlflow_server.runs("names", parent=run.id)
    assert (shown["info"]["run_name"], nested["info"]["run_name"]) == ("o'run", "trial 1")
    assert [each["info"]["status"] for each in (shown, nested, other)] == ["FINISHED", "FAILED", "RUNNING"]
    assert (pairs(shown, "params"), pairs(shown, "metrics")) == ({"epochs": "3"}, {"loss": 0.5})


def test_what_mlflow_refuses_is_shortened_or_left_out(
    mlflow_server: MlflowServer, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    environ = {"MLFLOW_TRACKING_URI": mlflow_server.uri, "MLFLOW_EXPERIMENT_NAME": "refused"}
    run = open_run("refused", environ=environ)
    assert run
    run.parameters({"long": "x" * 9000, "a:b/c?": 1, "kept": "first"})
    run.parameters({"kept": "second", "new": 4})
    run.metrics({"loss": float("nan"), "accuracy": 0.5, "rate": float("inf")}, 1)
    run.metrics({"accuracy": 0.6}, 1)
    run.tags({"long": "y" * 9000, "k" * 300: "z"})
    (tmp_path / "file.txt").write_text("content")
    run.file(tmp_path, "some/where")
    run.call(lambda client: client.set_tag("no-such-run", "a", "b"))
    run.tags({"last": "one"})
    run.close()

    (shown,) = mlflow_server.runs("refused")
    parameters = pairs(shown, "params")
    assert parameters.pop("long") == "x" * 6000
    assert parameters == {"a_b/c_": "1", "kept": "first", "new": "4"}
    assert mlflow_server.history(run.id, "accuracy") == [(1, 0.5)]
    assert list(pairs(shown, "metrics")) == ["accuracy"]
    tags = pairs(shown, "tags")
    assert (tags["long"], tags["k" * 250], tags["last"]) == ("y" * 8000, "z", "one")
    assert mlflow_server.artifacts(run.id, "some/where") == ["some/where/file.txt"]
    output = capfd.readouterr()
    assert output.err == ""
    assert output.out.count("\n") == 1
    assert "no-such-run" in output.out


def test_fit_logs_settings_and_metrics_by_epoch(
    mlflow_server: MlflowServer, experiment: str, capfd: pytest.CaptureFixture[str]
) -> None:
    without = fitted(classifier, classes(), epochs=2, validation_data=classes(seed=1))
    capfd.readouterr()
    (run,) = mlflow_server.runs(experiment)
    assert (status(run), run["info"]["run_name"]) == ("FINISHED", "tests.helpers.fitting:classifier")
    parameters, tags = pairs(run, "params"), pairs(run, "tags")
    assert (parameters["epochs"], parameters["replicas"], parameters["seed"]) == ("2", "1", "0")
    assert parameters["learning_rates"] == "[0.01]"
    assert (tags["version.keras"], tags["strategy"]) == (keras.__version__, "one_device")
    assert "float32" in tags["dataset"]
    for name, values in without.history.items():
        logged = mlflow_server.history(run["info"]["run_id"], name)
        assert logged == [(1, pytest.approx(values[0])), (2, pytest.approx(values[1]))]
    assert steps(mlflow_server, run, "seconds") == steps(mlflow_server, run, "examples_per_second") == [1, 2]
    assert mlflow_server.artifacts(run["info"]["run_id"]) == []


def test_a_run_that_kfp_has_made_is_used_and_not_ended(
    mlflow_server: MlflowServer, experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = open_run("of KFP")
    assert made
    monkeypatch.setenv("MLFLOW_RUN_ID", made.id)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "another")
    fitted(classifier, classes(), epochs=1)

    (run,) = mlflow_server.runs(experiment)
    assert (status(run), steps(mlflow_server, run, "loss")) == ("RUNNING", [1])


class Failing(keras.callbacks.Callback):
    """Ends a training after its first epoch with an exception."""

    def __init__(self, failure: BaseException) -> None:
        super().__init__()
        self.failure = failure

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch:
            raise self.failure


@pytest.mark.parametrize(
    ("failure", "expected", "raised"),
    [(ValueError("too dark"), "FAILED", SettingsError), (KeyboardInterrupt(), "KILLED", KeyboardInterrupt)],
)
def test_a_training_that_fails_says_so(
    mlflow_server: MlflowServer,
    experiment: str,
    failure: BaseException,
    expected: str,
    raised: type[BaseException],
) -> None:
    with pytest.raises(raised):
        fitted(classifier, classes(), epochs=2, callbacks=[Failing(failure)])
    (run,) = mlflow_server.runs(experiment)
    assert (status(run), steps(mlflow_server, run, "loss")) == (expected, [1])
    assert str(failure) in pairs(run, "tags")["error"]


def test_a_failed_training_that_goes_on_is_no_longer_failed(
    mlflow_server: MlflowServer, experiment: str, tmp_path: Path
) -> None:
    failing = Failing(ValueError("too dark"))
    with pytest.raises(SettingsError):
        fitted(classifier, classes(), epochs=2, callbacks=[failing], checkpoint_dir=tmp_path)
    fitted(classifier, classes(), epochs=3, checkpoint_dir=tmp_path)
    run, second = mlflow_server.runs(experiment)
    assert (status(run), pairs(run, "tags")["error"], steps(mlflow_server, run, "loss")) == (
        "FINISHED",
        "",
        [1, 2, 3],
    )
    assert '"setting": "epochs"' in pairs(second, "tags")["changes"]


def test_a_server_that_is_lost_costs_no_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"epochs": 4, "validation_data": classes(seed=1)}
    without = fitted(classifier, classes(), **options)
    monkeypatch.setattr(tracking, "_PATIENCE_S", 1.0)
    with servers.start(tmp_path) as server:
        lost = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: server.stop() if epoch == 2 else None
        )
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri.replace("//", "//user:secret@"))
        capfd.readouterr()
        began = time.monotonic()
        tracked = fitted(classifier, classes(), callbacks=[lost], **options)
        assert time.monotonic() - began < 30
        lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("tracking:")]
        assert len(lines) == 1
        assert lines[0].startswith(f"tracking: warning: cannot log to MLflow at {server.uri}: ")
        assert "Connection refused" in lines[0]
        assert "secret" not in lines[0]
        fitted(classifier, classes(), epochs=1)  # does not try again, nor say so
        assert "tracking" not in capfd.readouterr().out
        server.start()
        (run,) = server.runs()
        assert set(steps(server, run, "loss")) <= {1, 2}
    assert tracked.history == without.history
    for one, other in zip(tracked.model.get_weights(), without.model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


Start = Callable[..., programs.Popen]


@pytest.fixture
def program(tmp_path: Path) -> Start:
    def start(config: dict[str, Any] | None = None) -> programs.Popen:
        return replicas.start_one(["-m", "tests.helpers.tracked_fit", str(tmp_path)], config)

    return start


def finish(process: programs.Popen) -> tuple[int, str]:
    output = process.communicate(timeout=120)[0]
    return process.returncode, output


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_continued_training_goes_on_in_its_run(
    mlflow_server: MlflowServer, experiment: str, tmp_path: Path, program: Start, number: signal.Signals
) -> None:
    (tmp_path / "wait").touch()
    process = program()
    try:
        eventually(lambda: mlflow_server.experiment(experiment), seconds=60)
        eventually(
            lambda: (
                (runs := mlflow_server.runs(experiment)) and steps(mlflow_server, runs[0], "loss") == [1, 2]
            ),
            seconds=60,
        )
        process.send_signal(number)
        code, output = finish(process)
    finally:
        process.kill()
    assert code == (EXIT_RESTART if number == signal.SIGTERM else -number), output
    (run,) = mlflow_server.runs(experiment)
    assert status(run) == "RUNNING"

    (tmp_path / "wait").unlink()
    for _ in range(2):  # the second time nothing is left to train
        code, output = finish(program())
        assert code == 0, output
    run, second, third = mlflow_server.runs(experiment)
    assert run["info"]["run_name"] == str(tmp_path / "checkpoints")
    assert [each["info"]["run_name"] for each in (second, third)] == ["attempt 2", "attempt 3"]
    assert [status(each) for each in (run, second, third)] == ["FINISHED"] * 3
    assert mlflow_server.runs(experiment, parent=run["info"]["run_id"]) == [second, third]
    for metric in ("loss", "val_loss", "seconds", "learning_rate"):
        assert steps(mlflow_server, run, metric) == EPOCHS
    assert int(pairs(second, "tags")["resumed_after_step"]) > 0


def test_of_two_workers_the_chief_logs(mlflow_server: MlflowServer, experiment: str, program: Start) -> None:
    processes = [program(config) for config in replicas.tf_configs(2)]
    try:
        done = [finish(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [code for code, _ in done] == [0, 0], done
    (run,) = mlflow_server.runs(experiment)
    assert (status(run), pairs(run, "params")["replicas"]) == ("FINISHED", "2")
    assert steps(mlflow_server, run, "loss") == EPOCHS
    assert os.environ["MLFLOW_EXPERIMENT_NAME"] == experiment


def test_replicas_with_a_network_of_their_own_reach_the_server_and_files_are_kept(
    mlflow_server: MlflowServer, experiment: str, tmp_path: Path
) -> None:
    write_dataset(tmp_path / "data", records={"train": 32, "validation": 8, "test": 8})
    command = [SHARDLINE, "train", "data", "out", "--replicas", "2", "--", "--epochs", "2"]
    done = subprocess.run(
        [*command, "--per-replica-batch-size", "4"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cannot log" not in done.stdout
    (run,) = mlflow_server.runs(experiment)
    assert (status(run), run["info"]["run_name"]) == ("FINISHED", str(tmp_path / "out"))
    assert steps(mlflow_server, run, "val_loss") == [1, 2]
    run_id = run["info"]["run_id"]
    names = ["history.csv", "metrics.json", "settings.json"]
    assert mlflow_server.artifacts(run_id, "training") == [f"training/{name}" for name in names]
    for name in names:
        kept = (tmp_path / "out" / name).read_bytes().decode()
        assert mlflow_server.artifact(run_id, f"training/{name}") == kept


def test_trials_are_nested_in_the_run_of_their_pipeline(
    mlflow_server: MlflowServer, experiment: str, tmp_path: Path
) -> None:
    write_dataset(tmp_path / "data", records={"train": 32, "validation": 8, "test": 8})
    rates = {"name": "learning_rate", "type": "double", "min": 0.1, "max": 0.3}
    planned = plan(
        json.dumps({"metric": "val_loss", "goal": "minimize", "parameter": [rates]}),
        [{"container_spec": {"image_uri": "image:1"}}],
        dataset=str(tmp_path / "data"),
        training={"model": "mnist_cnn", "epochs": 1, "per_replica_batch_size": 8},
        base_output_directory="",
        labels={},
        max_trial_count=2,
        pipeline="tune-1",
    )
    (container,) = [pool["container_spec"] for pool in json.loads(planned.worker_pool_specs)]
    for trial in ("1", "2"):
        environ = {
            "CLOUD_ML_TRIAL_ID": trial,
            "AIP_MODEL_DIR": str(tmp_path / trial),
            "CLOUD_ML_HP_METRIC_FILE": str(tmp_path / f"{trial}.metrics"),
        }
        command = [*container["command"][1:], *container["args"], f"--learning_rate=0.{trial}"]
        code, output = finish(replicas.start_one(command, None, environ))
        assert code == 0, output

    run, *trials = mlflow_server.runs(experiment)
    assert (run["info"]["run_name"], status(run)) == ("tune-1", "RUNNING")
    assert trials == mlflow_server.runs(experiment, parent=run["info"]["run_id"])
    shown = [
        (each["info"]["run_name"], status(each), pairs(each, "params")["learning_rate"]) for each in trials
    ]
    assert shown == [("trial 1", "FINISHED", "0.1"), ("trial 2", "FINISHED", "0.2")]
