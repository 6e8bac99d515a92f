"""Fail-fast markers: a user error ends the restart of a job at once, unless something has changed since."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from shardline.trainer import task
from shardline.trainer.base.errors import (
    ClusterError,
    DatasetError,
    DivergedError,
    ModelError,
    RestartError,
    RunError,
)
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.cluster import ClusterConfig

WORDS = "the model returns no probabilities"


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Settings whose dataset and model lie in the working directory, as a user's do."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/manifest.json").write_text("{}")
    (tmp_path / "net_of_a_user.py").write_text("import layers_of_a_user\n")
    (tmp_path / "layers_of_a_user.py").write_text("")
    return TrainSettings(
        dataset="data", model="net_of_a_user:build", model_dir="out", initial_model="weights.keras"
    )


@pytest.fixture
def environ(tmp_path):
    return {"CLOUD_ML_JOB_ID": "1", "AIP_CHECKPOINT_DIR": f"{tmp_path}/base/checkpoints/"}


def run_job(settings, environ, failure=None, cluster=None):
    """Runs a job that fails with `failure`; returns the error that ends it, None if it succeeds."""
    try:
        with task.refuse_repeated_failure(settings, cluster or ClusterConfig(), environ):
            if failure:
                raise failure
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("failure", [ModelError(WORDS), DivergedError(WORDS), DatasetError(WORDS)])
def test_a_restart_ends_with_the_first_message(settings, environ, failure):
    run_job(settings, environ, failure)

    again = run_job(replace(settings, model_dir="of-the-second-task"), {**environ, "CLOUD_ML_JOB_ID": "2"})

    assert (again.line, again.exit_code) == (WORDS, failure.exit_code)


def test_every_replica_ends_and_the_first_message_stays(settings, environ):
    cluster = ClusterConfig("chief", 0, ("a:1", "b:1"))
    run_job(settings, environ, ModelError(WORDS), cluster)
    worker = replace(cluster, task_type="worker", hosts=("c:7", "d:8"))  # as a restarted one may find them

    assert str(run_job(settings, environ, ModelError("another"), worker)) == WORDS


def of_the_machine():
    failure = ClusterError("chief-0 cannot serve its address")
    failure.__context__ = OSError(errno.EADDRINUSE, "Address already in use")
    return failure


@pytest.mark.parametrize(
    "failure",
    [
        of_the_machine(),
        RunError("lost worker-1"),
        RestartError("asked to stop"),
        OSError(errno.EIO, "Input/output error"),
        FileNotFoundError(errno.ENOENT, "No such file"),
        MemoryError(),
        RuntimeError("of unknown origin"),
    ],
)
def test_an_error_that_a_restart_may_fix_is_tried_again(settings, environ, failure):
    run_job(settings, environ, failure)
    assert run_job(settings, environ) is None


@pytest.mark.parametrize(
    "mend",
    [
        lambda settings, here: replace(settings, learning_rate=0.1),
        lambda settings, here: replace(settings, checkpoint_dir="of-another-run"),
        lambda settings, here: changed(settings, here / "data/manifest.json"),
        lambda settings, here: changed(settings, here / "data/train-00000-of-00001.tfrecord"),
        lambda settings, here: changed(settings, here / "net_of_a_user.py"),
        lambda settings, here: changed(settings, here / "layers_of_a_user.py"),
        lambda settings, here: changed(settings, here / "weights.keras"),
    ],
)
def test_a_job_with_a_fix_is_not_stopped(settings, environ, tmp_path, mend):
    run_job(settings, environ, ModelError(WORDS))
    assert run_job(mend(settings, tmp_path), environ) is None


def test_a_dataset_is_its_manifest_and_none_of_its_shards_is_asked_for(settings, environ, tmp_path):
    """Copied or touched, it is the same: thousands of shards in a bucket would be asked for, one by one."""
    (tmp_path / "data/train-00000-of-00001.tfrecord").touch()
    run_job(settings, environ, ModelError(WORDS))
    for path in (tmp_path / "data").iterdir():
        os.utime(path, (1, 1))
    assert str(run_job(settings, environ)) == WORDS


def changed(settings, path):
    with path.open("a") as file:
        file.write("# mended\n")
    return settings


def test_a_package_that_was_missing_and_is_installed_is_a_change(settings, environ, tmp_path, monkeypatch):
    run_job(settings, environ, ModelError("no module 'efficientnet'"))
    (tmp_path / "site/efficientnet-1.0.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert run_job(settings, environ) is None


def test_a_run_started_by_hand_is_not_stopped(settings, environ):
    run_job(settings, environ, ModelError(WORDS))
    by_hand = {"AIP_CHECKPOINT_DIR": environ["AIP_CHECKPOINT_DIR"]}
    assert run_job(settings, by_hand) is None


def test_the_marker_is_in_the_runs_own_directory_and_can_be_removed(settings, environ, tmp_path):
    """Not next to checkpoints of another run, which this one has taken over."""
    other = replace(settings, checkpoint_dir=str(tmp_path / "other/checkpoints"))
    run_job(other, environ, ModelError(WORDS))
    (marker,) = tmp_path.rglob("mistake-*.json")
    assert marker.parent == tmp_path / "base"
    assert json.loads(marker.read_text()) == {"error": WORDS, "replica": "chief-0"}

    task.clear_markers(tmp_path / "base")
    assert run_job(other, environ) is None


@pytest.mark.parametrize("text", ["", "[]", '{"error": 3}'])
def test_an_unreadable_marker_stops_no_job(settings, environ, tmp_path, text):
    run_job(settings, environ, ModelError(WORDS))
    next(tmp_path.rglob("mistake-*.json")).write_text(text)
    assert run_job(settings, environ) is None


def test_without_a_writable_directory_the_error_is_the_same(settings, environ, tmp_path):
    (tmp_path / "base").write_text("in the way")
    assert str(run_job(settings, environ, ModelError(WORDS))) == WORDS


@pytest.mark.parametrize(
    ("variables", "words"),
    [({}, f"train: error: {WORDS}"), ({"TF_CONFIG": "{"}, "train: error: TF_CONFIG is not JSON")],
)
def test_neither_waits_for_tensorflow(settings, environ, tmp_path, variables, words):
    run_job(settings, environ, ModelError(WORDS))
    # Found only when it is imported: after that the process would end with another code.
    (tmp_path / "no/tensorflow").mkdir(parents=True)
    (tmp_path / "no/tensorflow/__init__.py").write_text("raise SystemExit(99)")
    path = os.pathsep.join([str(tmp_path / "no"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "shardline.trainer.task", "--dataset", "data", "--model-dir", "out"),
            *("--model", "net_of_a_user:build", "--initial-model", "weights.keras"),
        ],
        env={**os.environ, **environ, **variables, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 2
    assert words in done.stderr
