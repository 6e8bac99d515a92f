"""The process that executes a pipeline, watched: what its tasks report, and how it ends."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from shardline.components.run_record import LOG, RUN_VARIABLE
from shardline.components.vertex.logs import KfpLines, split_replica
from shardline.pipelines.local import execute, processes
from shardline.pipelines.local.job import PLATFORM_VARIABLES
from shardline.pipelines.local.output import LineBuffer
from shardline.pipelines.local.stand_ins import INJECTIONS_VARIABLE
from shardline.pipelines.local.terminal import Terminal
from shardline.trainer import progress
from shardline.trainer.errors import EXIT_BAD_INPUT
from shardline.trainer.progress import Event, Scalar

#: Lines of a failed task's output that are shown where the task has not explained itself.
_TAIL = 12
#: Seconds that a pipeline whose outcome is certain has to end by itself.
_DOOMED_S = 5.0
#: How kfp.local marks the output of a task, as against its own words.
_TASK_INDENT = "    "
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Execution:
    """The execution of one run: its process, and what its tasks have reported.

    Attributes:
        directory: The run directory.
        facts: The facts that tasks have reported, the last of each name, in order of arrival.
        errors: The errors that tasks have reported.
        tail: The last lines that tasks have printed.
        exit_code: Status of the executing process once it has ended.
        patient: Whether tasks may have to run after one has failed (exit handlers).
        injections: Failures to rehearse in every custom job.
    """

    directory: Path
    patient: bool
    injections: Sequence[str] = ()
    facts: dict[str, Event] = field(default_factory=dict)
    errors: list[Event] = field(default_factory=list)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL))
    exit_code: int = 0
    _kfp_lines: KfpLines = field(default_factory=KfpLines)

    @property
    def values(self) -> dict[str, Scalar]:
        """The values of the facts."""
        return {name: event.value for name, event in self.facts.items()}

    @property
    def log(self) -> Path:
        """The file that holds everything that was printed."""
        return self.directory / LOG

    def watch(self, command: list[str], terminal: Terminal) -> None:
        """Runs the executing process to its end, and leaves nothing behind that it has started.

        Args:
            command: `shardline.pipelines.local.execute` with all its arguments but the last two.
            terminal: Where events are shown.
        """
        with self.log.open("w", encoding="utf-8") as log, _scratch() as scratch, processes.adopted_orphans():
            child = subprocess.Popen(
                [*command, scratch, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
            )
            try:
                for line in _output(child, self._is_doomed):
                    self._take(line, log, terminal)
            finally:
                with processes.undisturbed():
                    self.exit_code = _end(child)
                    processes.stop_descendants(with_variable=(RUN_VARIABLE, str(self.directory)))

    def raise_failure(self, terminal: Terminal) -> None:
        """Explains the failure of the run, if it has failed.

        Raises:
            ProcessFailedError: In the words of the task that failed, where it has said something.
        """
        if self.exit_code == 0:
            return
        own = [event for event in self.errors if event.topic != execute.TOPIC]
        if own:
            event = own[-1]
            raise processes.ProcessFailedError(event.text, topic=event.topic, exit_code=event.exit_code)
        for line in self.tail:
            terminal.show(Event("line", execute.TOPIC, f"| {line}"))
        texts = [event.text for event in self.errors]
        text = texts[-1] if texts else f"the executing process {processes.describe_exit(self.exit_code)}"
        raise processes.ProcessFailedError(f"{text} (log: {self.log})", topic=execute.TOPIC)

    def _environment(self) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if key not in PLATFORM_VARIABLES}
        # The user's own sources and models are imported by every task, as they are from here.
        path = [os.getcwd(), *inherited.get("PYTHONPATH", "").split(os.pathsep)]
        return {
            **inherited,
            "PYTHONPATH": os.pathsep.join(item for item in path if item),
            "PYTHONUNBUFFERED": "1",
            progress.EVENTS_VARIABLE: "1",
            RUN_VARIABLE: str(self.directory),
            INJECTIONS_VARIABLE: " ".join(self.injections),
        }

    def _take(self, line: str, log: TextIO, terminal: Terminal) -> None:
        event = progress.parse(line)
        line = _COLOUR.sub("", line)
        print(line if event is None else progress.render(event), file=log, flush=True)
        if event is None:
            if line.startswith(_TASK_INDENT) and line.strip():
                printed = line.removeprefix(_TASK_INDENT)
                replica, text = split_replica(printed)
                if not self._kfp_lines.has(text, replica):
                    self.tail.append(printed)
                    if replica:
                        terminal.line(replica, text)
        elif event.kind == "error":
            self.errors.append(event)
        else:
            if event.kind == "fact":
                self.facts[event.topic] = event
            terminal.show(event)

    def _is_doomed(self) -> bool:
        """Whether the user's mistake has ended the run, so that trying a task again is of no use."""
        return not self.patient and any(event.exit_code == EXIT_BAD_INPUT for event in self.errors)


def _output(child: subprocess.Popen[bytes], is_doomed: Callable[[], bool]) -> Iterator[str]:
    """Yields the child's lines until it has ended, or for some seconds more once it is doomed."""
    assert child.stdout is not None
    output = child.stdout.fileno()
    os.set_blocking(output, False)
    buffer = LineBuffer()
    deadline: float | None = None
    ended = False
    with selectors.DefaultSelector() as selector, _pidfd(child.pid) as pidfd:
        selector.register(output, selectors.EVENT_READ)
        selector.register(pidfd, selectors.EVENT_READ)
        while not ended and (deadline is None or time.monotonic() < deadline):
            ready = {key.fd for key, _ in selector.select(1.0)}
            ended = pidfd in ready
            if output in ready or (ended and output in selector.get_map()):
                more = yield from _read_all(output, buffer)
                if not more:
                    selector.unregister(output)
            if deadline is None and is_doomed():
                deadline = time.monotonic() + _DOOMED_S
    yield from buffer.flush()


def _read_all(output: int, buffer: LineBuffer) -> Generator[str, None, bool]:
    """Yields the lines that can be read without waiting; returns whether more may come."""
    with contextlib.suppress(BlockingIOError):
        while data := os.read(output, 1 << 16):
            yield from buffer.feed(data)
        return False
    return True


@contextlib.contextmanager
def _scratch() -> Iterator[str]:
    """A directory for temporary files; the system's own, since sockets in it need short paths."""
    directory = tempfile.mkdtemp(prefix="shardline-")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _end(child: subprocess.Popen[bytes]) -> int:
    """Ends the executing process, which ends all that it has started, and returns its exit status."""
    child.terminate()
    try:
        code = child.wait(processes.GRACE_S + 2)
    except subprocess.TimeoutExpired:
        child.kill()
        code = child.wait()
    if child.stdout is not None:
        child.stdout.close()
    return code
