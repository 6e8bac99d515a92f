"""A real Slurm: a job that fails, cannot start or is cancelled, seen by who follows it or asks later."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest

from shardline.components.runs.directory import read_local_record
from shardline.components.runs.record import RunRecord
from shardline.components.runs.slurm_job import SlurmJob, cancel_job, read_job
from shardline.pipelines.engines.custom_job import CustomJob
from shardline.pipelines.engines.slurm.engine import batch_job, follow, run_job, submit
from shardline.pipelines.engines.slurm.settings import SlurmSettings
from shardline.trainer.base.errors import CancelledRunError, RunError, SettingsError
from tests.helpers.jobs import eventually
from tests.helpers.slurm import Slurm

#: The chief waits; the worker goes on once the chief has begun as often as itself: a replica that is ended
#: before its program has begun has no start in the records. Both note their starts in the directory {starts}.
BOTH_BEGIN = """
import json, os, pathlib, signal, sys, time
role = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
chief, worker = (pathlib.Path({starts!r}, each) for each in ("chief", "worker"))
with pathlib.Path({starts!r}, role).open("a") as file:
    file.write("x")
if role == "chief":
    time.sleep(600)
while not chief.exists() or chief.stat().st_size < worker.stat().st_size:
    time.sleep(0.05)
"""
MISTAKE = """
print("train: error: there is no column 'label'; name one")
sys.exit(2)
"""
KILLED = """
print("step 1", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
WAITS = "import time; print('begun', flush=True); time.sleep(600)"
NO_RESTARTS = SlurmSettings(restarts=0)


def _job(program: str, replicas: int = 2) -> CustomJob:
    return CustomJob.with_roles([sys.executable, "-c", program], replicas, display_name="a job")


def _run(tmp_path: Path, program: str, settings: SlurmSettings, replicas: int = 2) -> Path:
    """Submits a job as a run and returns its directory."""
    run = tmp_path / "run"
    job_id = submit(batch_job(_job(program, replicas), run / "replicas" / "train"), settings)
    RunRecord(name="run", pipeline="train", state="running", engine="slurm", job=job_id).write(run)
    (run / "run.log").touch()
    return run


def test_a_failed_job_is_explained_by_the_message_of_its_replica(slurm: Slurm, tmp_path: Path) -> None:
    program = BOTH_BEGIN.format(starts=str(tmp_path)) + MISTAKE
    run = _run(tmp_path, program, SlurmSettings(restarts=3))
    with pytest.raises(RunError, match="no column 'label'") as raised:
        follow(RunRecord.read(run).job, run / "replicas" / "train", topic="train")
    record = read_local_record(run)

    assert raised.value.exit_code == 2
    assert record.state == "failed"
    assert record.explanation is not None
    assert record.explanation.failed == "train, replica worker-0"
    assert record.explanation.exit.startswith("exit code 2")
    assert "after" not in record.explanation.exit  # a mistake is not tried again
    ends = json.loads((run / "replicas" / "train" / "job.json").read_text())["replicas"]
    assert {each["name"]: each["starts"][-1]["stopped"] for each in ends} == {
        "worker-0": False,
        "chief-0": True,
    }


def test_a_killed_replica_is_named_with_its_restarts(slurm: Slurm, tmp_path: Path) -> None:
    lines: list[tuple[str, str]] = []
    job = _job(BOTH_BEGIN.format(starts=str(tmp_path)) + KILLED)
    with pytest.raises(RunError, match="worker-0 ended with SIGKILL") as raised:
        run_job(job, tmp_path, SlurmSettings(restarts=1), show_line=lambda *line: lines.append(line))

    assert raised.value.exit_code == 1
    assert lines.count(("worker-0", "step 1")) == 2
    ends = json.loads((tmp_path / "job.json").read_text())["replicas"]
    assert {each["name"]: each["restarts"] for each in ends} == {"chief-0": 1, "worker-0": 1}
    assert ends[1]["starts"][-1]["exit"] == "SIGKILL"
    assert 0 < ends[1]["starts"][-1]["end_s"] < 60
    assert ends[1]["starts"][-1]["peak_memory_bytes"] > 2**22


def test_a_job_that_cannot_start_is_explained_by_its_reason(slurm: Slurm, tmp_path: Path) -> None:
    run = _run(tmp_path, WAITS, SlurmSettings(nodes="9"), replicas=9)
    record = eventually(lambda: (found := read_local_record(run)).explanation and found, seconds=60)
    explanation = eventually(
        lambda: (found := read_local_record(run).explanation) and "Partition" in found.error and found,
        seconds=60,
    )

    assert record.state == "running"
    assert "waiting" in record.headline()
    assert "another partition" in explanation.next_step
    cancel_job(record.job)
    assert eventually(lambda: RunRecord.read(run).state == "cancelled", seconds=60)


def test_a_mistyped_partition_is_a_mistake(slurm: Slurm, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nowhere"):
        submit(batch_job(_job(WAITS), tmp_path), SlurmSettings(partition="nowhere"))


def test_a_cancelled_job_leaves_no_process(slurm: Slurm, tmp_path: Path) -> None:
    job_id = submit(batch_job(_job(WAITS), tmp_path), NO_RESTARTS)

    def cancel() -> None:
        eventually(lambda: (tmp_path / "chief-0.log").is_file(), seconds=60)
        cancel_job(job_id)

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(CancelledRunError):
        follow(job_id, tmp_path, topic="train")
    thread.join()
    assert read_job(job_id).word == "CANCELLED"
    assert slurm.run("squeue", "-h") == ""


def test_a_job_is_explained_once_slurm_has_forgotten_it(slurm: Slurm, tmp_path: Path) -> None:
    run = _run(tmp_path, "print('trainer: error: no such model; name one'); exit(2)", NO_RESTARTS, replicas=1)
    eventually(lambda: (run / "replicas" / "train" / "exit").is_file(), seconds=60)
    record = RunRecord.read(run)
    forgotten = read_job("999999", run / "replicas" / "train")

    assert isinstance(forgotten, SlurmJob)
    assert (forgotten.state, forgotten.exit_code) == ("failed", 2)
    assert record.job
