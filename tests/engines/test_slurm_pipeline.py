"""`shardline run --engine slurm` and its tuning jobs, with a real Slurm of two nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from shardline.components.tune.best_trial import read_job, trials_of
from shardline.pipelines.engines.slurm.settings import SlurmSettings
from shardline.pipelines.local.launcher_stubs import SLURM_VARIABLE
from tests.helpers.jobs import PRELUDE, eventually
from tests.helpers.replicas import ROOT
from tests.helpers.slurm import Slurm

pytestmark = pytest.mark.timeout(420)

SHARDLINE = str(Path(sys.executable).with_name("shardline"))
_RUN = (SHARDLINE, "run", "compiled/retrain.yaml", "--engine", "slurm", "--param", "min_accuracy=0.2")
_TRIAL = (
    PRELUDE
    + """
from shardline.trainer.loop.measurements import Measurements
rate = float(dict(flag.removeprefix("--").split("=") for flag in sys.argv[1:])["rate"])
print("rate", rate, os.environ["AIP_MODEL_DIR"], flush=True)
Path(os.environ["SEEN"], task["trial"]).touch()
if task["trial"] != "3":  # of the second array
    wait_for(Path(os.environ["SEEN"], {"1": "2", "2": "1"}[task["trial"]]))
if task["trial"] == "2":
    with progress.exit_on_error("train"):
        raise ModelError("such a rate does not fit")
Measurements(os.environ).add("score", rate, 10)
if task["trial"] == "3":
    wait_for("/nowhere/ever")
"""
)


def test_the_digits_pipeline_is_trained_by_a_job_of_slurm(slurm: Slurm, tmp_path: Path) -> None:
    command = [*_RUN, "--param", "epochs=3", "--runs-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    run = (tmp_path / "latest").resolve()
    record = json.loads((run / "run.json").read_text())
    assert (record["state"], record["facts"]["blessed"]) == ("succeeded", True)
    # Both replicas were tasks of one job; what they print is in their logs, and on the terminal.
    train = run / "replicas" / "train"
    assert "epoch 3/3" in (train / "chief-0.log").read_text()
    assert "chief-0 | train: epoch 3/3" in done.stdout
    assert (train / "worker-0.log").stat().st_size > 0
    assert slurm.state((train / "job.id").read_text()) == "COMPLETED"
    job = json.loads((train / "job.json").read_text())
    assert [(item["name"], item["starts"][-1]["exit"]) for item in job["replicas"]] == [
        ("chief-0", 0),
        ("worker-0", 0),
    ]
    # The secret that marks events of processes here goes to no disk.
    assert "@shardline" not in "".join(path.read_text() for path in train.glob("*") if path.is_file())


def test_the_end_of_a_run_cancels_its_job(slurm: Slurm, tmp_path: Path) -> None:
    command = [*_RUN, "--param", "epochs=1000", "--runs-dir", str(tmp_path)]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert run.stdout is not None
    next(line for line in run.stdout if "epoch 2/1000" in line)
    run.send_signal(signal.SIGINT)
    shown, _ = run.communicate()

    assert run.returncode == 130, shown
    job = (tmp_path / "latest/replicas/train/job.id").read_text()
    assert slurm.wait(job) == "CANCELLED"
    assert json.loads((tmp_path / "latest/run.json").read_text())["state"] == "cancelled"
    assert "shardline run --resume" in shown


def test_a_detached_run_is_a_job_of_its_own(slurm: Slurm, tmp_path: Path) -> None:
    """A mistake in a task ends it, and then its own job has ended."""
    command = [*_RUN, "--param", "epochs=2", "--param", "per_replica_batch_size=100000", "--detach"]
    done = subprocess.run([*command, "--runs-dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    run = (tmp_path / "latest").resolve()
    record = json.loads((run / "run.json").read_text())
    assert (record["engine"], record["state"], record["pipeline"]) == ("slurm", "running", "retrain")

    assert slurm.wait(record["job"], seconds=180) == "FAILED"
    assert slurm.run("squeue", "-h") == ""
    record = json.loads((run / "run.json").read_text())
    assert (record["engine"], record["state"]) == ("slurm", "failed")
    asked = subprocess.run([SHARDLINE, "explain", str(run)], cwd=ROOT, capture_output=True, text=True)
    assert "100000 is larger than the training split" in asked.stdout, asked.stdout + asked.stderr


def _payload(seen: Path, **study: Any) -> str:
    env = [{"name": "SEEN", "value": str(seen)}]
    container = {"image_uri": "image:1", "command": [sys.executable, "-c"], "args": [_TRIAL], "env": env}
    parameters = [{"parameter_id": "rate", "double_value_spec": {"min_value": 0, "max_value": 1}}]
    pools = [{"machine_spec": {}, "container_spec": container, "replica_count": 1}]
    return json.dumps(
        {
            "display_name": "tune",
            "study_spec": {
                "metrics": [{"metric_id": "score", "goal": "MAXIMIZE"}],
                "parameters": parameters,
                **study,
            },
            "max_trial_count": 3,
            "parallel_trial_count": 2,
            "trial_job_spec": {
                "worker_pool_specs": pools,
                "base_output_directory": {"output_uri_prefix": f"{seen}/out"},
            },
        }
    )


def test_parallel_trials_are_elements_of_one_array_and_fail_alone(slurm: Slurm, tmp_path: Path) -> None:
    resources = tmp_path / "tune" / "gcp_resources"
    stub = [sys.executable, "-m", "shardline.pipelines.local.launcher_stubs", "HyperparameterTuningJob"]
    run = subprocess.Popen(
        [*stub, "--payload", _payload(tmp_path), "--executor_input", "{}", "--gcp_resources", str(resources)],
        env={**os.environ, SLURM_VARIABLE: json.dumps(asdict(SlurmSettings()))},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    logs = resources.parent / "replicas" / "tune"
    # The third trial, of the second array, is cancelled: it has failed, too.
    second = logs / "trials-from-3"
    eventually(lambda: "rate" in _text(second / "0" / "chief-0.log"), seconds=120)
    slurm.run("scancel", (second / "job.id").read_text())
    shown, _ = run.communicate()

    assert run.returncode == 0, shown
    trials = trials_of(read_job(resources.read_text()))
    assert [trial.state for trial in trials] == ["SUCCEEDED", "INFEASIBLE", "INFEASIBLE"]
    assert trials[1].reason == "such a rate does not fit"
    assert "cancelled" in trials[2].reason.lower()
    assert trials[0].value == trials[0].parameters["rate"]
    assert "2 at a time" in shown
    for trial in trials:
        log = (logs / f"trial-{trial.id}" / "chief-0.log").read_text()
        assert f"rate {trial.parameters['rate']} {tmp_path}/out/{trial.id}/model/" in log
        assert f"trial {trial.id}: rate {trial.parameters['rate']}" in shown


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def test_a_setting_that_slurm_refuses_ends_a_run_before_its_first_task(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('[engine.slurm]\npartition = "nosuch"\n')
    command = [*_RUN, "--runs-dir", str(tmp_path / "runs"), "--settings", str(tmp_path / "settings.toml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "partition" in done.stderr
    assert not (tmp_path / "runs").exists()
