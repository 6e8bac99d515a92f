"""The replicas of a running job: how each is started, its process, and all of them watched together."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from shardline.pipelines.local import job as cluster
from shardline.pipelines.local import processes
from shardline.pipelines.local.job import CustomJob
from shardline.pipelines.local.output import Output
from shardline.trainer import files, progress
from shardline.trainer.errors import PipelineError

#: Seconds that a guardian has to kill what it guards.
_KILL_S = 2.0

#: Starts a guarded command: `start.spawn` without its first argument.
Spawn = Callable[[Sequence[str], Mapping[str, str], int, int], int]


class Replica:
    """A running replica.

    Attributes:
        name: Role and number, as in "worker-0".
        output: Takes everything that it prints.
        control: Becomes readable when the replica has ended (see `guardian`).
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
        self.pipe, printed = os.pipe()
        self.control, guardians = socket.socketpair()
        os.set_blocking(self.pipe, False)
        try:
            self._pid = spawn(command, env, printed, guardians.fileno())
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


@dataclass(frozen=True)
class Launch:
    """What one replica is started with.

    Attributes:
        command: Program and arguments.
        env: The whole environment.
    """

    command: Sequence[str]
    env: Mapping[str, str]


def launches(job: CustomJob, addresses: Sequence[str], gcs_root: Path | None) -> dict[str, Launch]:
    """Returns how each replica is started, by name, the chief first.

    An environment is this process's, the pool's, and the platform's own on top.

    Args:
        job: The job.
        addresses: "host:port" of each of its replicas.
        gcs_root: Stands in for /gcs/, unless this process's environment names another.

    Raises:
        PipelineError: When there is no such command on this machine.
    """
    inherited = {key: value for key, value in os.environ.items() if key not in cluster.PLATFORM_VARIABLES}
    if gcs_root is not None:
        inherited.setdefault(files.GCS_ROOT_VARIABLE, str(gcs_root))
    # "python3" in a replica's command is the Python of this environment.
    here = os.path.dirname(sys.executable)
    inherited["PATH"] = f"{here}{os.pathsep}{inherited.get('PATH', os.defpath)}"
    job_id = f"{time.time_ns()}"
    found = {}
    for member in cluster.replicas(job):
        pool = job.worker_pools[member.pool]
        env = {
            **inherited,
            "PYTHONUNBUFFERED": "1",
            **pool.variables,
            **cluster.environment(job, member, addresses, job_id),
            progress.EVENTS_VARIABLE: "1",
        }
        if shutil.which(pool.argv[0], path=env["PATH"]) is None:
            raise PipelineError(
                f"{member.name} cannot be started: there is no command {pool.argv[0]!r} on this machine; "
                "install it, or correct the command in container_spec"
            )
        found[member.name] = Launch(pool.argv, env)
    return found


class Group:
    """A set of running replicas; leaving the context kills those that are left.

    Args:
        ended: Called with each replica that has ended and with its exit status.
    """

    def __init__(self, ended: Callable[[Replica, int], None]) -> None:
        self._ended = ended
        self._replicas: dict[str, Replica] = {}
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(0)
        self._selector.close()

    def __iter__(self) -> Iterator[Replica]:
        return iter(list(self._replicas.values()))

    def find(self, name: str) -> Replica | None:
        """Returns the running replica of that name."""
        return self._replicas.get(name)

    def add(self, replica: Replica) -> None:
        """Watches a replica that has just been started."""
        self._replicas[replica.name] = replica
        self._selector.register(replica.control, selectors.EVENT_READ, (replica, "end"))
        self._selector.register(replica.pipe, selectors.EVENT_READ, (replica, "output"))

    def wait(self, until: float) -> list[tuple[Replica, int]]:
        """Takes what the replicas print until one of them prints or ends, or the time has come.

        Each is given the same share of attention, however much it prints.

        Args:
            until: Value of the monotonic clock; may be infinite.

        Returns:
            The replicas that have ended, with their exit status.
        """
        left = until - time.monotonic()
        ready = [key.data for key, _ in self._selector.select(None if left == math.inf else max(0, left))]
        for replica, what in ready:
            if what == "output" and not replica.read():
                self._selector.unregister(replica.pipe)
        return [(replica, self._finish(replica)) for replica, what in ready if what == "end"]

    def wait_for_all(self, seconds: float) -> list[tuple[Replica, int]]:
        """Waits until all have ended by themselves, for some seconds at most; returns those that have."""
        ended = []
        deadline = time.monotonic() + seconds
        while self._replicas and time.monotonic() < deadline:
            ended += self.wait(deadline)
        return ended

    def ask_to_end(self) -> None:
        """Sends SIGTERM to all; from now on only their logs have what they print."""
        for replica in self:
            replica.output.muted = True
            replica.stop()

    def stop(self, grace: float) -> None:
        """Ends all: SIGTERM, a grace period in seconds, then SIGKILL."""
        with processes.undisturbed():
            if grace:
                self.ask_to_end()
                self.wait_for_all(grace)
            for replica in self:
                replica.kill()
            for replica in self:
                self._finish(replica)

    def _finish(self, replica: Replica) -> int:
        del self._replicas[replica.name]
        self._selector.unregister(replica.control)
        with contextlib.suppress(KeyError):
            self._selector.unregister(replica.pipe)
        code = replica.finish()
        self._ended(replica, code)
        return code
