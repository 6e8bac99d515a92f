"""A job of Slurm is submitted and followed: states, growing logs, outages, and its error."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardline.components.runs.record import ReplicaRecord, ReplicaStart
from shardline.components.runs.slurm_job import SlurmJob
from shardline.pipelines.engines.custom_job import CustomJob
from shardline.pipelines.engines.slurm import engine
from shardline.pipelines.engines.slurm.engine import batch_job, follow, run_job, submit
from shardline.pipelines.engines.slurm.script import BatchJob
from shardline.pipelines.engines.slurm.settings import SlurmSettings
from shardline.trainer.base import progress
from shardline.trainer.base.errors import (
    CancelledRunError,
    PlatformError,
    RunError,
    SettingsError,
    ShardlineError,
)

WAITING = SlurmJob(id="7", state="waiting", word="PENDING", reason="Resources")
RUNNING = SlurmJob(id="7", state="running", word="RUNNING", nodes="n[1-2]")
DONE = SlurmJob(id="7", state="succeeded", word="COMPLETED", exit_code=0, seconds=9.0)
FAILED = SlurmJob(id="7", state="failed", word="FAILED", exit_code=143, seconds=9.0)
CANCELLED = SlurmJob(id="7", state="cancelled", word="CANCELLED", exit_code=143)
DOWN = PlatformError("Slurm did not answer")

Answer = SlurmJob | BaseException | Callable[[], Any]


class Slurm:
    """A Slurm with a clock of its own: answers in turn, the last for ever; a function is called first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.asked: list[float] = []
        self.cancelled: list[str] = []
        self.answers: list[Answer] = [DONE]
        self.events: list[str] = []
        self.lines: list[tuple[str, str]] = []
        monkeypatch.setattr(engine.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(engine.time, "sleep", self._sleep)
        monkeypatch.setattr(engine.slurm_job, "read_job", self._read)
        monkeypatch.setattr(engine.slurm_job, "cancel_job", self._cancel)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _read(self, job_id: str, directory: Path | None = None) -> SlurmJob:
        self.asked.append(self.now)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            answer()
            return self._read(job_id)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _cancel(self, job_id: str) -> bool:
        self.cancelled.append(job_id)
        self.answers = [CANCELLED]
        return True

    def show_line(self, name: str, line: str) -> None:
        self.lines.append((name, line))

    def follow(self, directory: Path) -> None:
        with progress.sink(lambda event: self.events.append(event.text)):
            follow("7", directory, topic="train", show_line=self.show_line)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    return Slurm(monkeypatch)


def test_states_are_reported_when_they_change_and_lines_when_they_are_whole(
    slurm: Slurm, tmp_path: Path
) -> None:
    log = tmp_path / "worker-0.log"

    def write(text: str) -> Callable[[], None]:
        def append() -> None:
            with log.open("a") as file:
                file.write(text)

        return append

    slurm.answers = [WAITING, WAITING, write("step 1\nste"), RUNNING, write("p 2\nlast"), RUNNING, DONE]
    slurm.follow(tmp_path)

    assert slurm.events == [
        "waiting: Resources (no node is free at present)", "running on n[1-2]", "succeeded"
    ]  # fmt: skip
    assert slurm.lines == [("worker-0", "step 1"), ("worker-0", "step 2"), ("worker-0", "last")]
    assert json.loads((tmp_path / "job.json").read_text())["state"] == "succeeded"


def test_a_job_that_waits_for_long_is_asked_about_every_few_seconds(slurm: Slurm, tmp_path: Path) -> None:
    slurm.answers = [*(replace(WAITING, start=f"2030-01-01T12:{n:02}:00") for n in range(60)), DONE]
    slurm.follow(tmp_path)

    pauses = [after - before for before, after in zip(slurm.asked, slurm.asked[1:], strict=False)]
    assert min(pauses) >= 2
    assert pauses[-1] >= 5
    assert len(slurm.events) == 2


def test_an_outage_of_some_minutes_is_waited_for(slurm: Slurm, tmp_path: Path) -> None:
    slurm.answers = [RUNNING, *[DOWN] * 40, DONE]
    slurm.follow(tmp_path)

    assert slurm.events == ["running on n[1-2]", "Slurm did not answer; asking again", "succeeded"]


def test_a_job_of_which_nothing_is_known_any_more_has_failed(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name)
    slurm.answers = [RUNNING, SettingsError("Slurm knows no job 7")]
    with pytest.raises(RunError, match="no longer knows job 7") as raised:
        slurm.follow(tmp_path)
    assert raised.value.exit_code == 1


def test_a_longer_outage_is_an_error(slurm: Slurm, tmp_path: Path) -> None:
    slurm.answers = [RUNNING, DOWN]
    with pytest.raises(PlatformError):
        slurm.follow(tmp_path)
    assert 300 < slurm.now < 320


@pytest.mark.parametrize(
    ("job", "ends", "error", "code", "words"),
    [
        (FAILED, {"worker-0": 2}, RunError, 2, "no such column"),
        (FAILED, {"chief-0": "SIGKILL"}, RunError, 1, "chief-0 ended with SIGKILL"),
        (SlurmJob(id="7", state="failed", word="TIMEOUT"), {}, RunError, 1, "TIMEOUT"),
        (CANCELLED, {}, CancelledRunError, 4, "was cancelled"),
    ],
)
def test_the_error_of_a_job_is_that_of_its_replica(
    job: SlurmJob,
    ends: dict[str, int | str],
    error: type[ShardlineError],
    code: int,
    words: str,
    slurm: Slurm,
    tmp_path: Path,
) -> None:
    for name, status in ends.items():
        ReplicaRecord(name, 0, (ReplicaStart(start_s=1.0, end_s=2.0, exit=status),)).write(tmp_path)
    (tmp_path / "chief-0.log").write_text("step 1\n")
    (tmp_path / "worker-0.log").write_text("train: error: no such column\n")
    slurm.answers = [job]

    with pytest.raises(error, match=words) as raised:
        slurm.follow(tmp_path)
    assert raised.value.exit_code == code
    assert (tmp_path / "job.json").is_file()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "batch_script", lambda job, settings: f"#!/bin/bash\n# {settings.time}\n")


def _sbatch(monkeypatch: pytest.MonkeyPatch, answer: str | PlatformError) -> list[list[str]]:
    commands = []

    def run(command: list[str], **options: Any) -> str:
        commands.append(command)
        if isinstance(answer, PlatformError):
            raise answer
        return answer

    monkeypatch.setattr(engine.slurm_job, "run_slurm", run)
    return commands


JOB = CustomJob.with_roles(["python", "a.py"], 3, timeout=90)


def test_a_custom_job_has_tasks_of_each_pool(tmp_path: Path) -> None:
    job = batch_job(JOB, tmp_path)

    assert (job.tasks, job.command) == ({"chief": 1, "worker": 2}, ("python", "a.py"))
    assert job.directory == tmp_path


def test_a_submitted_job_leaves_its_script_and_id(
    monkeypatch: pytest.MonkeyPatch, script: None, tmp_path: Path
) -> None:
    commands = _sbatch(monkeypatch, "12;cluster\n")
    job = BatchJob(name="a", directory=tmp_path / "replicas" / "train")

    assert submit(job, SlurmSettings(time="5")) == "12"
    assert commands == [["sbatch", "--parsable", str(job.directory / "job.sh")]]
    assert (job.directory / "job.sh").read_text() == "#!/bin/bash\n# 5\n"
    assert (job.directory / "job.id").read_text() == "12"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("Invalid partition name specified", SettingsError),
        ("Invalid account or account/partition combination specified", SettingsError),
        ("Requested node configuration is not available", SettingsError),
        ("Memory specification can not be satisfied", SettingsError),
        ("sbatch: unrecognized option '--foo'", SettingsError),
        ("Job violates accounting/QOS policy (job submit limit)", PlatformError),
        ("Unable to contact slurm controller", PlatformError),
    ],
)
def test_what_sbatch_refuses_is_a_mistake_or_may_work_later(
    answer: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch, script: None, tmp_path: Path
) -> None:
    _sbatch(monkeypatch, PlatformError(f"sbatch failed: {answer}"))
    with pytest.raises(error, match="sbatch"):
        submit(BatchJob(name="a", directory=tmp_path), SlurmSettings())


def test_a_job_is_cancelled_by_what_stops_the_one_who_follows_it(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, script: None, tmp_path: Path
) -> None:
    _sbatch(monkeypatch, "7\n")
    slurm.answers = [KeyboardInterrupt(), RUNNING]

    with pytest.raises(KeyboardInterrupt):
        run_job(JOB, tmp_path, SlurmSettings(), show_line=slurm.show_line)
    assert slurm.cancelled == ["7"]
    assert "# 2" in (tmp_path / "job.sh").read_text()  # the job's own timeout, in minutes
