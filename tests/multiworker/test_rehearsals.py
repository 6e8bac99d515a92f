"""Rehearsed jobs that lose each kind of replica: every example is trained once all the same."""

import sys
from pathlib import Path

import pytest

from tests.helpers import programs
from tests.helpers.datasets import write_dataset
from tests.helpers.history import read_history

pytestmark = [pytest.mark.multiworker, pytest.mark.timeout(240)]

SHARDLINE = str(Path(sys.executable).with_name("shardline"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dataset")
    write_dataset(directory, records={"train": 256, "validation": 24, "test": 8}, shards=4)
    return directory


def train(dataset, out, *options):
    command = [SHARDLINE, "train", dataset, out, "--model", "tests.helpers.models:restless"]
    command += ["--steps-per-execution", 4, "--checkpoint-steps", 8, "--epochs", 8, *options]
    done = programs.run([*map(str, command)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kill(*victims):
    """Returns the options that kill some replicas, each with the step."""
    return [text for who, step in victims for text in ("--inject", f"kill:{who}@step={step}")]


def test_a_job_survives_the_loss_of_a_parameter_server_and_of_a_worker(dataset, tmp_path):
    output = train(dataset, tmp_path, "--replicas", 3, "--ps", 1, *kill(("ps", 20), ("worker:1", 50)))

    assert "chief-0 failed after" in output
    assert "ps-0 (127.0.0.1:" in output
    # Twice where a worker has not yet found the new server when the chief comes back.
    assert "resuming after step" in output
    assert "worker-1 was killed by SIGKILL" in output
    assert [row["examples"] for row in read_history(tmp_path)] == ["256"] * 8


def test_a_preempted_worker_costs_nothing_and_the_evaluator_sees_every_epoch(dataset, tmp_path):
    output = train(dataset, tmp_path, "--replicas", 2, "--evaluator", "--inject", "preempt:worker:0@step=20")

    assert "worker-0 was preempted" in output or "asked for a restart after" in output
    assert output.count("resuming after step") == 1
    assert [row["examples"] for row in read_history(tmp_path)] == ["256"] * 8
    assert "evaluate: step 64, epoch 8:" in output
    assert (tmp_path / "best.keras").is_file()
