"""Interruptions of every kind: the next run goes on, and ends with the bytes of an undisturbed one."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardline.components.preprocess.run import finish, plan_dataset, write_shards
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.trainer.base import progress
from shardline.trainer.base.errors import RunError, SourceError
from tests.helpers.preprocessing import REPOSITORY, contents, run, write_images


def _lines(events: list[progress.Event]) -> list[str]:
    return [event.text for event in events if event.kind == "line"]


def test_a_run_continues_where_the_last_one_stopped(tmp_path: Path, events: list[progress.Event]) -> None:
    images = write_images(tmp_path / "images", each=60)
    settings = PreprocessSettings(source=f"images:{images}")
    shards = plan_dataset(settings, tmp_path / "out").shards
    write_shards(tmp_path / "out", 0, 2)
    run(f"images:{images}", tmp_path / "out")
    assert f"{len(shards[::2])} of {len(shards)} shards already done" in _lines(events)
    run(f"images:{images}", tmp_path / "fresh")
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_other_settings_start_from_the_beginning(tmp_path: Path, events: list[progress.Event]) -> None:
    plan_dataset(PreprocessSettings(source="digits"), tmp_path / "out")
    write_shards(tmp_path / "out", 0, 1)
    run("digits", tmp_path / "out", seed=1, shards=5)
    assert not any("already done" in line for line in _lines(events))
    run("digits", tmp_path / "fresh", seed=1, shards=5)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


@pytest.mark.parametrize("change", ["content", "addition", "removal"])
def test_a_source_that_changed_between_two_runs(tmp_path: Path, change: str) -> None:
    images = write_images(tmp_path / "images", each=60)
    plan_dataset(PreprocessSettings(source=f"images:{images}"), tmp_path / "out")
    write_shards(tmp_path / "out", 0, 1)
    time.sleep(0.02)  # the kernel's clock for files is coarse
    first, second = images / "cat" / "001.png", images / "dog" / "001.png"
    if change == "content":  # of the same size
        status = first.stat()
        first.write_bytes(second.read_bytes()[: status.st_size].ljust(status.st_size, b"\0"))
        first.write_bytes(second.read_bytes())
        os.utime(first, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif change == "addition":
        (images / "cat" / "new.png").write_bytes(second.read_bytes())
    else:
        first.unlink()
    run(f"images:{images}", tmp_path / "out")
    run(f"images:{images}", tmp_path / "fresh")
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()), r"'cat/001\.png' changed while it was read; run"),
        (
            lambda path: path.write_bytes(path.read_bytes() + b"more"),
            r"'cat/001\.png' changed while it was read",
        ),
        (Path.unlink, r"'cat/001\.png': there is no such file"),
    ],
)
def test_a_source_that_changes_while_it_is_read(tmp_path: Path, change: Any, message: str) -> None:
    images = write_images(tmp_path / "images")
    plan_dataset(PreprocessSettings(source=f"images:{images}"), tmp_path / "out")
    time.sleep(0.02)
    change(images / "cat" / "001.png")
    with pytest.raises(SourceError, match=message):
        write_shards(tmp_path / "out", 0, 1)


SPANS = """
from shardline.components.preprocess.sources.example import Example, Span

class Source:
    class_names = ("no", "yes")

    def __iter__(self):
        yield from (Example(str(i), i % 2, Span("images", i * {size}, {size})) for i in range(60))
"""


def test_a_file_of_many_images_that_changes_while_it_is_read(source_module: Path) -> None:
    images = write_images(source_module.with_name("png"), each=1)
    png = (images / "cat" / "000.png").read_bytes()
    source_module.write_text(SPANS.replace("{size}", str(len(png))))
    whole = source_module.with_name("images")
    whole.write_bytes(png * 60)
    out = source_module.with_name("out")
    plan_dataset(PreprocessSettings(source="mine:Source"), out)
    whole.write_bytes(png * 59)
    with pytest.raises(SourceError, match="'images' changed while it was read"):
        write_shards(out, 0, 1)
    whole.write_bytes(png * 60)
    assert run("mine:Source", out).records_in == 60


def test_finish_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no plan in"):
        write_shards(tmp_path / "out", 0, 1)
    plan_dataset(PreprocessSettings(source="digits"), tmp_path / "out")
    write_shards(tmp_path / "out", 0, 2)
    with pytest.raises(RunError, match=r"5 of 10 shards of .*out are not written, train-00001-of-00008"):
        finish(tmp_path / "out")
    write_shards(tmp_path / "out", 1, 2)
    (tmp_path / "out" / ".shardline" / "train-00002-of-00008.tfrecord").write_bytes(b"cut")
    with pytest.raises(RunError, match="1 of 10 shards"):
        finish(tmp_path / "out")


@contextmanager
def _largest_file(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_disk_that_takes_no_more(tmp_path: Path, processes: int, events: list[progress.Event]) -> None:
    images = write_images(tmp_path / "images", each=60, size=64)
    message = r"cannot write .*: File too large; make room and run again"
    with _largest_file(100_000), pytest.raises(RunError, match=message):
        run(f"images:{images}", tmp_path / "out", processes=processes)
    assert list((tmp_path / "out").iterdir()) == [tmp_path / "out" / ".shardline"]
    assert not list((tmp_path / "out" / ".shardline").glob("*.tmp"))
    run(f"images:{images}", tmp_path / "out", processes=processes)
    run(f"images:{images}", tmp_path / "fresh")
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


@pytest.mark.parametrize(("processes", "stratify"), [(1, False), (2, False), (2, True)])
def test_kill_at_any_time(tmp_path: Path, processes: int, stratify: bool) -> None:
    images = write_images(tmp_path / "images", each=400)
    run(f"images:{images}", tmp_path / "fresh", stratify=stratify)
    program = (
        "import sys; from pathlib import Path\n"
        "from shardline.components.preprocess.run import preprocess\n"
        "from shardline.components.preprocess.settings import PreprocessSettings\n"
        "settings = PreprocessSettings("
        f"source='images:{images}', processes={processes}, stratify={stratify})\n"
        f"preprocess(settings, Path({str(tmp_path / 'out')!r}))\n"
    )
    command, moments = [sys.executable, "-c", program], random.Random(processes)
    for _ in range(6):
        process = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True, stdout=subprocess.DEVNULL)
        try:
            assert process.wait(moments.uniform(0.05, 0.5)) == 0
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _wait_until_gone(process.pid)
        if (tmp_path / "out" / "manifest.json").exists():
            break
    else:
        run(f"images:{images}", tmp_path / "out", processes=processes, stratify=stratify)
    shutil.rmtree(tmp_path / "out" / ".shardline", ignore_errors=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def _wait_until_gone(group: int) -> None:
    """Waits for the processes that the killed one had started: until they are gone, they hold its lock."""
    members = [process for process in psutil.process_iter() if _group_of(process) == group]
    psutil.wait_procs(members, timeout=10)


def _group_of(process: psutil.Process) -> int:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return 0
