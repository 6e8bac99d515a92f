"""One replica of a custom job: a guarded process and its output."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import psutil

from shardline.pipelines.local import guardian
from shardline.pipelines.local.output import Output

#: Seconds that a guardian has to kill what it guards.
_KILL_S = 2.0

#: How a guardian is started; `spawn_guardian` is one way.
Spawn = Callable[[Sequence[str], Mapping[str, str], int, int], int]


class Replica:
    """A running replica.

    Attributes:
        name: Role and number, as in "worker-0".
        output: Where everything goes that it prints.
        pidfd: Becomes readable when the replica has ended.
        pipe: File descriptor of its standard output and standard error.
        preempted: Whether it has been told that its machine will be taken away.
        peak_memory: Largest resident set of any of its processes, in bytes, once it has been finished.
    """

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], output: Output, spawn: Spawn
    ) -> None:
        self.name = name
        self.output = output
        self.preempted = False
        self.peak_memory = 0
        self._exit_code: int | None = None
        self._paused: list[psutil.Process] = []
        self._started = time.monotonic()
        self._pid, self.pipe, self._memory = _start(command, env, spawn)
        self.pidfd = os.pidfd_open(self._pid)

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
        # Until it is reaped, an ended leader keeps its process group's number from being used again.
        self._signal_group(signal.SIGTERM)
        self._signal_group(signal.SIGCONT)

    def kill(self) -> None:
        """Kills every process of the replica, whatever session it may be in."""
        signal.pidfd_send_signal(self.pidfd, signal.SIGHUP)

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
            select.select([self.pidfd], [], [], _KILL_S)
            self._signal_group(signal.SIGKILL)  # where the guardian itself was killed
            _, status = os.waitpid(self._pid, 0)
            self._exit_code = os.waitstatus_to_exitcode(status)
            self._drain()
            for descriptor in (self.pidfd, self.pipe, self._memory):
                os.close(descriptor)
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
        with contextlib.suppress(BlockingIOError):
            self.peak_memory = int(os.read(self._memory, 32) or 0) * 1024


def spawn_guardian(command: Sequence[str], env: Mapping[str, str], printed: int, told: int) -> int:
    """Starts a guarded command in a session of its own and returns the guardian's process id.

    Args:
        command: Program and arguments.
        env: Its environment.
        printed: Descriptor for what it prints.
        told: Descriptor for what becomes `guardian.MEMORY_FD`.
    """
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", guardian.__file__, str(os.getpid()), *command],
        env,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, printed, 1),
            (os.POSIX_SPAWN_DUP2, printed, 2),
            (os.POSIX_SPAWN_DUP2, told, guardian.MEMORY_FD),
        ],
        setsid=True,
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # which Python ignores
    )


def _start(command: Sequence[str], env: Mapping[str, str], spawn: Spawn) -> tuple[int, int, int]:
    """Returns the guardian's process id, and descriptors of the output and of `guardian.MEMORY_FD`."""
    output, printed = os.pipe()
    memory, told = os.pipe()
    try:
        pid = spawn(command, env, printed, told)
    finally:
        os.close(printed)
        os.close(told)
    for descriptor in (output, memory):
        os.set_blocking(descriptor, False)
    return pid, output, memory
