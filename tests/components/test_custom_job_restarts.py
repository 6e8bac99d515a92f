"""Restarts when a replica of a local custom job fails, is preempted, or is told to."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from shardline.pipelines.local.job import parse_injection, run_job, supervisor
from shardline.pipelines.local.process import ProcessFailedError
from shardline.trainer.base.progress import Event
from tests.helpers.jobs import make_job

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_orphans")]


def _job_file(logs: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((logs / "job.json").read_text())
    return content


def _restarts(logs: Path) -> dict[str, int]:
    return {item["name"]: item["restarts"] for item in _job_file(logs)["replicas"]}


def _restart_lines(events: list[Event]) -> list[str]:
    """What was said of restarts, without the seconds."""
    found = [event.text for event in events if " restart" in event.text and "(" in event.text]
    return [re.sub(r" after \d+ s", "", text) for text in found]


def test_a_replica_restarts_in_its_place_and_then_the_whole_job(tmp_path: Path, events: list[Event]) -> None:
    program = f"""
        with Path({str(tmp_path / "clusters")!r}).open("a") as file:
            file.write(os.environ["TF_CONFIG"].partition('"task"')[0] + "\\n")
        if not chief:
            sys.exit(5)
        time.sleep(600)
    """
    with pytest.raises(ProcessFailedError, match="worker-0 ended with exit code 5"):
        run_job(make_job(program), tmp_path / "logs")
    assert _restart_lines(events) == [
        "worker-0 ended with exit code 5; it restarts (restart 1 of 1)",
        "worker-0 ended with exit code 5; all replicas restart (restart 1 of 1)",
    ]
    assert _restarts(tmp_path / "logs") == {"chief-0": 1, "worker-0": 2}
    # Addresses survive a restart.
    assert len(set((tmp_path / "clusters").read_text().splitlines())) == 1


def test_nothing_restarts_where_retries_are_disabled(tmp_path: Path, events: list[Event]) -> None:
    job = make_job("sys.exit(EXIT_RESTART if chief else 1)", disable_retries=True)
    with pytest.raises(ProcessFailedError):
        run_job(job, tmp_path)
    assert _restarts(tmp_path) == {"chief-0": 0, "worker-0": 0}


@pytest.mark.parametrize("whole_job", [False, True])
def test_a_job_that_recovers_has_succeeded(tmp_path: Path, events: list[Event], whole_job: bool) -> None:
    program = f"""
        number = start_number({str(tmp_path)!r})
        if not chief and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if chief:
            while Path({str(tmp_path / "worker-0.starts")!r}).read_text() != "xx": time.sleep(0.01)
    """
    (tmp_path / "worker-0.starts").touch()
    run_job(make_job(program, restart_job_on_worker_restart=whole_job), tmp_path / "logs")
    assert _restarts(tmp_path / "logs") == {"chief-0": int(whole_job), "worker-0": 1}
    assert len(_restart_lines(events)) == 1
    table = [event.text.split() for event in events[-3:]]
    assert table[0] == ["replica", "start", "end", "exit", "restarts", "peak", "memory"]
    assert [(row[0], row[5], row[6]) for row in table[1:]] == [
        ("chief-0", "0", str(int(whole_job))),
        ("worker-0", "0", "1"),
    ]


def test_the_summary_knows_the_memory_of_what_a_shell_has_started(tmp_path: Path) -> None:
    program = 'subprocess.run([sys.executable, "-c", "x = b\'x\' * 200_000_000"], check=True)'
    run_job(make_job(program, workers=0), tmp_path)
    (replica,) = _job_file(tmp_path)["replicas"]
    assert 200e6 < replica["starts"][0]["peak_memory_bytes"] < 260e6


def test_a_replica_that_asks_for_it_restarts_without_a_failure(tmp_path: Path, events: list[Event]) -> None:
    """More often than failures may happen; the chief's own checkpoint is waited for."""
    program = f"""
        number = start_number({str(tmp_path)!r})
        if number < 4:
            if chief:
                time.sleep(0.3)
                Path({str(tmp_path)!r}, f"saved-{{number}}").touch()
            sys.exit(EXIT_RESTART)
    """
    run_job(make_job(program, restart_job_on_worker_restart=True), tmp_path)
    asked = "worker-0 asked for a restart; all replicas restart (preemption 3 of 6)"
    assert _restart_lines(events)[2] == asked
    assert len(list(tmp_path.glob("saved-*"))) == 3
    assert _restarts(tmp_path) == {"chief-0": 3, "worker-0": 3}


def test_a_chief_that_succeeds_while_a_worker_asks_for_a_restart_has_succeeded(tmp_path: Path) -> None:
    program = f"""
        if not chief:
            Path({str(tmp_path / "asked")!r}).touch()
            sys.exit(EXIT_RESTART)
        wait_for({str(tmp_path / "asked")!r})
        time.sleep(0.3)
    """
    run_job(make_job(program, restart_job_on_worker_restart=True), tmp_path)
    assert _restarts(tmp_path) == {"chief-0": 0, "worker-0": 0}


def test_preemptions_are_bounded(tmp_path: Path, events: list[Event]) -> None:
    with pytest.raises(ProcessFailedError, match=r"chief-0 asked for a restart after \d+ s"):
        run_job(make_job("sys.exit(EXIT_RESTART)", workers=0), tmp_path)
    assert _restarts(tmp_path) == {"chief-0": 6}


_TRAIN = """
number = start_number(os.environ["MARKS"])
def save(*_):
    Path(os.environ["MARKS"], f"{name}-saved-{number}").touch()
    sys.exit(EXIT_RESTART)
signal.signal(signal.SIGTERM, save)
for step in range(1, 41):
    if chief:
        progress.advance("train", step, 40, "steps")
        if step == 21:  # stays below the end until the drill is over
            wait_for(os.environ["GO"])
    time.sleep(0.01)
"""


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where replicas leave marks; the chief ends only when there is one named "go"."""
    directory = tmp_path / "marks"
    directory.mkdir()
    monkeypatch.setenv("MARKS", str(directory))
    monkeypatch.setenv("GO", str(directory / "go"))
    return directory


def _drill(logs: Path, program: str, *injections: str, workers: int = 1, **settings: Any) -> None:
    wanted = [parse_injection(text) for text in injections]
    run_job(make_job(program, workers=workers, **settings), logs, injections=wanted)


@pytest.mark.parametrize("whole_job", [False, True])
def test_a_preempted_replica_saves_and_comes_back(
    tmp_path: Path, events: list[Event], marks: Path, monkeypatch: pytest.MonkeyPatch, whole_job: bool
) -> None:
    monkeypatch.setattr("shardline.pipelines.local.process.GRACE_S", 0.3)
    program = f"""
        if {whole_job} and chief and Path(os.environ["MARKS"], "chief-0.starts").exists():
            Path(os.environ["GO"]).touch()
        {{train}}
        if not chief: time.sleep(600)
    """
    train = _TRAIN.strip().replace("\n", "\n        ")
    if not whole_job:
        train = train.replace(
            "def save", 'if number == 2: Path(os.environ["GO"]).touch()\n        def save', 1
        )
    _drill(
        tmp_path / "logs",
        program.replace("{train}", train),
        "preempt:worker:0@step=20",
        restart_job_on_worker_restart=whole_job,
    )
    assert "injected: preempt worker-0" in [event.text for event in events]
    (words,) = _restart_lines(events)
    what = "all replicas restart" if whole_job else "it restarts"
    assert words == f"worker-0 was preempted; {what} (preemption 1 of 6)"
    assert (marks / "worker-0-saved-1").exists()
    assert (marks / "chief-0-saved-1").exists() == whole_job  # it is asked to end, with time to save
    assert _restarts(tmp_path / "logs") == {"chief-0": int(whole_job), "worker-0": 1}


def test_a_preempted_replica_has_only_the_grace(
    tmp_path: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "PREEMPTION_GRACE_S", 0.3)
    program = f"""
        number = start_number({str(tmp_path)!r})
        if number == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            progress.advance("train", 1, 1, "steps")
            time.sleep(600)
    """
    _drill(tmp_path / "logs", program, "preempt:chief@step=1", workers=0)
    (replica,) = _job_file(tmp_path / "logs")["replicas"]
    assert [start["exit"] for start in replica["starts"]] == ["SIGKILL", 0]


def test_a_replica_is_killed_at_a_time(tmp_path: Path, events: list[Event]) -> None:
    program = f"time.sleep(600 if time.time() < {time.time() + 0.5} else 0)"  # the first start only
    _drill(tmp_path / "logs", program, "kill:chief@t=0.5s", workers=0)
    assert _restart_lines(events) == ["chief-0 was killed by SIGKILL; it restarts (restart 1 of 1)"]


def test_an_injection_that_did_not_happen_is_told(tmp_path: Path, events: list[Event]) -> None:
    program = "if chief: progress.advance('train', 3, 3, 'steps'); time.sleep(0.3)"
    _drill(tmp_path, program, "kill:chief@step=30", "kill:worker:0@t=100s")
    assert [event.text for event in events][-2:] == [
        "not injected: kill chief-0 at step 30; the job ended first",
        "not injected: kill worker-0 at 100 s; the job ended first",
    ]
