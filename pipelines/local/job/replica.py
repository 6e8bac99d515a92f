"""Replica of a custom job: what it is started with, its guarded process, and what that prints."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from shardline.pipelines.local.job import custom_job as cluster
from shardline.pipelines.local.job.custom_job import CustomJob
from shardline.pipelines.local.process import processes, start
from shardline.pipelines.local.process.network import reports_no_network
from shardline.pipelines.local.process.processes import PLATFORM_VARIABLES
from shardline.pipelines.local.process.start import Launch
from shardline.trainer.base import crash, progress
from shardline.trainer.base.errors import EXIT_BAD_INPUT, PipelineError
from shardline.trainer.base.progress import Event
from shardline.trainer.cluster.cluster import SECRET_VARIABLE

#: Seconds that a guardian has to kill what it guards.
_KILL_S = 2.0


def launches(
    job: CustomJob, network: tuple[Sequence[str], Sequence[int]], temporary: Path, log_directory: Path
) -> dict[str, Launch]:
    """Returns how each replica is started, by name, the chief first.

    An environment is this process's, the pool's, and the platform's own on top. Temporary files go to the
    directory `temporary`, crash files beside the logs, unless they belong to a run.

    Raises:
        PipelineError: When there is no such command on this machine.
    """
    inherited = {key: value for key, value in os.environ.items() if key not in PLATFORM_VARIABLES}
    inherited["TMPDIR"] = str(temporary)
    inherited.setdefault(crash.DIRECTORY_VARIABLE, str(log_directory.absolute()))
    # "python3" in a replica's command is the Python of this environment.
    here = os.path.dirname(sys.executable)
    inherited["PATH"] = f"{here}{os.pathsep}{inherited.get('PATH', os.defpath)}"
    addresses, namespaces = network
    job_id, secret = f"{time.time_ns()}", secrets.token_hex()
    found = {}
    for member in cluster.replicas(job):
        pool = job.worker_pools[member.pool]
        env = {
            **processes.with_safe_path({**inherited, "PYTHONUNBUFFERED": "1", **cluster.variables(pool)}),
            **cluster.environment(job, member, addresses, job_id),
            SECRET_VARIABLE: secret,
            progress.EVENTS_VARIABLE: progress.secret(),
        }
        if shutil.which(pool.argv[0], path=env["PATH"]) is None:
            raise PipelineError(
                f"{member.name} cannot be started: there is no command {pool.argv[0]!r} on this machine; "
                "install it, or correct the command in container_spec"
            )
        found[member.name] = Launch(pool.argv, env, namespaces)
    return found


#: Longest line that is waited for; a longer one is passed on in pieces.
_MAX_LINE = 1 << 20


class LineBuffer:
    """Collects the bytes of one stream until a line is whole."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Takes bytes and returns the lines that they complete, without line ends."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE:
            whole.append(self._rest)
            self._rest = b""
        return [line.rstrip(b"\r").decode("utf-8", "replace") for line in whole]

    def flush(self) -> list[str]:
        """Returns the last line when the stream has ended without a line end."""
        return self.feed(b"\n") if self._rest else []


ShowLine = Callable[[str, str], None]


class ReplicaOutput:
    """Output of one replica.

    All of it goes to the log file, line by line; events (`trainer.base.progress`) as readable lines.
    Events are passed on, errors are kept until the job is over, and every other line is shown.

    Attributes:
        log: Path of the log file.
        error: The first error event that the replica reported.
        muted: Whether lines only go to the log file.
        misses_network: Whether it has said that it finds no network.
    """

    def __init__(self, name: str, log: Path, show: ShowLine, report: Callable[[Event], None]) -> None:
        """Opens the log file to append; `show` gets the name with each line, `report` the other events."""
        self.log = log
        self.error: Event | None = None
        self.muted = False
        self.misses_network = False
        self._name = name
        self._show = show
        self._report = report
        self._buffer = LineBuffer()
        self._file = log.open("a", encoding="utf-8")

    @property
    def is_mistake(self) -> bool:
        """Whether the replica has said that the mistake is the user's."""
        return self.error is not None and self.error.exit_code == EXIT_BAD_INPUT

    def feed(self, data: bytes) -> None:
        """Takes what the replica has printed since the last call."""
        self._take(self._buffer.feed(data))

    def close(self) -> None:
        """Takes the last line, which may have no line end, and closes the log file."""
        self._take(self._buffer.flush())
        self._file.close()

    def _take(self, lines: list[str]) -> None:
        for line in lines:
            event = progress.parse(line)
            self.misses_network = self.misses_network or reports_no_network(line)
            self._file.write((line if event is None else progress.render(event)) + "\n")
            if event is None:
                if not self.muted:
                    self._show(self._name, line)
            elif event.kind != "error":
                self._report(event)
            elif self.error is None:
                self.error = event
        self._file.flush()


class Replica:
    """A running replica.

    Attributes:
        name: Role and number, as in "worker-0".
        output: Takes everything that it prints.
        control: Becomes readable when the replica has ended (see `guardian`).
        pipe: File descriptor of its standard output and standard error.
        isolated: Whether it has a network of its own, with its job's other replicas alone.
        preempted: Whether it has been told that its machine will be taken away.
        peak_memory: Largest resident set of any of its processes, in bytes, once it has been finished.
    """

    def __init__(self, name: str, launch: Launch, output: ReplicaOutput, server: str) -> None:
        """Starts the replica; `server` is the path of the fork server's socket, or "" (see `start`)."""
        self.name = name
        self.output = output
        self.isolated = bool(launch.namespaces)
        self.preempted = False
        self.peak_memory = 0
        self._exit_code: int | None = None
        self._paused: list[psutil.Process] = []
        self._started = time.monotonic()
        self.pipe, printed = os.pipe()
        self.control, guardians = socket.socketpair()
        os.set_blocking(self.pipe, False)
        try:
            self._pid = start.spawn(server, launch, printed, guardians.fileno())
        finally:
            os.close(printed)
            guardians.close()

    @property
    def age(self) -> float:
        """Seconds since the replica was started."""
        return time.monotonic() - self._started

    def read(self) -> bool:
        """Takes what the replica has printed so far; returns whether more may come."""
        try:
            data = os.read(self.pipe, 1 << 16)
        except BlockingIOError:
            return True
        self.output.feed(data)
        return bool(data)

    def stop(self) -> None:
        """Asks every process of the replica to end (SIGTERM)."""
        self._signal_group(signal.SIGTERM)
        self._signal_group(signal.SIGCONT)

    def kill(self) -> None:
        """Kills every process of the replica, whatever session it may be in."""
        with contextlib.suppress(OSError):  # it has ended
            self.control.shutdown(socket.SHUT_WR)

    def pause(self) -> None:
        """Stops its processes for a while, but not its guardian, which must see its parent die."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._paused = psutil.Process(self._pid).children(recursive=True)
        for process in self._paused:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self) -> None:
        """Lets its processes go on."""
        for process in self._paused:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        self._paused = []

    def finish(self) -> int:
        """Kills what is left of the replica, takes its last output, and returns its exit status."""
        if self._exit_code is None:
            self.kill()
            told = b""
            if select.select([self.control], [], [], _KILL_S)[0]:
                with contextlib.suppress(ConnectionError):
                    told = self.control.recv(64)
            if not told:  # the guardian itself was killed
                self._signal_group(signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # the fork server's
                os.waitpid(self._pid, 0)
            code, memory = map(int, told.split() or (-signal.SIGKILL, 0))
            self._exit_code, self.peak_memory = code, memory * 1024
            self._drain()
            self.control.close()
            os.close(self.pipe)
        return self._exit_code

    def _signal_group(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signum)

    def _drain(self) -> None:
        """Reads what a pipe can hold; more can only come from a process that has escaped."""
        left = fcntl.fcntl(self.pipe, fcntl.F_GETPIPE_SZ)
        with contextlib.suppress(BlockingIOError):
            while left > 0 and (data := os.read(self.pipe, left)):
                self.output.feed(data)
                left -= len(data)
        self.output.close()
