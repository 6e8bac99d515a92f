"""Crashes: the error message and the crash file of an unexpected exception that ends a process."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import secrets
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from shardline.trainer.base import files
from shardline.trainer.base.errors import CrashError, RunError, SettingsError, ShardlineError
from shardline.trainer.base.plugins import describe

#: Environment variable with the directory of crash files; by default the directory of temporary files.
DIRECTORY_VARIABLE = "SHARDLINE_CRASH_DIR"

_IO_LOST = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.ECONNRESET, errno.EHOSTUNREACH)
# Failures of the machine, each with its remedy: a later attempt may succeed.
_MACHINE_FAILURES = {
    **dict.fromkeys(files.DISK_FULL, "make room there and try again"),
    **dict.fromkeys(_IO_LOST, "a disk, a mounted bucket or the network has failed; try again"),
    **dict.fromkeys((errno.EFBIG, errno.EMFILE, errno.ENFILE), "raise the limit (ulimit)"),
    errno.ENOMEM: "use a machine with more memory, or a smaller model, batch or dataset",
}
_MAX_CHARS = 400


def as_error(failure: Exception) -> ShardlineError:
    """Returns the one-line error for an unexpected exception.

    A missing package, a full disk and the like, or a path that cannot be used: the reason and the path.
    Anything else is a `CrashError`, with the exception and the path of a crash file.
    """
    if isinstance(failure, ShardlineError):
        return failure
    if isinstance(failure, ModuleNotFoundError) and failure.name:
        return SettingsError(
            f"{failure.name} is needed and not installed; pip install 'shardline[local]' has all that "
            "Shardline's own commands need"
        )
    if isinstance(failure, MemoryError):
        return RunError(f"out of memory; {_MACHINE_FAILURES[errno.ENOMEM]}")
    if isinstance(failure, OSError) and (known := from_os_error(failure)):
        return known
    what = describe(failure)
    for number in files.DISK_FULL:
        reason = os.strerror(number)
        if reason in what:  # from a library that writes files itself, as TensorFlow does
            path = re.search(rf"([^\s:;]+); {reason}", what)
            what = (
                files.with_space(f"cannot write {path[1]}: {reason}", path[1]) if path else what[:_MAX_CHARS]
            )
            return RunError(f"{what}; {_MACHINE_FAILURES[number]}")
    return CrashError(f"{what[:_MAX_CHARS]}{'...' * (len(what) > _MAX_CHARS)}; {_write_crash_file(failure)}")


def from_os_error(failure: OSError) -> ShardlineError | None:
    """Returns the error for an OSError of the machine or of a path; None for any other."""
    where = f": {os.fspath(failure.filename)!r}" if failure.filename is not None else ""
    if failure.strerror and (advice := _MACHINE_FAILURES.get(failure.errno or 0)):
        reason = files.with_space(failure.strerror, failure.filename) if where else failure.strerror
        return RunError(f"{reason}{where}; {advice}")
    if failure.strerror and where and failure.errno in files.PATH_ERRORS:
        return SettingsError(f"{failure.strerror}{where}")
    return None


def is_machine_failure(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, is a failure of the machine that may not occur again."""
    seen = []
    while error is not None and error not in seen:
        unread = isinstance(error, OSError) and error.errno not in files.PATH_ERRORS
        if unread or isinstance(error, MemoryError):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def output_error(failure: OSError, text: str) -> ShardlineError:
    """Returns a RunError with the text where the machine failed, a SettingsError where the path is wrong."""
    text = files.with_space(text, failure.filename or ".")
    return (RunError if failure.errno in _MACHINE_FAILURES else SettingsError)(text)


@contextlib.contextmanager
def output_errors(action: str, advice: str = "") -> Iterator[None]:
    """Raises an OSError as `output_error` does, with the text "cannot ACTION: REASON; ADVICE"."""
    try:
        yield
    except OSError as error:
        text = f"cannot {action}: {error.strerror}{advice and f'; {advice}'}"
        raise output_error(error, text) from None


def _write_crash_file(failure: Exception) -> str:
    from importlib import metadata  # takes 40 ms, so not in every process

    trace = "".join(traceback.format_exception(failure))
    if "CLOUD_ML_PROJECT_ID" in os.environ and DIRECTORY_VARIABLE not in os.environ:
        print(trace, file=sys.stderr)  # on the platform only the log outlives the machine
    packages = ("shardline", "tensorflow", "keras", "kfp", "google-cloud-aiplatform")
    installed = [f"{each.name} {each.version}" for each in metadata.distributions() if each.name in packages]
    versions = f"{', '.join(installed)}; Python {platform.python_version()}, {platform.platform()}"
    name = f"shardline-crash-{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(4)}.txt"
    try:
        file = Path(os.environ.get(DIRECTORY_VARIABLE) or tempfile.gettempdir(), name)
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as writer:
            writer.write(f"{versions}\n\n{trace}")
    except OSError as error:
        return f"a crash file could not be written ({error.strerror})"
    return f"the traceback is in {file}"
