"""status, logs, explain, cancel and runs: the same words for runs of this machine and of Slurm."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shardline.components.runs import slurm_job
from shardline.components.runs.record import ReplicaRecord, ReplicaStart, RunRecord
from shardline.components.runs.slurm_job import SlurmJob
from shardline.pipelines.cli.main import main
from shardline.trainer.base.errors import SettingsError

LOG = """\
10:00:00.100 - INFO - Executing task 'digest'
10:00:00.200 -     hello
10:00:00.300 - INFO - Task 'digest' finished with status SUCCESS
10:00:00.400 - INFO - Executing task 'train'
"""
#: Holds a run directory as the process of a run does.
RUN = """
import datetime, sys, time
from pathlib import Path
from shardline.pipelines.local.record import RunDirectory
now = datetime.datetime.now(datetime.UTC)
run = RunDirectory(Path("runs"), b"", now, pipeline="toy")
print(run.directory.name, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shardline(*words: str) -> Result:
    return CliRunner().invoke(main, words)


@pytest.fixture
def process() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        yield child.stdout.readline().strip(), child
        child.kill()


def test_cancel_ends_the_process_of_a_run_here(process: tuple[str, subprocess.Popen[str]]) -> None:
    name, child = process
    before = shardline("status", name)
    done = shardline("cancel", name)

    assert f"{name}: running" in before.stdout
    assert (done.exit_code, done.stdout) == (
        0, f"asked its process to cancel {name}, which was running\n"
    )  # fmt: skip
    assert child.wait(10) == -15
    assert shardline("cancel", "latest").stdout == f"nothing to cancel: {name} has failed\n"


def write_run(**values: Any) -> Path:
    directory = Path("runs/today")
    RunRecord(**{"name": "today", "pipeline": "toy", "state": "running", **values}).write(directory)
    (directory / "run.log").write_text(LOG)
    return directory


def test_a_run_of_another_machine_is_not_cancelled_here() -> None:
    write_run(host="elsewhere", pid=1, locked=True)
    done = shardline("cancel", "today")

    assert done.exit_code == 2
    assert "end its process on elsewhere" in done.stderr


def test_the_status_of_a_run_here_has_its_tasks() -> None:
    write_run(state="failed", duration_s=3.0, created="2030-01-01T12:00:00Z", error="no more")
    shown = shardline("status", "today")
    content = json.loads(shardline("status", "today", "--json").stdout)

    assert shown.exit_code == 0, shown.output
    assert [(task["name"], task["state"]) for task in content["tasks"]] == [
        ("digest", "succeeded"), ("train", "failed")
    ]  # fmt: skip
    assert "today: failed after 3 s" in shown.stdout
    assert (content["run"], content["state"], content["seconds"]) == ("today", "failed", 3.0)
    assert shardline("status", "today", "--wait").exit_code == 1


Told = dict[str, SlurmJob | None]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What Slurm says of each job; it has forgotten those of which it says nothing."""
    found: Told = {}

    def read(job_id: str, directory: Path | None = None) -> SlurmJob:
        if (job := found.get(job_id)) is None:
            raise SettingsError(f"Slurm knows no job {job_id}")
        return job

    def cancel(job_id: str) -> None:
        found[job_id] = job(job_id, "cancelled", "CANCELLED")

    monkeypatch.setattr(slurm_job, "read_job", read)
    monkeypatch.setattr(slurm_job, "cancel_job", cancel)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    return found


def job(job_id: str, state: str, word: str, **values: Any) -> SlurmJob:
    return SlurmJob(id=job_id, state=state, word=word, **values)


def write_slurm_run(*jobs: str, **logs: str) -> Path:
    directory = write_run(engine="slurm", job=" ".join(jobs), pipeline="train")
    for name, job_id in zip(("train", "train-finish"), jobs, strict=False):
        place = directory / "replicas" / name
        place.mkdir(parents=True)
        (place / "job.id").write_text(job_id)
    for replica, text in logs.items():
        (directory / "replicas" / "train" / f"{replica.replace('_', '-')}.log").write_text(text)
    return directory


def test_a_job_that_waits_is_explained_by_its_reason(told: Told) -> None:
    write_slurm_run("12")
    told["12"] = job("12", "waiting", "PENDING", reason="Resources", start="2030-01-01T12:00:00")
    status, explained = shardline("status", "today"), shardline("explain", "today")

    assert "today: waiting" in status.stdout
    assert explained.exit_code == 0
    assert re.search(r"state +waiting: Resources .*2030-01-01T12:00:00", explained.stdout)
    assert "error" not in explained.stdout


def test_a_failed_job_is_explained_after_slurm_has_forgotten_it(told: Told) -> None:
    run = write_slurm_run("12", chief_0="step 1\ntrainer: error: no such column\n", worker_0="step 1\n")
    end = ReplicaStart(start_s=1.0, end_s=2.0, exit=2)
    ReplicaRecord("chief-0", 0, (end,)).write(run / "replicas" / "train")
    told["12"] = job("12", "failed", "FAILED", exit_code=2, seconds=9.0, nodes="n[1-2]")
    first = shardline("explain", "today")
    told.clear()
    again, listed = shardline("explain", "today"), shardline("runs")

    for shown in (first, again):
        assert shown.exit_code == 1
        assert "chief-0" in shown.stdout
        assert "no such column" in shown.stdout
    assert listed.stdout.splitlines()[1].split()[1:5] == ["slurm", "12", "train", "failed"]


def test_a_run_is_found_by_its_job_and_cancelled(told: Told) -> None:
    write_slurm_run("12", "13")
    told["12"] = job("12", "running", "RUNNING", nodes="n1", elements={0: "succeeded", 1: "running"})
    told["13"] = job("13", "waiting", "PENDING", reason="Dependency")
    status = shardline("status", "13")
    done = shardline("cancel", "12")

    assert "1 of 2 elements succeeded" in status.stdout
    assert done.stdout == "asked Slurm to cancel today, which was running\n"
    assert {each.state for each in told.values() if each} == {"cancelled"}
    assert shardline("explain", "today").exit_code == 4
    assert shardline("cancel", "12").stdout == "nothing to cancel: today was cancelled\n"


def test_the_logs_of_a_job_are_those_of_its_replicas(told: Told) -> None:
    write_slurm_run("12", chief_0="one\n", worker_0="two\n")
    told["12"] = job("12", "succeeded", "COMPLETED")
    one = shardline("logs", "12", "--replica", "worker-0", "--follow")

    assert shardline("logs", "12").stdout == "chief-0 | one\nworker-0 | two\n"
    assert one.stdout == "worker-0 | two\n"


def test_a_job_that_left_nothing_has_failed(told: Told) -> None:
    write_slurm_run("12")
    done = shardline("status", "today", "--wait")

    assert done.exit_code == 1
    assert "left no exit code" in done.stderr
