"""Process pool of preprocessing: lost workers, and what of the working directory a worker sees."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from shardline.components.preprocess.process_pool import Processes
from shardline.trainer.base.errors import CrashError, RunError
from tests.helpers.pool_jobs import grieve
from tests.helpers.preprocessing import contents, run

ITEMS = ["one", "two", "three", "four"]


def do(how: str) -> dict[str, int]:
    with Processes(2, grieve) as processes:
        return processes.run_job(grieve, {"how": how, "parent": os.getpid()}, ITEMS, lambda *_: None)


@contextmanager
def killing_a_worker() -> Iterator[None]:
    """Kills the first worker that this process starts."""
    before = {process.pid for process in psutil.Process().children()}
    is_over = threading.Event()

    def kill() -> None:
        while not is_over.is_set():
            for process in psutil.Process().children():
                if process.pid not in before and "preprocess.process_pool" in " ".join(process.cmdline()):
                    process.kill()
                    return

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("killed", r"was killed \(SIGKILL\)"),
        ("exit", "ended with status 0"),
        ("exit, its output held open", "ended with status 0"),
    ],
)
def test_a_worker_that_ends_without_an_answer_is_one_line(how: str, message: str) -> None:
    began = time.monotonic()
    with pytest.raises(RunError, match=f"a worker process {message}; was there too little memory"):
        do(how)
    assert time.monotonic() - began < 15
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            assert "preprocess.process_pool" not in " ".join(process.cmdline())


def test_an_unforeseen_error_of_a_worker_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CrashError, match=r"ValueError: of an unforeseen kind .*the traceback is in"):
        do("unforeseen")
    assert "Traceback" not in "".join(capfd.readouterr())


def test_what_a_worker_prints_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    assert sorted(do("printing")) == sorted(ITEMS)
    assert "a line of a library" in capfd.readouterr().err


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "digits"
    run("digits", out)
    return out


@pytest.mark.timeout(60)
def test_preprocessing_ends_when_a_worker_is_killed_and_continues_when_run_again(
    tmp_path: Path, dataset: Path
) -> None:
    with killing_a_worker(), pytest.raises(RunError, match=r"a worker process was killed \(SIGKILL\)"):
        run("digits", tmp_path / "out", processes=2)
    run("digits", tmp_path / "out", processes=2)
    assert contents(tmp_path / "out") == contents(dataset)


def test_no_file_of_the_working_directory_hides_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("zlib", "json", "selectors", "xxhash"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('hidden')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    found = do("well")
    assert sorted(found) == sorted(ITEMS)
    assert len(set(found.values())) == 2


SLOW = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGTERM)
except SystemExit:
    raise ImportError("please study the documentation: this is caused by a bad install") from None
"""


def test_a_worker_that_is_ended_while_it_starts_says_nothing_of_a_bad_installation(tmp_path: Path) -> None:
    (tmp_path / "slow_to_load.py").write_text(SLOW)
    command = [sys.executable, "-m", "shardline.components.preprocess.process_pool", "0", "slow_to_load"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ended = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (-signal.SIGTERM, b"")
