"""One replica of a custom job: a process, its output and its log file."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pipelines.local import guardian
from pipelines.local.lines import LineBuffer
from trainer import progress

#: Lines of a replica's output that an error shows.
TAIL = 10

ShowLine = Callable[[str, str], None]


class Replica:
    """A running replica.

    Its output goes, line by line, to its log file. Events (see `trainer.progress`) are passed on as
    events, errors are kept in `error` until the job is over, and every other line is shown.

    Attributes:
        name: Role and number, as in "worker-0".
        log: Path of its log file.
        pidfd: Becomes readable when the replica has ended.
        output: File descriptor of its standard output and standard error.
        error: The first error event that the replica reported.
        tail: The last lines of its output that are no events.
    """

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path, show: ShowLine
    ) -> None:
        self.name = name
        self.log = log
        self.error: progress.Event | None = None
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL)
        self._show = show
        self._buffer = LineBuffer()
        self._file = log.open("a", encoding="utf-8")
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.output = self._process.stdout.fileno()
        os.set_blocking(self.output, False)
        self.pidfd = os.pidfd_open(self._process.pid)

    @property
    def finished(self) -> bool:
        """Whether the replica has ended and been reaped."""
        return self._process.returncode is not None

    @property
    def age(self) -> float:
        """Seconds since the replica was started."""
        return time.monotonic() - self._started

    def read(self) -> bool:
        """Takes what the replica has printed so far; returns whether more may come."""
        try:
            data = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return True
        for line in self._buffer.feed(data) if data else self._buffer.flush():
            self._take(line)
        return bool(data)

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Sends a signal to every process of a replica that has not been finished."""
        # Until it is reaped, an ended leader keeps its process group's number from being used again.
        if not self.finished:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signum)

    def finish(self) -> int:
        """Kills what is left of the replica, takes its last output, and returns its exit status."""
        if not self.finished:
            self.stop(signal.SIGKILL)
            self._process.wait()
            self._drain()
            os.close(self.pidfd)
            self._file.close()
        return int(self._process.returncode)

    def _drain(self) -> None:
        """Reads to the end, or as far as it goes where a process outside the group holds the pipe open."""
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.output, 1 << 16):
                for line in self._buffer.feed(data):
                    self._take(line)
        for line in self._buffer.flush():
            self._take(line)
        self._process.stdout.close()

    def _take(self, line: str) -> None:
        event = progress.parse(line)
        text = line if event is None else progress.render(event)
        self._file.write(text + "\n")
        self._file.flush()
        if event is None:
            self.tail.append(line)
            self._show(self.name, line)
        elif event.kind != "error":
            progress.emit(event)
        elif self.error is None:
            self.error = event
