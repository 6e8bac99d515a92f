"""Lock of a directory in a mounted bucket: who holds it, and who takes over from whom."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardline.components.preprocess import work_directory as lock
from shardline.trainer.base.errors import RunError

HOLDS = """
import sys
from pathlib import Path
from shardline.components.preprocess import work_directory as lock
with lock.bucket_lock(Path(sys.argv[1]), take_over=False):
    print(flush=True)
    sys.stdin.read()
"""
ELSEWHERE = "elsewhere/boot/pid:[1] 17 99 abc"


def test_it_is_held_by_one_and_released(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with lock.bucket_lock(path, take_over=False) as name:
        assert lock.read_small(path) == name
        with pytest.raises(RunError, match="another run is writing"), lock.bucket_lock(path, take_over=False):
            pass
    assert not path.exists()


def test_one_of_this_machine_is_taken_over_at_once_when_its_holder_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLDS, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        assert other.stdout.readline() == b"\n"
        with (
            pytest.raises(RunError, match=f"process {other.pid} on "),
            lock.bucket_lock(path, take_over=False),
        ):
            pass
        other.kill()
        other.wait()
    with lock.bucket_lock(path, take_over=False) as name:
        assert lock.read_small(path) == name


def test_one_of_another_machine_stays_unless_it_is_known_to_have_ended(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(ELSEWHERE)
    with (
        pytest.raises(RunError, match=rf"process 17 on elsewhere.* if it was killed, remove {path}"),
        lock.bucket_lock(path, take_over=False),
    ):
        pass
    assert path.read_text() == ELSEWHERE
    with lock.bucket_lock(path, take_over=True) as name:
        assert lock.read_small(path) == name


def test_a_run_that_has_lost_it_leaves_that_of_the_other(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with lock.bucket_lock(path, take_over=False):
        path.write_text(ELSEWHERE)
    assert path.read_text() == ELSEWHERE


@pytest.mark.parametrize(("text", "is_taken"), [("", True), ("\0", False), ("x" * 10_000, False)])
def test_an_empty_lock_is_of_a_run_that_was_killed_and_a_damaged_one_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, is_taken: bool
) -> None:
    monkeypatch.setattr(lock, "_EMPTY_LOCK_SECONDS", 0)
    (tmp_path / "lock").write_text(text)
    try:
        with lock.bucket_lock(tmp_path / "lock", take_over=False):
            assert is_taken
    except RunError:
        assert not is_taken
