"""Process helpers: stop without orphans, signals, environments, temporary directories."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType

import psutil

from shardline.trainer.base import files
from shardline.trainer.base.errors import EXIT_FAILED, RunError
from shardline.trainer.cluster import SECRET_VARIABLE

#: Variables that belong to one replica and must not be inherited from the shell.
PLATFORM_VARIABLES = (
    "TF_CONFIG",
    "CLUSTER_SPEC",
    "AIP_MODEL_DIR",
    "AIP_CHECKPOINT_DIR",
    "AIP_TENSORBOARD_LOG_DIR",
    "CLOUD_ML_PROJECT_ID",
    "CLOUD_ML_JOB_ID",
    "CLOUD_ML_TRIAL_ID",
    "CLOUD_ML_HP_METRIC_FILE",
    SECRET_VARIABLE,
)

#: First directory of the path, with a sitecustomize that moves the working directory to its end.
_SITE = str(Path(__file__).with_name("path"))


def with_safe_path(env: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment in which modules of the working directory come after all others."""
    others = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", _SITE)]
    return {**env, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join([_SITE, *others])}


#: Seconds between SIGTERM and SIGKILL.
GRACE_S = 5.0

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ProcessFailedError(RunError):
    """A process that was started here failed.

    The exit code is that of the whole program: EXIT_BAD_INPUT when the process reported a user error, else
    EXIT_FAILED.
    """

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Stopped(SystemExit):
    """A signal asked this process to stop; unless caught it ends the process with 128 + the signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signal_name = signal.Signals(signum).name


def _stop(signum: int, _frame: FrameType | None) -> None:
    raise Stopped(signum)


@contextlib.contextmanager
def _on_stop_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {signum: signal.signal(signum, handler) for signum in _STOP_SIGNALS}
    try:
        yield
    finally:
        for signum, before in previous.items():
            signal.signal(signum, before)


#: Makes SIGINT, SIGTERM and SIGHUP raise `Stopped` while the context lasts (main thread only).
stop_on_signals = partial(_on_stop_signals, _stop)
#: Ignores further stop signals while a bounded clean-up runs (main thread only).
ignore_stop_signals = partial(_on_stop_signals, signal.SIG_IGN)


@contextlib.contextmanager
def adopted_orphans() -> Iterator[None]:
    """Makes this process the parent of orphaned descendants while the context lasts.

    They can then be found and stopped, however their parent ended.
    """
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def stop_descendants(grace: float = GRACE_S, *, with_variable: tuple[str, str] | None = None) -> None:
    """Stops the descendants of this process: SIGTERM, `grace` seconds, then SIGKILL until none is left.

    `with_variable`, a name and a value, limits this to processes with that environment variable.
    """
    signum = signal.SIGTERM
    while remaining := _descendants(with_variable):
        for process in remaining:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)
        psutil.wait_procs(remaining, timeout=grace)
        signum, grace = signal.SIGKILL, 1


def describe_exit(code: int) -> str:
    """Describes an exit status: "was killed by SIGKILL", "ended with exit code 1"."""
    if name := signal_name(code):
        return f"was killed by {name}"
    if code == 127:
        return "could not be started (exit code 127)"
    return f"ended with exit code {code}"


def signal_name(code: int) -> str | None:
    """Returns the name of the signal of an exit status, -n, or 128 + n as shells report it; else None."""
    number = -code if code < 0 else code - 128
    return signal.Signals(number).name if number in {int(item) for item in signal.Signals} else None


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _descendants(with_variable: tuple[str, str] | None) -> list[psutil.Process]:
    alive = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            marked = with_variable is None or with_variable in process.environ().items()
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


_PREFIX, _NEW, _LOCK = "shardline-job-", "shardline-new-", "lock"


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Creates a directory for temporary files that lasts as long as the context.

    A killed process removes nothing: the next call removes directories whose locks the kernel has released.
    """
    parent = Path(tempfile.gettempdir())
    for stale in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone
            lock = os.open(stale / _LOCK, os.O_RDWR)
            try:
                if files.lock(lock):
                    shutil.rmtree(stale, ignore_errors=True)
            finally:
                os.close(lock)
    directory = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
    lock = os.open(directory / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        files.lock(lock)
        path = directory.rename(parent / directory.name.replace(_NEW, _PREFIX))  # may be removed from now on
        try:
            yield path
        finally:
            with ignore_stop_signals():
                shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


@contextlib.contextmanager
def scratch_as_tempdir() -> Iterator[None]:
    """Uses a new scratch directory for this process's temporary files while the context lasts."""
    before = tempfile.tempdir
    with scratch_directory() as path:
        tempfile.tempdir = str(path)
        try:
            yield
        finally:
            tempfile.tempdir = before
