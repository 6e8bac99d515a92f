"""status and cancel of a run on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shardline.components.runs import Run
from shardline.pipelines.cli.main import main
from shardline.trainer.base import files

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
from shardline.pipelines.local.run import new_run
with new_run(Path("runs"), b"", datetime.datetime.now(datetime.UTC), pipeline="toy") as run:
    print(run.name, flush=True)
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
    Run(**{"name": "today", "pipeline": "toy", "state": "running", **values}).write(directory)
    (directory / "run.log").write_text(LOG)
    return directory


@pytest.mark.parametrize(("host", "pid"), [("elsewhere", 1), (socket.gethostname(), 0)])
def test_a_run_whose_process_is_not_known_here_is_not_cancelled(
    host: str, pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "kill", None)
    descriptor = os.open(write_run(host=host, pid=pid, locked=True), os.O_RDONLY)
    assert files.lock(descriptor)
    done = shardline("cancel", "today")
    os.close(descriptor)

    assert done.exit_code == 2
    assert f"end its process on {host}" in done.stderr


def test_a_run_whose_time_is_damaged_is_shown() -> None:
    write_run(created="yesterday")

    assert "today: running" in shardline("status", "today").stdout
    assert shardline("status").stdout.splitlines()[-1].startswith("today  here   toy       running")


def test_the_status_of_a_run_here_has_its_tasks() -> None:
    write_run(state="failed", duration_s=3.0, created="2030-01-01T12:00:00Z", error="no more")
    shown = shardline("status", "today")
    content = json.loads(shardline("status", "today", "--json").stdout)

    assert shown.exit_code == 0, shown.output
    assert [(task["name"], task["state"]) for task in content["tasks"]] == [
        ("digest", "succeeded"), ("train", "failed")
    ]  # fmt: skip
    assert [task["seconds"] for task in content["tasks"]] == [0.2, None]
    assert "today: failed after 3 s" in shown.stdout
    assert (content["run"], content["state"], content["seconds"]) == ("today", "failed", 3.0)
    assert shardline("status", "today", "--wait").exit_code == 1
