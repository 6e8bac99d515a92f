"""The local custom-job runner with real processes that need no TensorFlow."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from shardline.pipelines.local.job import CustomJob, run_job
from shardline.pipelines.local.process import ProcessFailedError, network
from shardline.trainer.base import files
from shardline.trainer.base.errors import EXIT_BAD_INPUT, EXIT_FAILED, PipelineError, RunError
from shardline.trainer.base.progress import Event
from shardline.trainer.cluster import SECRET_VARIABLE
from tests.helpers.jobs import PRELUDE, make_job, pool

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_orphans")]

_REPORT = """
names = ("MINE", "AIP_MODEL_DIR", "TF_CONFIG")
print(json.dumps({name: os.environ.get(name) for name in names}))
if chief:
    progress.fact("steps", 3)
    print("no line end", end="")
    sys.stdout.flush()
    time.sleep(0.3)
"""


def _texts(events: list[Event]) -> list[str]:
    return [event.text for event in events]


def test_output_events_and_environment(tmp_path: Path, events: list[Event]) -> None:
    lines: list[tuple[str, str]] = []
    job = CustomJob(
        worker_pools=(
            pool(sys.executable, "-c", PRELUDE + _REPORT, env=[{"name": "MINE", "value": "1"}]),
            pool(sys.executable, "-c", PRELUDE + _REPORT, replica_count=2),
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


def test_variables_of_the_shell_do_not_leak_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "broken")
    monkeypatch.setenv("AIP_MODEL_DIR", "/elsewhere")
    run_job(make_job("assert not {'TF_CONFIG', 'AIP_MODEL_DIR'} & set(os.environ)", workers=0), tmp_path)


def test_a_bucket_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
        from shardline.trainer.base.files import local_path
        out = local_path(os.environ["AIP_MODEL_DIR"])
        assert out == local_path("/gcs/bucket/job/model")
        out.mkdir(parents=True)
        (out / name).touch()
    """
    job = make_job(program, workers=0, base_output_directory="gs://bucket/job")
    monkeypatch.setenv(files.GCS_ROOT_VARIABLE, str(tmp_path / "mine"))
    run_job(job, tmp_path / "logs")
    assert (tmp_path / "mine/bucket/job/model/chief-0").exists()


def test_workers_and_servers_that_never_end_are_stopped(tmp_path: Path) -> None:
    """As those of a parameter-server job, which wait in TensorFlow's C++ and hear no SIGTERM."""
    program = f"""
        if not chief:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            Path({str(tmp_path)!r}, name).touch()
            time.sleep(600)
        wait_for({str(tmp_path / "worker-0")!r})
        wait_for({str(tmp_path / "ps-0")!r})
        wait_for({str(tmp_path / "evaluator-0")!r})
    """
    run_job(make_job(program, ps=1, evaluator=True), tmp_path / "logs")
    replicas = json.loads((tmp_path / "logs" / "job.json").read_text())["replicas"]
    assert [(item["name"], item["starts"][0]["exit"]) for item in replicas] == [
        ("chief-0", 0),
        ("worker-0", "SIGKILL"),
        ("ps-0", "SIGKILL"),
        ("evaluator-0", "SIGKILL"),
    ]


def test_a_worker_that_ends_early_is_no_failure(tmp_path: Path) -> None:
    run_job(make_job("if chief: time.sleep(0.5)"), tmp_path)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("raise ValueError('a bug')", "ended with exit code 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
    ],
)
def test_a_failure_ends_the_job_and_names_the_replica(tmp_path: Path, end: str, words: str) -> None:
    program = f"""
        if name == "worker-1":
            print("last words", flush=True)
            {end}
        time.sleep(600)
    """
    with pytest.raises(ProcessFailedError, match=rf"^worker-1 {words} .*worker-1\.log") as caught:
        run_job(make_job(program, workers=2), tmp_path)
    assert caught.value.exit_code == EXIT_FAILED
    assert (tmp_path / "worker-1.log").read_text().count("last words\n") == 3  # each time it started


def test_a_mistake_of_the_user_is_told_in_the_replicas_words_and_not_tried_again(
    tmp_path: Path, events: list[Event]
) -> None:
    program = f"""
        assert start_number({str(tmp_path)!r}) == 1
        if chief:
            with progress.exit_on_error("train"):
                raise ModelError("no such model")
        time.sleep(600)
    """
    with pytest.raises(ProcessFailedError, match=r"^no such model$") as caught:
        run_job(make_job(program), tmp_path / "logs")
    assert caught.value.exit_code == EXIT_BAD_INPUT
    assert _texts(events) == ["starting chief-0, worker-0"]  # the caller says it, once


@pytest.mark.parametrize("restart", [False, True])
def test_a_mistake_is_told_although_a_peer_fails_of_it_first(tmp_path: Path, restart: bool) -> None:
    program = f"""
        def tell(*_):
            progress.fail("train", ModelError("no such model"))
            sys.exit(2)
        if chief:
            if {restart}:
                signal.signal(signal.SIGTERM, tell)
            else:
                progress.fail("train", ModelError("no such model"))
            Path({str(tmp_path / "told")!r}).touch()
            time.sleep(600)
        wait_for({str(tmp_path / "told")!r})
        sys.exit(1)
    """
    with pytest.raises(ProcessFailedError, match=r"^no such model$"):
        run_job(make_job(program, restart_job_on_worker_restart=restart), tmp_path / "logs")


def test_a_command_that_does_not_exist(tmp_path: Path, events: list[Event]) -> None:
    pools = (pool("true"), pool("/no/such"))
    with pytest.raises(PipelineError, match="worker-0 cannot be started: there is no command '/no/such'"):
        run_job(CustomJob(worker_pools=pools), tmp_path / "logs")
    assert events == []
    assert not (tmp_path / "logs").exists()


def test_a_command_that_cannot_be_executed_is_not_tried_again(tmp_path: Path, events: list[Event]) -> None:
    (tmp_path / "program").write_text("no program")
    (tmp_path / "program").chmod(0o755)
    with pytest.raises(ProcessFailedError, match="chief-0 could not be started") as caught:
        run_job(CustomJob.with_roles([str(tmp_path / "program")], 1), tmp_path)
    assert caught.value.exit_code == EXIT_BAD_INPUT
    assert "Exec format error" in (tmp_path / "chief-0.log").read_text()
    assert "starts again" not in str(_texts(events))


def test_a_flood_stalls_nobody_and_stays_out_of_memory(tmp_path: Path) -> None:
    """One worker prints lines without end, another bytes without line ends: the chief is heard at once."""
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    program = f"""
        if name == "worker-0":
            while True:
                os.write(1, (b"x" * 99 + b"\\n") * 1000)
        if name == "worker-1":
            while True:
                os.write(1, b"y" * 100_000)
        while sum(path.stat().st_size for path in Path({str(tmp_path)!r}).glob("worker-*.log")) < 30_000_000:
            print("still here", flush=True)
            time.sleep(0.05)
    """
    seen: list[str] = []
    run_job(make_job(program, workers=2), tmp_path, show_line=lambda name, line: seen.append(name))
    assert seen.count("chief-0") > 3
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 24 * 1024  # KiB


def test_reserved_ports_can_be_bound_by_name_only() -> None:
    with network.reserve_ports(3) as addresses:
        assert len(set(addresses)) == 3
        host, port = addresses[0].split(":")
        with socket.socket() as server, pytest.raises(OSError, match="in use"):
            server.bind((host, int(port)))
        with socket.socket() as server:  # as gRPC does
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("0.0.0.0", int(port)))
            server.listen()
            socket.create_connection((host, int(port)), timeout=5).close()


def test_replicas_share_a_secret_that_no_other_job_and_no_file_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Event]
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "of the shell")
    secrets: list[str] = []
    for job in ("one", "two"):
        program = f"Path({str(tmp_path)!r}, '{job}-' + name).write_text(os.environ[{SECRET_VARIABLE!r}])"
        run_job(make_job(program), tmp_path / job)
        own = {file.read_text() for file in tmp_path.glob(f"{job}-*")}
        assert len(own) == 1
        secrets += own
    assert len(secrets) == len({*secrets, "of the shell"}) - 1
    assert all(len(secret) == 64 for secret in secrets)
    written = [file.read_text() for file in tmp_path.glob("*/*")] + _texts(events)
    assert not any(secret in text for secret in secrets for text in written)


def test_the_crash_file_of_a_replica_lies_beside_its_log(tmp_path: Path) -> None:
    program = "with progress.exit_on_error('train'): raise ZeroDivisionError('a bug')"
    with pytest.raises(ProcessFailedError, match="ZeroDivisionError: a bug") as caught:
        run_job(make_job(program, workers=0, disable_retries=True), tmp_path / "logs")
    (file,) = (tmp_path / "logs").glob("shardline-crash-*")
    assert str(file) in str(caught.value)


def test_a_replica_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardline.pipelines.local.process.GRACE_S", 0.3)
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    with pytest.raises(RunError, match=r"timeout of 1 s has passed"):
        run_job(make_job(program, timeout=1.0), tmp_path)
    assert "timeout" in json.loads((tmp_path / "job.json").read_text())["error"]


def test_a_timeout_may_be_months(tmp_path: Path) -> None:
    run_job(make_job("", timeout=1e8), tmp_path)
