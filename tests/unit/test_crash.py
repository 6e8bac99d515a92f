"""Crashes: any exception at the end of a process is one line, an exit code, and at most one file."""

import errno
import os
import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardline.pipelines.cli import main as command_line
from shardline.trainer.base import crash
from shardline.trainer.base.errors import EXIT_BAD_INPUT, EXIT_CRASH, EXIT_FAILED, DatasetError, SettingsError
from shardline.trainer.base.progress import TIMEOUT_VARIABLE, exit_on_error


@pytest.fixture
def crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of crash files."""
    monkeypatch.setenv(crash.DIRECTORY_VARIABLE, str(tmp_path / "crashes"))
    return tmp_path / "crashes"


@pytest.mark.parametrize(
    ("failure", "code", "line"),
    [
        (DatasetError("no\nmanifest"), EXIT_BAD_INPUT, "no manifest"),
        (OSError(errno.ENOSPC, "No space left on device", "/full"), EXIT_FAILED, "No space left on device ("),
        (OSError(errno.EACCES, "Permission denied", "/root"), EXIT_BAD_INPUT, "Permission denied: '/root'\n"),
        (OSError(errno.ESTALE, "Stale file handle", "/gcs/b"), EXIT_FAILED, "Stale file handle: '/gcs/b'; a"),
        (ModuleNotFoundError("x", name="psutil"), EXIT_BAD_INPUT, "psutil is needed and not installed; pip"),
        (MemoryError(), EXIT_FAILED, "out of memory; "),
        (RuntimeError("part-0; No space left on device"), EXIT_FAILED, "cannot write part-0: No space left"),
        (KeyError("nobody\nforesaw"), EXIT_CRASH, r"KeyError: 'nobody\\nforesaw' (test_crash.py, line "),
        (ValueError("x" * 10_000), EXIT_CRASH, f"ValueError: {'x' * 300}"),
    ],
)
def test_an_exception_is_one_line(
    crashes: Path, capsys: pytest.CaptureFixture[str], failure: Exception, code: int, line: str
) -> None:
    with pytest.raises(SystemExit) as ended, exit_on_error("train"):
        raise failure
    assert ended.value.code == code
    printed = capsys.readouterr().err
    assert printed.startswith(f"train: error: {line}".replace(r"\\", "\\"))
    assert printed.count("\n") == 1
    assert len(printed) < 700
    assert crashes.exists() == (code == EXIT_CRASH)


def test_the_crash_file_has_the_traceback_and_is_readable_by_its_owner_only(
    crashes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "the value of a variable"

    def broken(_context: object) -> None:
        given = secret  # noqa: F841  # of variables the file holds nothing
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr(command_line.main.commands["champion"], "invoke", broken)
    done = CliRunner().invoke(command_line.main, ["champion", "show"])
    assert done.exit_code == EXIT_CRASH
    named = re.search(r"the traceback is in (\S+)$", done.output.strip())
    assert named
    assert done.output.count("\n") == 1
    file = Path(named[1])
    assert file.parent == crashes
    assert file.stat().st_mode & 0o777 == 0o600
    content = file.read_text()
    assert "Traceback" in content
    assert "in broken" in content
    assert "Python 3" in content
    assert secret not in content


def test_on_the_platform_the_log_has_what_the_file_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(crash.DIRECTORY_VARIABLE, raising=False)
    monkeypatch.setenv("CLOUD_ML_PROJECT_ID", "123")
    monkeypatch.setattr(crash.tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.raises(SystemExit), exit_on_error("train"):
        raise RuntimeError("nobody foresaw this")
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith("train: error: RuntimeError: nobody foresaw this")
    assert len(os.listdir(tmp_path)) == 1


def test_a_crash_file_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(crash.DIRECTORY_VARIABLE, "/dev/null/crashes")
    with pytest.raises(SystemExit) as ended, exit_on_error("train"):
        raise RuntimeError("nobody foresaw this")
    assert ended.value.code == EXIT_CRASH
    assert "a crash file could not be written (Not a directory)" in capsys.readouterr().err


def test_control_characters_are_escaped() -> None:
    """A name in it may come from an untrusted file."""
    assert SettingsError("\x1b[31mred\x07\nÄ '").line == r"\x1b[31mred\x07 Ä '"


def test_a_task_s_timeout_may_be_longer_than_a_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest reports what a thread raises."""
    monkeypatch.setenv(TIMEOUT_VARIABLE, "1e14")
    with exit_on_error("train"):
        time.sleep(0.1)
