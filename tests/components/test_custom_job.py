"""The local custom-job runner with real processes that need no TensorFlow."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelines.local import ports, supervisor
from pipelines.local.job import EXECUTOR_INPUT_MARKER, CustomJob, WorkerPool
from pipelines.local.processes import ProcessFailedError
from pipelines.local.supervisor import run_job
from trainer import progress
from trainer.errors import EXIT_BAD_INPUT, EXIT_FAILED, RunError
from trainer.progress import Event

pytestmark = pytest.mark.timeout(60)

#: What every replica's program starts with.
_PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from trainer import progress
from trainer.errors import ModelError
task = json.loads(os.environ["CLUSTER_SPEC"])["task"]
chief = task["type"] == "workerpool0"
"""


def _job(program: str, *, workers: int = 1, **settings: Any) -> CustomJob:
    command = [sys.executable, "-c", _PRELUDE + textwrap.dedent(program)]
    return CustomJob.with_workers(command, 1 + workers, **settings)


def _marked() -> list[psutil.Process]:
    """Processes of this test's replicas that are alive: they inherit its mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TEST_MARK") == str(os.getpid()) and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(autouse=True)
def no_orphans(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TEST_MARK", str(os.getpid()))
    yield
    deadline = time.monotonic() + 5
    while (left := _marked()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


@pytest.fixture
def events() -> Any:
    seen: list[Event] = []
    with progress.sink(seen.append):
        yield seen


def test_output_events_and_environment(tmp_path: Path, events: list[Event]) -> None:
    lines: list[tuple[str, str]] = []
    job = CustomJob(
        worker_pools=(
            WorkerPool(command=(sys.executable,), args=("-c", _PRELUDE + _REPORT), env={"MINE": "1"}),
            WorkerPool(command=(sys.executable,), args=("-c", _PRELUDE + _REPORT), replica_count=2),
        ),
        base_output_directory=str(tmp_path / "out"),
    )
    run_job(job, tmp_path / "logs", show_line=lambda name, line: lines.append((name, line)))
    seen = {name: json.loads(line) for name, line in lines if line.startswith("{")}
    assert set(seen) == {"chief-0", "worker-0", "worker-1"}
    assert seen["chief-0"]["MINE"] == "1"
    assert seen["worker-0"]["MINE"] is None
    assert seen["worker-1"]["AIP_MODEL_DIR"] == f"{tmp_path}/out/model/"
    assert ("chief-0", "no line end") in lines
    assert [event for event in events if event.kind == "fact"] == [Event("fact", "steps", "3", value=3)]
    # An event is a readable line in the replica's own log.
    assert "steps: 3\n" in (tmp_path / "logs" / "chief-0.log").read_text()


_REPORT = """
names = ("MINE", "AIP_MODEL_DIR", "TF_CONFIG")
print(json.dumps({name: os.environ.get(name) for name in names}))
if chief:
    progress.fact("steps", 3)
    print("no line end", end="")
    sys.stdout.flush()
    time.sleep(0.3)
"""


def test_variables_of_the_shell_do_not_leak_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "broken")
    monkeypatch.setenv("AIP_MODEL_DIR", "/elsewhere")
    run_job(_job("assert not {'TF_CONFIG', 'AIP_MODEL_DIR'} & set(os.environ)", workers=0), tmp_path)


def test_the_others_are_stopped_when_the_chief_has_succeeded(tmp_path: Path) -> None:
    started = time.monotonic()
    program = """
        if not chief:
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            time.sleep(600)
    """
    run_job(_job(program, workers=2), tmp_path)
    assert time.monotonic() - started < 6


def test_a_worker_that_ends_early_is_no_failure(tmp_path: Path) -> None:
    run_job(_job("if chief: time.sleep(0.5)"), tmp_path)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("raise ValueError('a bug')", "ended with exit code 1"),
        ("sys.exit(3)", "ended with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
    ],
)
def test_a_failure_ends_the_job_and_names_the_replica(
    tmp_path: Path, events: list[Event], end: str, words: str
) -> None:
    started = time.monotonic()
    program = f"""
        if task == {{"type": "workerpool1", "index": 1}}:
            print("last words", flush=True)
            {end}
        time.sleep(600)
    """
    with pytest.raises(ProcessFailedError, match=rf"^worker-1 {words} .*worker-1\.log") as caught:
        run_job(_job(program, workers=2), tmp_path)
    assert time.monotonic() - started < 5
    assert caught.value.exit_code == EXIT_FAILED
    told = Event("line", "train", "worker-1 | last words") in events
    assert told == ("SIGKILL" not in words)


def test_a_mistake_of_the_user_is_told_in_the_replicas_words_and_not_tried_again(
    tmp_path: Path, events: list[Event]
) -> None:
    program = f"""
        with Path({str(tmp_path / "starts")!r}).open("a") as file:
            file.write("x")
        if chief:
            with progress.errors_end_the_process("train"):
                raise ModelError("no such model")
        time.sleep(600)
    """
    job = _job(program, restart_job_on_worker_restart=True)
    with pytest.raises(ProcessFailedError, match=r"^no such model$") as caught:
        run_job(job, tmp_path / "logs")
    assert caught.value.exit_code == EXIT_BAD_INPUT
    assert caught.value.topic == "train"
    assert len((tmp_path / "starts").read_text()) <= 2
    assert [event.text for event in events] == ["starting chief-0, worker-0"]  # the caller says it, once


@pytest.mark.parametrize(("restart", "starts"), [(False, 1), (True, 2)])
def test_all_replicas_start_again_where_the_job_asks_for_it(
    tmp_path: Path, events: list[Event], restart: bool, starts: int
) -> None:
    program = f"""
        with Path({str(tmp_path / "starts")!r}).open("a") as file:
            file.write(os.environ["TF_CONFIG"].partition('"task"')[0] + "\\n")
        if not chief:
            sys.exit(5)
        time.sleep(600)
    """
    with pytest.raises(ProcessFailedError, match="worker-0 ended with exit code 5"):
        run_job(_job(program, restart_job_on_worker_restart=restart), tmp_path / "logs")
    texts = [event.text for event in events if "restart" in event.text]
    assert len(texts) == starts - 1
    clusters = (tmp_path / "starts").read_text().splitlines()
    assert len(set(clusters)) == 1  # addresses survive a restart


def test_a_job_that_recovers_has_succeeded(tmp_path: Path, events: list[Event]) -> None:
    program = f"""
        flag = Path({str(tmp_path / "failed")!r})
        if not chief and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if chief and not flag.exists():
            time.sleep(600)
    """
    run_job(_job(program, restart_job_on_worker_restart=True), tmp_path / "logs")
    assert "all replicas start again (restart 1 of 1)" in events[-1].text


def test_the_timeout_is_enforced(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RunError, match=r"timeout of 0\.5 s has passed"):
        run_job(_job("time.sleep(600)", timeout=0.5), tmp_path)
    assert time.monotonic() - started < 5


def test_a_replica_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor.processes, "GRACE_S", 0.3)
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    with pytest.raises(RunError, match="timeout"):
        run_job(_job(program, timeout=1.0), tmp_path)


def test_a_command_that_does_not_exist(tmp_path: Path, events: list[Event]) -> None:
    with pytest.raises(ProcessFailedError, match="chief-0 could not be started"):
        run_job(CustomJob.with_workers(["/no/such/program"], 1), tmp_path)
    assert "No such file or directory" in events[1].text


def test_much_output_comes_through_whole(tmp_path: Path) -> None:
    lines: list[str] = []
    program = "for number in range(200_000): print('line', number)"
    run_job(_job(program, workers=0), tmp_path, show_line=lambda name, line: lines.append(line))
    assert lines == [f"line {number}" for number in range(200_000)]


def test_reserved_ports_can_be_bound_by_name_only() -> None:
    with ports.reserve(3) as addresses:
        assert len(set(addresses)) == 3
        host, port = addresses[0].split(":")
        with socket.socket() as server, pytest.raises(OSError, match="in use"):
            server.bind((host, int(port)))
        with socket.socket() as server:  # as gRPC does
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("0.0.0.0", int(port)))
            server.listen()
            socket.create_connection((host, int(port)), timeout=5).close()


_HANG = """
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path(os.environ["STARTED"], f"{task['type']}-{task['index']}").touch()
time.sleep(600)
"""


def _start_runner(tmp_path: Path) -> subprocess.Popen[bytes]:
    """Starts `python -m pipelines.local.custom_job` with two replicas that hang behind a shell."""
    started = tmp_path / "started"
    started.mkdir()
    # The shell does not exec: the Python below it is a grandchild that the kernel's signal misses.
    container = {
        "image_uri": "toy:1",
        "command": ["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, _PRELUDE + _HANG],
        "args": [EXECUTOR_INPUT_MARKER],
    }
    pool = {"container_spec": container, "replica_count": 1.0}
    payload = {"display_name": "toy", "job_spec": {"worker_pool_specs": [pool, pool]}}
    runner = subprocess.Popen(
        [
            *(sys.executable, "-m", "pipelines.local.custom_job", "--executor_input", "{}"),
            *("--type", "CustomJob", "--project", "p", "--location", "l", "--payload", json.dumps(payload)),
            *("--gcp_resources", str(tmp_path / "task" / "gcp_resources")),
        ],
        env={**os.environ, "STARTED": str(started)},
    )
    deadline = time.monotonic() + 20
    while len(list(started.iterdir())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return runner


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGKILL, -9)],
)
def test_no_replica_outlives_the_runner(tmp_path: Path, signum: int, code: int) -> None:
    runner = _start_runner(tmp_path)
    assert len(_marked()) > 6  # two guardians, two shells, two programs and what they have started
    runner.send_signal(signum)
    assert runner.wait(10) == code  # and the fixture looks for what is left


@pytest.mark.parametrize("which", ["guardian.py", "sh"])
def test_a_killed_link_of_the_chain_is_a_failed_replica(
    tmp_path: Path, which: str, capfd: pytest.CaptureFixture[str]
) -> None:
    runner = _start_runner(tmp_path)

    def is_victim(item: psutil.Process) -> bool:
        return any(Path(part).name == which for part in item.cmdline()[:4])

    victim = next(item for item in psutil.Process(runner.pid).children(recursive=True) if is_victim(item))
    victim.kill()
    assert runner.wait(10) == 1
    assert re.search(r"(chief|worker)-0 was killed by SIGKILL", capfd.readouterr().err)


def test_the_launchers_output_is_written(tmp_path: Path) -> None:
    container = {"image_uri": "toy:1", "command": ["true"]}
    payload = {"job_spec": {"worker_pool_specs": [{"container_spec": container, "replica_count": 1}]}}
    resources = tmp_path / "task" / "gcp_resources"
    subprocess.run(
        [
            *(sys.executable, "-m", "pipelines.local.custom_job", "--executor_input", "{}"),
            *("--payload", json.dumps(payload), "--gcp_resources", str(resources)),
        ],
        check=True,
    )
    assert json.loads(resources.read_text()) == {"resources": []}


def test_a_payload_that_cannot_run_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pipelines.local.custom_job", "--executor_input", "{}"),
            *("--payload", '{"display_name": "a "b""}', "--gcp_resources", str(tmp_path / "gcp_resources")),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == EXIT_BAD_INPUT
    assert len(done.stderr.splitlines()) == 1
    assert "payload is not JSON" in done.stderr
    assert list(tmp_path.iterdir()) == []
