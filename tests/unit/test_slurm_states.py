"""Slurm's words: states, reasons, exits of tasks, and refusals, from what its commands have printed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shardline.components.runs import slurm_job
from shardline.components.runs.causes import WAITING, Failure, explain, waiting_cause
from shardline.components.runs.directory import find_run, read_local_record
from shardline.components.runs.record import RunRecord
from shardline.components.runs.slurm_job import SlurmJob, describe, parse_accounts, parse_jobs, read_job
from shardline.components.runs.slurm_run import job_failure, job_record
from shardline.trainer.base.errors import PlatformError, SettingsError

#: `scontrol show job -o` of Slurm 22.05, without keys that are not read.
PENDING = (
    "JobId=8 JobName=a b UserId=root(0) Priority=1 JobState=PENDING Reason=Priority Dependency=(null) "
    "Restarts=0 ExitCode=0:0 RunTime=00:00:00 StartTime=2026-11-26T09:52:12 ReqNodeList=(null) "
    "ExcNodeList=(null) NodeList= NumNodes=1\n"
)
REQUEUED = PENDING.replace("Priority Dep", "BeginTime Dep").replace("Restarts=0", "Restarts=2")
DOWN = PENDING.replace("=Priority Dep", "=Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved Dep")
RUNNING = (
    "JobId=1 JobName=x JobState=RUNNING Reason=None Restarts=0 ExitCode=0:0 RunTime=1-00:02:05 "
    "StartTime=2026-11-26T09:50:33 ReqNodeList=(null) NodeList=n[1-2] BatchHost=n1\n"
)


def ended(word: str, code: str = "0:0", reason: str = "None") -> str:
    text = RUNNING.replace("RUNNING", word).replace("ExitCode=0:0", f"ExitCode={code}")
    return text.replace("Reason=None", f"Reason={reason}")


@pytest.mark.parametrize(
    ("text", "state", "reason", "code"),
    [
        (PENDING, "waiting", "Priority", None),
        (REQUEUED, "waiting", "BeginTime", None),
        (DOWN, "waiting", "Nodes required for job are DOWN, DRAINED or reserved", None),
        (RUNNING, "running", "", None),
        (ended("CONFIGURING"), "waiting", "", None),
        (ended("COMPLETING"), "running", "", None),
        (ended("SUSPENDED"), "running", "", None),
        (ended("A_WORD_OF_A_LATER_SLURM"), "running", "", None),
        (ended("REQUEUE_HOLD", reason="JobHeldUser"), "waiting", "JobHeldUser", None),
        (ended("COMPLETED"), "succeeded", "", 0),
        (ended("CANCELLED", "0:15"), "cancelled", "", 143),
        (ended("REVOKED"), "cancelled", "", 0),
        (ended("FAILED", "75:0", "NonZeroExitCode"), "failed", "NonZeroExitCode", 75),
        (ended("OUT_OF_MEMORY", "0:125", "OutOfMemory"), "failed", "OutOfMemory", 253),
        (ended("TIMEOUT", "0:15", "TimeLimit"), "failed", "TimeLimit", 143),
        (ended("NODE_FAIL", "0:0", "NodeDown"), "failed", "NodeDown", 0),
        (ended("PREEMPTED"), "failed", "", 0),
        (ended("BOOT_FAIL"), "failed", "", 0),
        (ended("DEADLINE"), "failed", "", 0),
    ],
)
def test_the_state_of_a_job(text: str, state: str, reason: str, code: int | None) -> None:
    job = parse_jobs("1", text)

    assert job is not None
    assert (job.state, job.reason, job.exit_code) == (state, reason, code)
    assert job.has_ended == (state in ("succeeded", "failed", "cancelled"))


def test_where_and_how_long_it_runs_or_when_it_may_start() -> None:
    running, waiting = parse_jobs("1", RUNNING), parse_jobs("8", REQUEUED)

    assert running is not None
    assert waiting is not None
    assert (running.nodes, running.seconds) == ("n[1-2]", 86525.0)
    assert (waiting.nodes, waiting.seconds, waiting.restarts) == ("", None, 2)
    assert "expected start 2026-11-26T09:52:12" in describe(waiting)
    assert "restart 2" in describe(waiting)


ARRAY = (
    PENDING.replace("JobId=8", "JobId=21 ArrayJobId=21 ArrayTaskId=4-6,9%2"),
    RUNNING.replace("JobId=1", "JobId=25 ArrayJobId=21 ArrayTaskId=3"),
    ended("FAILED", "3:0").replace("JobId=1", "JobId=24 ArrayJobId=21 ArrayTaskId=2"),
    ended("COMPLETED").replace("JobId=1", "JobId=23 ArrayJobId=21 ArrayTaskId=1"),
)


def test_an_array_has_ended_when_all_elements_have() -> None:
    job, over = parse_jobs("21", "".join(ARRAY)), parse_jobs("21", "".join(ARRAY[2:]))

    assert job is not None
    assert job.state == "running"
    assert job.elements == {
        4: "waiting", 5: "waiting", 6: "waiting", 9: "waiting", 3: "running", 2: "failed", 1: "succeeded"
    }  # fmt: skip
    assert over is not None
    assert (over.state, over.exit_code) == ("failed", 3)


def test_the_first_component_of_a_heterogeneous_job_decides() -> None:
    first = RUNNING.replace("JobId=1", "JobId=3 HetJobId=3 HetJobOffset=0")
    other = ended("COMPLETED").replace("JobId=1", "JobId=4 HetJobId=3 HetJobOffset=1")
    job = parse_jobs("3", other.replace("n[1-2]", "n3") + first)

    assert job is not None
    assert (job.state, job.nodes, job.elements) == ("running", "n3,n[1-2]", {})


@pytest.mark.parametrize(
    ("text", "state", "word", "elements"),
    [
        ("12|CANCELLED by 1000|0:15|n1|00:01:05|None\n", "cancelled", "CANCELLED", {}),
        ("12|OUT_OF_MEMORY|0:125|n1|00:01:05|None\n", "failed", "OUT_OF_MEMORY", {}),
        (
            "12_0|COMPLETED|0:0|n1|00:01:05|None\n12_1|FAILED|2:0|n1|00:00:06|None\n",
            "failed",
            "FAILED",
            {0: 1, 1: 1},
        ),
        (
            "12+0|COMPLETED|0:0|n1|00:01:05|None\n12+1|CANCELLED|0:0|n2|00:00:06|None\n",
            "succeeded",
            "COMPLETED",
            {},
        ),
    ],
)
def test_the_state_of_a_job_in_the_accounting(text: str, state: str, word: str, elements: Any) -> None:
    job = parse_accounts("12", text)

    assert job is not None
    assert (job.state, job.word, job.seconds) == (state, word, 65.0 if job.word != "FAILED" else 6.0)
    assert job.elements.keys() == elements.keys()


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("", "not looked"),
        ("Resources", "no node is free"),
        ("PartitionTimeLimit", "partition"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "down"),
        ("Nodes required for job are DOWN, DRAINED", "down"),
        ("QOSMaxJobsPerUserLimit", "limit"),
        ("AssocGrpCpuLimit", "limit"),
        ("InvalidAccount", "account"),
        ("InvalidQOS", "account or qos"),
        ("BadConstraints", "no node has"),
        ("BeginTime", "two minutes"),
        ("Dependency", "another job"),
        ("DependencyNeverSatisfied", "has failed"),
        ("JobHeldUser", "held"),
        ("JobHeldAdmin", "administrator"),
        ("Licenses", "license"),
        ("FutureReason", "job_reason_codes"),
    ],
)
def test_why_a_job_waits(reason: str, words: str) -> None:
    cause = waiting_cause(reason)

    assert words in cause.description
    assert cause.remedy
    assert cause in WAITING


@pytest.mark.parametrize(
    ("word", "reason", "cause"),
    [
        ("OUT_OF_MEMORY", "", "more memory"),
        ("TIMEOUT", "TimeLimit", "time limit"),
        ("NODE_FAIL", "NodeDown", "node of the job failed"),
        ("PREEMPTED", "", "higher priority"),
        ("", "", "killed"),
    ],
)
def test_a_job_that_slurm_has_ended_is_explained(word: str, reason: str, cause: str, tmp_path: Path) -> None:
    job = SlurmJob(id="7", state="failed", word=word, reason=reason)
    explanation = explain(job_failure(tmp_path, job))

    assert cause in explanation.cause
    assert "checkpoint" in explanation.next_step


def start(start_s: float, end_s: float | None = None, status: int | str | None = None) -> dict[str, object]:
    return {"start_s": start_s, "end_s": end_s, "exit": status, "stopped": status in ("SIGTERM", 143)}


def write_starts(directory: Path, **replicas: list[dict[str, object]]) -> None:
    """Writes what replicas have left; "worker_0" is worker-0."""
    directory.mkdir(exist_ok=True)
    for name, starts in replicas.items():
        name = name.replace("_", "-")
        content = {"name": name, "restarts": len(starts) - 1, "starts": starts}
        (directory / f"{name}.json").write_text(json.dumps(content))


KILLED = start(100.0, 109.0, "SIGKILL")
STOPPED = start(100.5, 109.5, "SIGTERM")


def test_the_replica_that_failed_first_is_blamed(tmp_path: Path) -> None:
    job = SlurmJob(id="38", state="failed", word="FAILED", exit_code=137, seconds=3.0)
    write_starts(tmp_path, chief_0=[STOPPED], worker_0=[KILLED], worker_1=[start(100.2, 109.2, 1)])
    failure, record = job_failure(tmp_path, job), job_record(tmp_path, job)

    assert (failure.replica, failure.exit_code, failure.restarts) == ("worker-0", 137, 0)
    assert [item.name for item in record.replicas] == ["chief-0", "worker-0", "worker-1"]
    assert [item.starts[0].start_s for item in record.replicas] == [0.5, 0.0, 0.2]
    assert record.replicas[1].starts[0].end_s == 9.0


def test_a_mistake_is_the_cause_of_other_failures(tmp_path: Path) -> None:
    job = SlurmJob(id="39", state="failed", word="FAILED", exit_code=2, seconds=3.0)
    write_starts(tmp_path, worker_0=[KILLED, start(110, 118, 1)], chief_0=[STOPPED, start(110, 119, 2)])
    (tmp_path / "chief-0.log").write_text("epoch 1\ntrain: error: no such model; name one\n")
    failure = job_failure(tmp_path, job)

    assert (failure.replica, failure.exit_code, failure.restarts) == ("chief-0", 2, 1)
    assert (failure.error, failure.is_own_message) == ("no such model; name one", True)
    assert failure.lines == ("epoch 1",)


def test_a_replica_that_left_no_end_comes_before_those_that_were_stopped(tmp_path: Path) -> None:
    job = SlurmJob(id="40", state="failed", word="NODE_FAIL", reason="NodeDown")
    write_starts(tmp_path, chief_0=[STOPPED], worker_0=[start(101)])
    failure = job_failure(tmp_path, job)

    assert (failure.replica, failure.exit_code) == ("worker-0", None)
    assert "NODE_FAIL" in failure.error


def test_what_the_script_says_explains_a_job_without_replicas(tmp_path: Path) -> None:
    (tmp_path / "slurm.log").write_text("a task is one too many\n")
    failure = job_failure(tmp_path, SlurmJob(id="3", state="failed", word="FAILED", exit_code=2))

    assert (failure.replica, failure.exit_code, failure.lines) == ("", 2, ("a task is one too many",))


def test_an_old_error_does_not_explain_what_slurm_has_ended(tmp_path: Path) -> None:
    write_starts(tmp_path, worker_0=[KILLED, STOPPED])
    (tmp_path / "worker-0.log").write_text("train: error: an error before a restart\n")
    failure = job_failure(tmp_path, SlurmJob(id="3", state="failed", word="TIMEOUT", exit_code=143))

    assert not failure.is_own_message
    assert "TIMEOUT" in failure.error


class Commands:
    """Answers of Slurm's commands by their names: output, or an error."""

    def __init__(self, **answers: str | BaseException | tuple[int, str]) -> None:
        self.answers = answers

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        answer = self.answers[command[0]]
        if isinstance(answer, BaseException):
            raise answer
        code, errors = answer if isinstance(answer, tuple) else (0, "")
        return subprocess.CompletedProcess(command, code, answer if isinstance(answer, str) else "", errors)


FORGOTTEN = (1, "slurm_load_jobs error: Invalid job id specified\n")
NO_ACCOUNTS = (1, "Slurm accounting storage is disabled\n")


def _answers(monkeypatch: pytest.MonkeyPatch, **answers: str | BaseException | tuple[int, str]) -> None:
    monkeypatch.setattr(slurm_job.subprocess, "run", Commands(**answers))


def test_a_forgotten_job_is_judged_by_the_exit_code_that_it_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _answers(monkeypatch, scontrol=FORGOTTEN, sacct=NO_ACCOUNTS)
    with pytest.raises(SettingsError, match="knows no job 7"):
        read_job("7", tmp_path)
    (tmp_path / "exit").write_text("2\n")
    failed = read_job("7", tmp_path)
    (tmp_path / "exit").write_text("0\n")

    assert (failed.state, failed.exit_code) == ("failed", 2)
    assert read_job("7", tmp_path).state == "succeeded"


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (FileNotFoundError(), SettingsError, "not installed"),
        (subprocess.TimeoutExpired("scontrol", 40), PlatformError, "did not answer"),
        (
            (1, "slurm_load_jobs error: Unable to contact slurm controller\n"),
            PlatformError,
            "Unable to contact",
        ),
    ],
)
def test_slurm_is_not_reached(
    answer: Any, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _answers(monkeypatch, scontrol=answer)
    with pytest.raises(error, match=words) as raised:
        read_job("7", tmp_path)
    assert "\n" not in str(raised.value)


def _run(runs: Path, name: str, job: str) -> Path:
    RunRecord(name=name, pipeline="train", state="running", engine="slurm", job=job).write(runs / name)
    (runs / name / "run.log").touch()
    return runs / name


def test_a_run_has_the_state_that_slurm_gives_its_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = _run(tmp_path, "a", "8")
    _answers(monkeypatch, scontrol=PENDING)
    waiting = read_local_record(run)
    _answers(monkeypatch, scontrol=(1, "Unable to contact slurm controller"))
    unknown = RunRecord.read(run)
    _answers(monkeypatch, scontrol=ended("OUT_OF_MEMORY"))
    failed = read_local_record(run)
    _answers(monkeypatch, scontrol=FORGOTTEN, sacct=NO_ACCOUNTS)

    assert waiting.state == "running"
    assert (
        waiting.headline()
        == "train waiting: Priority (other jobs are before it); expected start 2026-11-26T09:52:12"
    )
    assert waiting.explanation is not None
    assert "sprio" in waiting.explanation.next_step
    assert (unknown.state, unknown.error) == (
        "running",
        "scontrol failed: Unable to contact slurm controller",
    )
    assert failed.state == "failed"
    assert failed.explanation is not None
    assert "memory" in failed.explanation.cause
    assert read_local_record(run).explanation == failed.explanation  # Slurm has forgotten it


def test_the_first_job_of_a_run_that_has_not_succeeded_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = _run(tmp_path, "a", "11 12")
    for job_id, place, code in (("11", "write", "0"), ("12", "finish", "2")):
        directory = run / "replicas" / place
        directory.mkdir(parents=True)
        (directory / "job.id").write_text(job_id)
        (directory / "exit").write_text(code)
    _answers(monkeypatch, scontrol=FORGOTTEN, sacct=NO_ACCOUNTS)
    record = RunRecord.read(run)

    assert record.state == "failed"
    assert [(job.id, job.exit_code) for job in record.slurm] == [("11", 0), ("12", 2)]
    explanation = read_local_record(run).explanation
    assert explanation is not None
    assert explanation.failed == "finish"


def test_a_run_is_found_by_the_id_of_its_job(tmp_path: Path) -> None:
    run = _run(tmp_path, "a", "11 12")
    _run(tmp_path, "b", "13")

    assert find_run("12", tmp_path) == run
    with pytest.raises(SettingsError, match="no run '1'"):
        find_run("1", tmp_path)


@pytest.mark.parametrize(
    "error", ["Slurm job 3 failed: OUT_OF_MEMORY", "Slurm job 3 failed: NODE_FAIL, NodeDown"]
)
def test_a_cause_of_slurm_comes_before_any_other(error: str) -> None:
    assert "[Errno" not in explain(Failure(error=error, lines=("[Errno 28] No space left on device",))).cause


def test_elements_that_slurm_has_forgotten_are_judged_by_their_exit_codes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/bash\n#SBATCH --array=0-3\n")
    for number, code in (("0", "0\n"), ("1", "2\n")):
        write_starts(tmp_path / number, chief_0=[start(1, 2, int(code))])
        (tmp_path / number / "exit").write_text(code)
        (tmp_path / number / "chief-0.log").write_text(f"preprocess: error: part {number} is damaged\n")
    last = ended("COMPLETED").replace("JobId=1", "JobId=24 ArrayJobId=21 ArrayTaskId=3")
    _answers(monkeypatch, scontrol=last)
    job = read_job("21", tmp_path)
    _answers(monkeypatch, scontrol=FORGOTTEN, sacct=NO_ACCOUNTS)
    failure = job_failure(tmp_path, job)

    assert job.elements == {3: "succeeded", 0: "succeeded", 1: "failed", 2: "failed"}
    assert (job.state, job.exit_code) == ("failed", 2)
    assert read_job("21", tmp_path).elements[3] == "failed"  # it has left nothing
    assert (failure.replica, failure.error) == ("1/chief-0", "part 1 is damaged")
