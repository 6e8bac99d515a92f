"""Replica of a custom job: its launch, its guarded process, and its output."""

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

from shardline.pipelines.local.job import custom_job as cluster
from shardline.pipelines.local.job.custom_job import CustomJob, ShowLine
from shardline.pipelines.local.process import start
from shardline.pipelines.local.process.network import UNREACHABLE
from shardline.pipelines.local.process.processes import PLATFORM_VARIABLES, with_safe_path
from shardline.pipelines.local.process.start import Launch
from shardline.trainer.base import crash, progress
from shardline.trainer.base.errors import EXIT_BAD_INPUT, PipelineError
from shardline.trainer.base.progress import Event
from shardline.trainer.cluster.cluster import ACCELERATORS_VARIABLE, SECRET_VARIABLE, without_proxy


def make_launches(
    job: CustomJob, network: tuple[Sequence[str], Sequence[int]], temporary: Path, log_directory: Path
) -> dict[str, Launch]:
    """Returns the launch of each replica by name, the chief first.

    Its environment is this process's, overridden by the pool's and the platform's. Temporary files go
    to the directory `temporary`, crash files next to the logs, unless the job is part of a run. Raises
    PipelineError when there is no such command on this machine.
    """
    addresses, namespaces = network
    job_id, secret = f"{time.time_ns()}", secrets.token_hex()
    inherited = {key: value for key, value in os.environ.items() if key not in PLATFORM_VARIABLES}
    inherited.setdefault(crash.DIRECTORY_VARIABLE, str(log_directory.absolute()))
    # "python3" in a replica's command is the Python of this environment.
    inherited["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{inherited.get('PATH', os.defpath)}"
    inherited |= {"PYTHONUNBUFFERED": "1", "TMPDIR": str(temporary)}
    launches = {}
    for member in cluster.replicas(job):
        pool = job.worker_pools[member.pool]
        # Without what describes the platform's machines.
        own = {name: value for name, value in pool.variables.items() if name != ACCELERATORS_VARIABLE}
        env = {
            **with_safe_path(inherited | own),
            **cluster.environment(job, member, addresses, job_id),
            **without_proxy(os.environ | own, addresses),
            SECRET_VARIABLE: secret,
            progress.EVENTS_VARIABLE: progress.secret(),
        }
        if shutil.which(pool.argv[0], path=env["PATH"]) is None:
            raise PipelineError(
                f"{member.name} cannot be started: there is no command {pool.argv[0]!r} on this machine; "
                "install it, or correct the command in container_spec"
            )
        launches[member.name] = Launch(pool.argv, env, namespaces)
    return launches


class LineBuffer:
    """Buffers the bytes of one stream until a line is complete; one above 1 MiB is passed on in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Takes bytes and returns the lines that they complete, without line ends."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > 1 << 20:
            whole.append(self._rest)
            self._rest = b""
        return [line.rstrip(b"\r").decode("utf-8", "replace") for line in whole]

    def flush(self) -> list[str]:
        """Returns the last line when the stream has ended without a line end."""
        return self.feed(b"\n") if self._rest else []


class Replica:
    """A running replica, named by role and number, as in "worker-0".

    Its `control` becomes readable when it has ended (see `guardian`); `pipe` is the descriptor of its
    standard output and standard error. Every line goes to the log file, events (`trainer.base.progress`) as
    readable lines. Events are passed on, the first error is kept until the end of the job, and every other
    line is shown, unless `muted`. It is `preempted` once it has the notice of a preemption. After `finish`,
    `peak_memory` is the largest resident set of any of its processes, in bytes. `started` is a time of the
    monotonic clock.
    """

    def __init__(
        self,
        name: str,
        launch: Launch,
        log: Path,
        show: ShowLine,
        report: Callable[[Event], None],
        server: str,
    ) -> None:
        """Starts the replica, and opens the log file to append.

        `show` receives name and line, `report` all events but errors; `server` is the path of the fork
        server's socket, or "" (see `start`).
        """
        self.name = name
        self.log = log
        self.error: Event | None = None
        self.muted = False
        self.reports_no_network = False
        self.isolated = bool(launch.namespaces)  # in its job's own network
        self.preempted = False
        self.peak_memory = 0
        self._show = show
        self._report = report
        self._buffer = LineBuffer()
        self._file = log.open("a", encoding="utf-8")
        self.started = time.monotonic()
        self.pipe, printed = os.pipe()
        self.control, guardians = socket.socketpair()
        os.set_blocking(self.pipe, False)
        try:
            self._pid = start.spawn(server, launch, printed, guardians.fileno())
        finally:
            os.close(printed)
            guardians.close()

    @property
    def is_user_error(self) -> bool:
        """Whether the replica has reported a user error."""
        return self.error is not None and self.error.exit_code == EXIT_BAD_INPUT

    @property
    def age(self) -> float:
        """Seconds since the replica was started."""
        return time.monotonic() - self.started

    def read(self) -> bool:
        """Reads available output; returns whether more may come."""
        try:
            data = os.read(self.pipe, 1 << 16)
        except BlockingIOError:
            return True
        self._handle(self._buffer.feed(data))
        return bool(data)

    def stop(self) -> None:
        """Asks every process of the replica to end (SIGTERM)."""
        self._signal_group(signal.SIGTERM)
        self._signal_group(signal.SIGCONT)

    def kill(self) -> None:
        """Kills every process of the replica, in any session."""
        with contextlib.suppress(OSError):  # it has ended
            self.control.shutdown(socket.SHUT_WR)

    def finish(self) -> int:
        """Kills the remaining processes, reads the last output, and returns the exit status."""
        self.kill()
        report = b""
        if select.select([self.control], [], [], 2.0)[0]:  # time to kill its process
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
                self._handle(self._buffer.feed(data))
                remaining -= len(data)
        self._handle(self._buffer.flush())
        self._file.close()
        self.control.close()
        os.close(self.pipe)
        return code

    def _signal_group(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signum)

    def _handle(self, lines: list[str]) -> None:
        for line in lines:
            event = progress.parse(line)
            self.reports_no_network = self.reports_no_network or UNREACHABLE.search(line) is not None
            self._file.write((line if event is None else progress.render(event)) + "\n")
            if event is None:
                if not self.muted:
                    self._show(self.name, line)
            elif event.kind != "error":
                self._report(event)
            elif self.error is None:
                self.error = event
        self._file.flush()
