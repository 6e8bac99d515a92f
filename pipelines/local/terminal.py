"""Terminal view of a run's events: progress bars on a TTY, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from shardline.components.text import wrap
from shardline.trainer.base import progress
from shardline.trainer.base.progress import Event

_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "bright_red")


@contextlib.contextmanager
def foreground(stream: TextIO | None = None, *, facts: bool = True) -> Iterator[Terminal]:
    """Shows the progress of this process: bars and colours on a TTY, plain lines elsewhere.

    `stream` is standard output by default. `facts` is False where a table at the end shows them.
    """
    stream = stream or sys.stdout
    terminal = (_Bars if stream.isatty() else Terminal)(stream, facts)
    try:
        with progress.sink(terminal.show):
            yield terminal
    finally:
        terminal.close()


class Terminal:
    """Plain lines; progress events are shown every two seconds, and the last one."""

    def __init__(self, stream: TextIO, facts: bool) -> None:
        self._stream = stream
        self._facts = facts
        self._shown_at: dict[str, float] = {}
        self._waiting: dict[str, Event] = {}

    def show(self, event: Event) -> None:
        """Shows an event; pass it to `progress.sink`."""
        if event.kind == "progress":
            self._waiting[event.topic] = event
            if time.monotonic() - self._shown_at.setdefault(event.topic, time.monotonic()) >= 2.0:
                self._flush(event.topic)
            return
        if event.kind == "line":
            # The line reports the progress itself.
            self._waiting.pop(event.topic, None)
            self._shown_at[event.topic] = time.monotonic()
        self.close()
        if event.kind != "fact" or self._facts:
            self._print(event)

    def line(self, name: str, text: str) -> None:
        """Shows a line of output of the replica `name`, on a TTY in its own colour."""
        print(f"{name} | {text}", file=self._stream, flush=True)

    def end_work(self) -> None:
        """Removes the progress of work that is over, such as an unfinished bar."""

    def close(self) -> None:
        """Shows the progress events that are still held back."""
        for topic in list(self._waiting):
            self._flush(topic)

    def _flush(self, topic: str) -> None:
        self._shown_at[topic] = time.monotonic()
        self._print(self._waiting.pop(topic))

    def _print(self, event: Event) -> None:
        print(progress.render(event), file=self._stream, flush=True)


class Heartbeat:
    """Lines that say what is running where nothing else is shown, at growing intervals."""

    def __init__(self) -> None:
        self.task = ""  # the running one; "" between two
        self.reset()

    def reset(self) -> None:
        """Starts again: something was shown."""
        self._began = time.monotonic()
        self._next_s = 3.0  # without output

    def report_if_due(self) -> None:
        """Reports a line, if nothing was shown for long enough."""
        seconds = time.monotonic() - self._began
        if seconds >= self._next_s:
            progress.report(self.task or "run", f"running; no output for {seconds:.0f} s")
            self._next_s = 3 * self._next_s


class _Bars(Terminal):
    def __init__(self, stream: TextIO, facts: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__(stream, facts)
        self._colours: dict[str, str] = {}
        console = Console(file=stream, highlight=False)
        self._width = min(24, console.width // 10)
        self._bar = Progress(
            TextColumn("[bold]{task.description}", markup=True),
            BarColumn(bar_width=self._width),
            TextColumn("{task.fields[amount]}", markup=False),
            TextColumn("{task.fields[text]}", markup=False),
            console=console,
            transient=True,
        )
        self._task: Any = None
        self._topic = ""

    def show(self, event: Event) -> None:
        if event.kind == "progress":
            self._advance(event)
        elif event.kind != "fact" or self._facts:
            style = "bold red" if event.kind == "error" else ""
            topic, _, rest = progress.render(event).partition(": ")
            self._above((f"{topic}: ", style or "bold"), (rest, style))

    def line(self, name: str, text: str) -> None:
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        self._above((f"{name} | ", colour), (text, ""))

    def end_work(self) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None

    def close(self) -> None:
        self._bar.stop()

    def _advance(self, event: Event) -> None:
        if self._topic != event.topic or event.done >= event.total:
            self.end_work()
        if event.done >= event.total:
            return
        amount = f"{event.done:,}/{event.total:,} {event.unit}"
        # Where the line is too short for the text, its first part and its last, the time left, stay longest.
        room = self._bar.console.width - self._width - len(event.topic) - len(amount) - 3
        parts = re.split("(  |, )", event.text)
        while len("".join(parts)) > room and len(parts) > 3:
            del parts[-4:-2]
        if self._task is None:
            self._topic = event.topic
            self._task = self._bar.add_task(event.topic, amount="", text="")
            self._bar.start()
        self._bar.update(
            self._task, completed=event.done, total=event.total, amount=amount, text="".join(parts)
        )

    def _above(self, head: tuple[str, str], rest: tuple[str, str]) -> None:
        from rich.text import Text

        console = self._bar.console
        text = Text(wrap(head[0] + rest[0], console.width - 4, "    "), rest[1])
        text.stylize(head[1], 0, len(head[0]))
        console.print(text, soft_wrap=True)
