"""Failures explained: exit codes in words, known causes, and a whole run directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardline.components.runs import Run, RunDirectory, explain
from shardline.components.runs.causes import Explanation, exit_code, exit_meaning
from shardline.trainer.base.errors import SettingsError


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (-9, 137, "SIGKILL (exit code 137): most likely out of memory, or killed by hand"),
        (143, 143, "SIGTERM (exit code 143): asked to stop: preempted, cancelled, or past its timeout"),
        (75, 75, "exit code 75: asked for a restart"),
        (255, 255, "exit code 255: the program's own; its log says more"),  # 127 is no signal
    ],
)
def test_the_meaning_of_an_exit_code(status: int | str, code: int, words: str) -> None:
    assert exit_code(status) == code
    assert exit_meaning(code).startswith(words)


QUOTA = (
    "The following quota metrics exceed quota limits: aiplatform.googleapis.com/custom_model_training_cpus"
)
DENIED = "Permission 'aiplatform.models.upload' denied on resource '//aiplatform.googleapis.com/projects/p'"


@pytest.mark.parametrize(
    ("error", "cause", "step"),
    [
        (QUOTA, "the quota aiplatform.googleapis.com/custom_model_training_cpus is used up", "ask for more"),
        (
            "Resources are insufficient in region: us-central1. Please try",
            "no such machine free",
            "FLEX_START",
        ),
        ("Failed to pull image europe-docker.pkg.dev/p/r/i:1", "cannot be pulled", "artifactregistry.reader"),
        (DENIED, "lacks the permission aiplatform.models.upload", "doctor"),
        ("The replica workerpool0-0 ran out-of-memory and exited", "out of memory", "per_replica_batch_size"),
        ("[Errno 28] No space left on device: '/tmp/x'", "the disk is full", "boot_disk_size_gb"),
        ("ModuleNotFoundError: No module named 'my_models'", "module my_models is not installed", "image"),
        ("No such file or directory: '/gcs/bucket/x'", "data is missing", "bucket"),
        ("the job was stopped: its timeout of 60 s has passed", "longer than its timeout", "timeout"),
    ],
)
def test_a_known_cause_is_found_in_what_was_said(error: str, cause: str, step: str) -> None:
    explanation = explain(task="train", error=error)

    assert cause in explanation.cause
    assert step in explanation.next_step


def test_how_a_process_ended_counts_before_what_others_complain_of() -> None:
    lines = ("UNAVAILABLE: Connection reset by peer",)
    killed = explain(task="train", replica="worker-1", exit_code=137, log=lines, restarts=2)

    assert killed.failed == "train, replica worker-1"
    assert killed.exit.endswith("; after 2 restarts")
    assert "out of memory" in killed.cause
    assert explain(exit_code=1, log=lines).cause == "another replica ended"


def test_a_message_of_our_own_says_what_to_do_itself() -> None:
    explanation = explain(task="train", exit_code=2, own_message="epochs is 0; give 1 or more")

    assert explanation.cause.startswith("a mistake in the input")
    assert explanation.next_step == "give 1 or more"


LOG = """\
18:23:47.586 - INFO - Running pipeline: 'retrain'
18:23:47.590 - INFO - Executing task 'preprocess'
18:23:47.590 - INFO - Streamed logs:

    [KFP Executor 2026-11-20 18:23:47,631 INFO]: Got executor_input:
    {
        "inputs": {}
    }
preprocess: 3 records
18:23:50.710 - INFO - Task 'preprocess' finished with status SUCCESS
18:23:50.713 - INFO - Executing task 'train'
    worker-0 | about to fail
    Killed
18:23:51.000 - ERROR - Task 'train' finished with status FAILURE
--------------------------------------------------------------------------------
pipeline: error: the task 'train' failed
"""


def write_run(directory: Path, log: str = LOG, **record: object) -> Path:
    directory.mkdir()
    content = {"pipeline": "retrain", "state": "failed", "error": "the task 'train' failed", **record}
    (directory / "run.json").write_text(json.dumps(content))
    (directory / "run.log").write_text(log)
    return directory


def failure_in(run: Path) -> Explanation:
    here = RunDirectory(run)
    return here.explanation(here.read())


def read(run: Path) -> Run:
    here = RunDirectory(run)
    return here.explain(here.read())


def test_a_task_that_was_killed_is_told_from_the_shell_s_last_word(tmp_path: Path) -> None:
    failure = failure_in(write_run(tmp_path / "run"))

    assert failure.failed == "train"
    assert failure.exit.startswith("SIGKILL (exit code 137)")
    assert failure.lines == ("worker-0 | about to fail", "Killed")


def start(end_s: float | None, status: int | str | None, *, stopped: bool = False) -> dict[str, object]:
    return {"start_s": 0.0, "end_s": end_s, "exit": status, "stopped": stopped, "peak_memory_bytes": 2**28}


def test_the_replica_that_failed_first_is_named_and_not_one_that_was_stopped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    job = run / "replicas" / "train"
    job.mkdir(parents=True)
    replicas = [
        {"name": "chief-0", "restarts": 1, "starts": [start(1, "SIGKILL"), start(3.0, 1, stopped=True)]},
        {"name": "worker-0", "restarts": 1, "starts": [start(1, 1), start(3.2, 1)]},
        {"name": "worker-1", "restarts": 1, "starts": [start(1, 1), start(3.1, "SIGKILL")]},
        {"name": "worker-2", "restarts": 1, "starts": [start(1, 1), start(None, None)]},
    ]
    (job / "job.json").write_text(json.dumps({"error": "worker-1 was killed", "replicas": replicas}))
    (job / "worker-1.log").write_text("loading\n\nstep 3\n")

    failure = failure_in(run)

    killed = {"task": "train", "replica": "worker-1", "exit_code": 137, "error": "worker-1 was killed"}
    assert failure == explain(**killed, log=("loading", "step 3"), peak_memory=2**28, restarts=1)


def test_a_message_of_our_own_is_the_error(tmp_path: Path) -> None:
    log = LOG.replace("    Killed\n", "train: error: epochs is 0; give 1 or more\n")

    failure = failure_in(write_run(tmp_path / "run", log))

    assert (failure.error, failure.next_step) == ("epochs is 0; give 1 or more", "give 1 or more")


def test_a_run_that_succeeded_has_verdict_metrics_and_links(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", state="succeeded", error=None)
    artifacts = {
        "exported": {"artifacts": [{"uri": "/x/model", "metadata": {"blessed": False}}]},
        "metrics": {"artifacts": [{"uri": "/x/metrics", "metadata": {"accuracy": 0.5}}]},
        "report": {"artifacts": [{"uri": "/x/report", "metadata": {}}]},
    }
    put_out(run, "export-validate", artifacts=artifacts)

    outcome = read(run)

    assert outcome.headline() == "retrain succeeded: not blessed, accuracy 0.5000"
    assert outcome.links == {"run": str(run), "report": "/x/report", "model": "/x/model"}
    assert outcome.explanation is None


def put_out(run: Path, task: str, **content: object) -> None:
    directory = run / "outputs" / "retrain-1" / task
    directory.mkdir(parents=True)
    (directory / "executor_output.json").write_text(json.dumps(content))


def test_a_run_in_which_nothing_had_changed_says_why(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", state="succeeded", error=None)
    values = {"changed": False, "reason": "the same data as on Monday", "still_blessed": True}
    put_out(run, "configure", parameterValues=values)

    assert read(run).headline() == "retrain succeeded: unchanged (the same data as on Monday)"
    assert read(run).blessed is True


@pytest.mark.parametrize(
    ("values", "verdict"), [({"blessed": True}, True), ({"blessed": "yes"}, False), ({"accuracy": 1.0}, None)]
)
def test_the_verdict_is_what_a_task_has_put_out(
    values: dict[str, object], verdict: bool | None, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", LOG + "blessed: yes\n")
    put_out(run, "export-validate", parameterValues=values)

    assert read(run).blessed is verdict


def test_a_directory_that_is_none_of_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is not the directory of a run"):
        read(tmp_path)
