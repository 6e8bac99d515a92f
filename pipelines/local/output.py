"""Output of one replica: bytes from a pipe become lines, events, a log file, and what is shown."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from shardline.pipelines.local.network import misses_network
from shardline.trainer import progress
from shardline.trainer.progress import Event

#: Longest line that is waited for; a longer one is passed on in pieces.
_LONGEST = 1 << 20


class LineBuffer:
    """Collects the bytes of one stream until a line is whole."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Takes bytes and returns the lines that they complete, without line ends."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST:
            whole.append(self._rest)
            self._rest = b""
        return [line.rstrip(b"\r").decode("utf-8", "replace") for line in whole]

    def flush(self) -> list[str]:
        """Returns the last line when the stream has ended without a line end."""
        return self.feed(b"\n") if self._rest else []


#: Lines of one replica that are shown within a second; the log file has all of them.
SHOWN_PER_S = 500

ShowLine = Callable[[str, str], None]


class Output:
    """Output of one replica.

    All of it goes to the log file, line by line; events (see `shardline.trainer.progress`) as readable lines.
    Events are passed on, errors are kept until the job is over, and every other line is shown, unless
    there are more than a person can read and a terminal can take.

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
        self._second = 0.0
        self._shown = 0
        self._held_back = 0

    def feed(self, data: bytes) -> None:
        """Takes what the replica has printed since the last call."""
        self._take(self._buffer.feed(data))

    def close(self) -> None:
        """Takes the last line, which may have no line end, and closes the log file."""
        self._take(self._buffer.flush())
        self._tell_held_back()
        self._file.close()

    def _take(self, lines: list[str]) -> None:
        for line in lines:
            event = progress.parse(line)
            self.misses_network = self.misses_network or misses_network(line)
            self._file.write((line if event is None else progress.render(event)) + "\n")
            if event is None:
                self._show_at_most(line)
            elif event.kind != "error":
                self._report(event)
            elif self.error is None:
                self.error = event
        self._file.flush()

    def _show_at_most(self, line: str) -> None:
        if self.muted:
            return
        if (now := time.monotonic()) >= self._second + 1:
            self._tell_held_back()
            self._second, self._shown = now, 0
        if self._shown < SHOWN_PER_S:
            self._shown += 1
            self._show(self._name, line)
        else:
            self._held_back += 1

    def _tell_held_back(self) -> None:
        if self._held_back:
            self._show(self._name, f"... {self._held_back:,} lines more, which only {self.log} has")
            self._held_back = 0
