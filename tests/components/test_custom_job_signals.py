"""However the runner of a custom job comes to its end, no process of the job is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from shardline.pipelines.local.job import EXECUTOR_INPUT_MARKER
from shardline.pipelines.local.process import processes
from shardline.trainer.base.errors import EXIT_BAD_INPUT
from tests.helpers.jobs import PRELUDE, eventually, marked

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_orphans")]

# One child in the replica's own session, and a daemon: in a session of its own, its parent gone.
_HANG = """
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
daemon = "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(600)"
subprocess.run([sys.executable, "-c", daemon])
import tempfile
tempfile.mkdtemp(prefix=f"shardline-{name}-")
Path(os.environ["STARTED"], name).touch()
time.sleep(600)
"""


def _runner(payload: str, resources: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "shardline.pipelines.local.launcher_stubs", "CustomJob"),
        *("--executor_input", "{}", "--type", "CustomJob", "--project", "p", "--location", "l"),
        *("--payload", payload, "--gcp_resources", str(resources)),
    ]


def _temporary(tmp_path: Path) -> Path:
    return tmp_path / "temporary"


def _start_runner(tmp_path: Path) -> subprocess.Popen[bytes]:
    """Starts the runner with two replicas that hang behind a shell."""
    started = tmp_path / "started"
    started.mkdir()
    # The shell does not exec: the Python below it is a grandchild that the kernel's signal misses.
    container = {
        "image_uri": "toy:1",
        "command": ["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, PRELUDE + _HANG],
        "args": [EXECUTOR_INPUT_MARKER],
    }
    pool = {"container_spec": container, "replica_count": 1.0}
    payload = {"display_name": "toy", "job_spec": {"worker_pool_specs": [pool, pool]}}
    _temporary(tmp_path).mkdir()
    runner = subprocess.Popen(
        _runner(json.dumps(payload), tmp_path / "task" / "gcp_resources"),
        env={**os.environ, "STARTED": str(started), "TMPDIR": str(_temporary(tmp_path))},
    )
    eventually(lambda: len(list(started.iterdir())) == 2)
    return runner


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_replica_and_no_temporary_file_outlives_the_runner(
    tmp_path: Path, no_orphans: str, monkeypatch: pytest.MonkeyPatch, signum: int, code: int
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(_temporary(tmp_path)))
    runner = _start_runner(tmp_path)
    # The runner, two guardians, two shells, two programs, and two processes that each has started.
    assert len(marked(no_orphans)) == 11
    runner.send_signal(signum)
    assert runner.wait(10) == code  # and the fixture looks for what is left
    eventually(lambda: len(marked(no_orphans)) == 0)
    temporary = _temporary(tmp_path)
    if signum == signal.SIGKILL:  # the next one removes what this one could not
        assert len(list(temporary.glob("shardline-job-*/shardline-*"))) == 2
        with processes.scratch_directory() as other, processes.scratch_directory():
            assert other.exists()
    assert list(temporary.iterdir()) == []


def test_a_killed_command_leaves_temporary_files_that_the_next_one_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import os, tempfile
from shardline.pipelines.local.process import processes
with processes.scratch_as_tempdir():
    tempfile.mkdtemp()
    os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp_path)})
    (left,) = tmp_path.iterdir()
    assert len(list(left.iterdir())) == 2  # the lock, and what it made
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with processes.scratch_as_tempdir():
        assert [str(path) for path in tmp_path.iterdir()] == [tempfile.gettempdir()]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("which", ["guardian.py", "sh"])
def test_a_killed_link_of_the_chain_is_a_failed_replica(tmp_path: Path, no_orphans: str, which: str) -> None:
    runner = _start_runner(tmp_path)

    def is_victim(item: psutil.Process) -> bool:
        return any(Path(part).name == which for part in item.cmdline()[:4])

    children = psutil.Process(runner.pid).children(recursive=True)
    victim = next(item for item in children if is_victim(item))
    (tmp_path / "started" / "chief-0").unlink()
    (tmp_path / "started" / "worker-0").unlink()
    victim.kill()
    (name,) = eventually(lambda: list((tmp_path / "started").iterdir()))  # it has started again
    runner.terminate()
    assert runner.wait(10) == 143
    job = json.loads((tmp_path / "task" / "replicas" / "task" / "job.json").read_text())
    assert job["state"] == "stopped"
    assert {item["name"]: item["restarts"] for item in job["replicas"]}[name.name] == 1


def test_a_payload_that_cannot_run_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        _runner('{"display_name": "a "b""}', tmp_path / "gcp_resources"), capture_output=True, text=True
    )
    assert done.returncode == EXIT_BAD_INPUT
    assert len(done.stderr.splitlines()) == 1
    assert "the payload of CustomJob is not JSON" in done.stderr
    assert list(tmp_path.iterdir()) == []
