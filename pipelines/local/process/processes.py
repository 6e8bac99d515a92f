"""Processes on this machine: started below a guardian or forked, read line by line, and stopped.

A process can be forked from the fork server of a run, or of a job (`fork_server`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from shardline.pipelines.local.kfp_internals import EXECUTOR, component_source
from shardline.pipelines.local.process import guardian
from shardline.trainer.base import files, progress
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


def child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a child that reports to this process: this process's and these variables."""
    inherited = {name: value for name, value in os.environ.items() if name not in PLATFORM_VARIABLES}
    own = {**inherited, "PYTHONUNBUFFERED": "1", **variables}
    return {**with_safe_path(own), progress.EVENTS_VARIABLE: progress.secret()}


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
def adopted_orphans(grace: float = GRACE_S) -> Iterator[None]:
    """Makes this process the parent of orphaned descendants while the context lasts, then stops them all.

    They can be found however their parent ended.
    """
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        stop_descendants(grace)
        _prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def stop_descendants(grace: float = GRACE_S) -> None:
    """Stops the descendants of this process: SIGTERM, `grace` seconds, then SIGKILL until none is left."""
    signum = signal.SIGTERM
    while remaining := _descendants():
        for process in remaining:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)
        psutil.wait_procs(remaining, timeout=grace)
        signum, grace = signal.SIGKILL, 1


def _descendants() -> list[psutil.Process]:
    alive = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


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


class GuardedProcess:
    """A command in a session of its own, below a guardian that ends all of its processes.

    `pipe` is the descriptor of its standard output and standard error; `control` becomes readable when it has
    ended (see `guardian`). After `finish`, `peak_memory` is the largest resident set of any of its processes,
    in bytes.
    """

    def __init__(self, launch: Launch, handle: Callable[[str], None], *, grace: int = 0) -> None:
        """Starts the command, forked where there is a fork server that can.

        `handle` gets each line that it prints. Once this object is ended, or this process, `grace` seconds
        lie between SIGTERM and SIGKILL.
        """
        self.peak_memory = 0
        self._handle, self._grace, self._rest = handle, grace, b""
        self.pipe, printed = os.pipe()
        self.control, guardians = socket.socketpair()
        os.set_blocking(self.pipe, False)
        try:
            self._pid = _spawn(launch, grace, printed, guardians.fileno())
        except BaseException:  # a signal, too
            self.control.close()
            os.close(self.pipe)
            raise
        finally:
            os.close(printed)
            guardians.close()

    def read_output(self) -> bool:
        """Reads available output; returns whether more may come."""
        try:
            data = os.read(self.pipe, 1 << 16)
        except BlockingIOError:
            return True
        self._feed(data)
        return bool(data)

    def stop(self) -> None:
        """Asks every process of its session to end (SIGTERM)."""
        self._signal_group(signal.SIGTERM)
        self._signal_group(signal.SIGCONT)

    def kill(self) -> None:
        """Kills all of its processes, in any session; with a grace, asks the first one to end before."""
        with contextlib.suppress(OSError):  # it has ended
            self.control.shutdown(socket.SHUT_WR)

    def finish(self) -> int:
        """Kills the remaining processes, reads the last output, and returns the exit status."""
        self.kill()
        report = b""
        if select.select([self.control], [], [], self._grace + 2.0)[0]:  # time to kill its process
            with contextlib.suppress(ConnectionError):
                report = self.control.recv(64)
        if not report:  # the guardian itself was killed
            self._signal_group(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # a child of the fork server
            os.waitpid(self._pid, 0)
        code, memory = map(int, report.split() or (-signal.SIGKILL, 0))
        self.peak_memory = memory * 1024
        # At most the capacity of the pipe: more can only come from an escaped process.
        remaining = fcntl.fcntl(self.pipe, fcntl.F_GETPIPE_SZ)
        with contextlib.suppress(BlockingIOError):
            while remaining > 0 and (data := os.read(self.pipe, remaining)):
                self._feed(data)
                remaining -= len(data)
        if self._rest:  # the output ended without a line end
            self._feed(b"\n")
        self.control.close()
        os.close(self.pipe)
        return code

    def run_to_end(self, tick: Callable[[], None] = lambda: None) -> int:
        """Reads its output until it has ended, and returns the exit status; calls `tick` once a second."""
        watched: list[Any] = [self.control, self.pipe]
        ready: list[Any] = []
        try:
            while self.control not in ready:
                ready = select.select(watched, [], [], 1.0)[0]
                tick()
                if self.pipe in ready and not self.read_output():
                    watched.remove(self.pipe)
        finally:
            with ignore_stop_signals():
                code = self.finish()
        return code

    def _feed(self, data: bytes) -> None:
        """Passes the lines on that the data completes, without line ends; one above 1 MiB in pieces."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > 1 << 20:
            whole.append(self._rest)
            self._rest = b""
        for line in whole:
            self._handle(line.rstrip(b"\r").decode("utf-8", "replace"))

    def _signal_group(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signum)


def _spawn(launch: Launch, grace: int, output: int, control: int) -> int:
    """Starts a guardian in its own session and returns its process id; the descriptors become its own."""
    server = os.environ.get(_SERVER_VARIABLE)
    if server and (program := forkable_program(launch.command)):
        with contextlib.suppress(OSError, ValueError):
            descriptors = (output, output, control, *launch.namespaces)
            if pid := _request_fork(server, program, launch.env, *descriptors, grace=grace):
                return pid
    passed = [(own, guardian.CONTROL_FD + index) for index, own in enumerate((control, *launch.namespaces))]
    numbers = (str(grace), str(len(launch.namespaces)))
    return os.posix_spawnp(
        sys.executable,
        [sys.executable, "-I", "-S", guardian.__file__, *numbers, *launch.command],
        launch.env,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output, 1),
            (os.POSIX_SPAWN_DUP2, output, 2),
            *((os.POSIX_SPAWN_DUP2, own, theirs) for own, theirs in passed),
        ],
        setsid=True,
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # ignored by Python
    )


#: Environment variable of a run's tasks: path of the server's socket.
_SERVER_VARIABLE = "SHARDLINE_FORK_SERVER"
#: Module of the stubs for the platform's launchers, and those of them that start replicas.
_STUBS_MODULE = "shardline.pipelines.local.launcher_stubs"
_SUPERVISORS = ("CustomJob", "HyperparameterTuningJob")
#: Components whose source has one of these words load TensorFlow anyway.
_TENSORFLOW_WORDS = (
    "tensorflow",
    "keras",
    *(f"shardline.components.{name}" for name in ("rehearse", "train", "validate")),
)


@dataclass(frozen=True)
class Program:
    """A Python module to run; the path of `source`, that of a component, becomes its first argument."""

    module: str
    arguments: Sequence[str]
    source: str | None = None


@dataclass(frozen=True)
class Launch:
    """Command of a process, its complete environment, and the descriptors of its namespaces."""

    command: Sequence[str]
    env: Mapping[str, str]
    namespaces: Sequence[int] = ()


def forkable_program(command: Sequence[str]) -> Program | None:
    """Returns the program of a command that a process forked with TensorFlow loaded can run; else None."""
    for trainer in ("shardline.trainer.task", "shardline.trainer.program"):
        if list(command[:3]) == [sys.executable, "-m", trainer]:
            return Program(trainer, command[3:])
    if list(command[:4]) == ["python3", "-u", "-m", _STUBS_MODULE] and command[4] in _SUPERVISORS:
        return Program(_STUBS_MODULE, command[4:])
    source = component_source(command)
    if source and any(word in source for word in _TENSORFLOW_WORDS):
        return Program(EXECUTOR, command[4:], source)
    return None


@contextlib.contextmanager
def start_fork_server(modules: Sequence[str], env: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Starts a fork server with TensorFlow and these modules, which serves while the context lasts.

    Without modules, and where forking is not possible on this machine, all processes start by themselves.
    """
    if not modules or Path("/dev/nvidiactl").exists():  # forking with NVIDIA's driver is not tested
        yield
        return
    with scratch_directory() as directory, contextlib.ExitStack() as held:
        path = str(directory / "s")
        with contextlib.suppress(OSError):
            server = held.enter_context(_start_server(path, env, modules))
            held.callback(server.terminate)
            os.environ[_SERVER_VARIABLE] = path
            held.callback(os.environ.pop, _SERVER_VARIABLE, None)
        yield


def _start_server(path: str, env: Mapping[str, str], modules: Sequence[str]) -> subprocess.Popen[bytes]:
    with socket.socket(socket.AF_UNIX) as listener, _short_address(path) as address:
        listener.bind(address)
        listener.listen()
        own = [str(listener.fileno()), str(os.getpid())]
        return subprocess.Popen(
            [sys.executable, "-m", "shardline.pipelines.local.process.fork_server", *own, *modules],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # a process that loads TensorFlow by itself reports errors
            env=env,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )


@contextlib.contextmanager
def _short_address(path: str) -> Iterator[str]:
    """Yields a short address for the path of a Unix socket: an address has at most 107 bytes."""
    directory, name = os.path.split(path)
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def fork_server_of_job(launches: Sequence[Launch]) -> contextlib.AbstractContextManager[None]:
    """Starts a fork server for a job with more than one forkable replica, unless its run has one."""
    programs = [program for launch in launches if (program := forkable_program(launch.command))]
    if _SERVER_VARIABLE in os.environ or len(programs) < 2:  # a single one gains nothing
        return contextlib.nullcontext()
    modules = ["shardline.trainer.train", *(["kfp.dsl.executor"] if programs[0].source else [])]
    shared = {name: value for name, value in launches[0].env.items() if name not in PLATFORM_VARIABLES}
    return start_fork_server(modules, shared)


def _request_fork(
    server: str, program: Program, env: Mapping[str, str], *descriptors: int, grace: int = 0
) -> int:
    """Requests a process from the server; returns its guardian's process id, 0 where the server refuses.

    The descriptors are standard output, standard error, the control socket, and namespaces. Raises OSError
    when the server has ended, or takes too long, and ValueError when it ends before its response.
    """
    with socket.socket(socket.AF_UNIX) as connection, tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        connection.settimeout(120.0)  # it loads TensorFlow first
        with _short_address(server) as address:
            connection.connect(address)
        json.dump({"program": vars(program), "env": dict(env), "grace": grace}, file)
        file.seek(0)
        socket.send_fds(connection, [b"."], [file.fileno(), *descriptors])
        return int(connection.recv(32))
