"""Progress: events that a run reports to its user, as lines of text or, for a local runner, as JSON.

By default an event becomes a plain line on standard output. A process started by Shardline's local runner has
a secret in its environment, SHARDLINE_EVENTS, and writes events as JSON lines marked with it, which the
runner finds in the process's output. A command in the foreground installs its own `sink`. The metric of a
tuning job goes to a file, for Vertex AI's agent (`Measurements`).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import math
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from shardline.trainer.base import crash
from shardline.trainer.base.errors import RunError, ShardlineError

EVENTS_VARIABLE = "SHARDLINE_EVENTS"
#: Environment variable with the seconds after which a pipeline task ends itself.
TIMEOUT_VARIABLE = "SHARDLINE_TIMEOUT"
#: Environment variable with the file in which a trial of a tuning job reports its metric.
MEASUREMENTS_VARIABLE = "CLOUD_ML_HP_METRIC_FILE"
_MARK = "@shardline "

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Event:
    """One reported event.

    Attributes:
        topic: The step that reports ("preprocess", "train", "validate", "register"); of a fact, its name.
        text: Text for a person.
        done, total, unit: Work done and in total, in a plural unit (progress only).
        exit_code: Exit code of the process (errors only).
        value: Value for a program (facts only).
    """

    kind: Literal["line", "progress", "fact", "error"]
    topic: str
    text: str
    done: int = 0
    total: int = 0
    unit: str = ""
    exit_code: int = 0
    value: Scalar = None


Sink = Callable[[Event], None]


def render(event: Event) -> str:
    """Returns the event as one plain line of text."""
    if event.kind == "progress":
        amount = f"{event.done:,}/{event.total:,} {event.unit}"
        return f"{event.topic}: {amount}  {event.text}".rstrip()
    if event.kind == "error":
        return f"{event.topic}: error: {event.text}"
    if event.kind == "fact" and event.topic == "blessed":
        return f"verdict: {event.text}"
    return f"{event.topic}: {event.text}"


@functools.cache
def secret() -> str:
    """Returns the value of SHARDLINE_EVENTS with which processes started by this one mark their events."""
    return secrets.token_hex(16)


def parse(line: str) -> Event | None:
    """Returns the event in a line of output marked with the secret; None if there is none."""
    _, mark, payload = line.partition(f"{_MARK}{secret()} ")
    if not mark:
        return None
    try:
        return Event(**json.loads(payload))
    except (ValueError, TypeError, RecursionError):
        return None


def _default_sink(event: Event) -> None:
    marked = os.environ.get(EVENTS_VARIABLE)
    stream = sys.stderr if event.kind == "error" and not marked else sys.stdout
    # One call: threads report too, and print writes the newline separately.
    stream.write((f"{_MARK}{marked} {json.dumps(asdict(event))}" if marked else render(event)) + "\n")
    stream.flush()


_sink: Sink = _default_sink


@contextlib.contextmanager
def sink(show: Sink) -> Iterator[Sink]:
    """Sends all events of this process to `show` while the context lasts; yields the previous sink."""
    global _sink
    previous, _sink = _sink, show
    try:
        yield previous
    finally:
        _sink = previous


def emit(event: Event) -> None:
    """Forwards an event that another process reported to this one."""
    _sink(event)


def report(topic: str, text: str) -> None:
    """Reports one line of text."""
    _sink(Event("line", topic, text))


def shortened(names: Sequence[str]) -> str:
    """Returns the first three of some names, and the number of others."""
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)}"


def advance(topic: str, done: int, total: int, unit: str, text: str = "") -> None:
    """Reports the progress of a long task."""
    _sink(Event("progress", topic, text, done=done, total=total, unit=unit))


def fact(name: str, value: Scalar, text: str = "") -> None:
    """Reports a result for the table at the end of a run; `text` defaults to `value`."""
    _sink(Event("fact", name, text or str(value), value=value))


def fail(topic: str, error: ShardlineError) -> None:
    """Reports the error that ends this process."""
    _sink(Event("error", topic, error.line, exit_code=error.exit_code))


@contextlib.contextmanager
def exit_on_error(topic: str) -> Iterator[None]:
    """Ends the process with a one-line error and an exit code after an exception or SHARDLINE_TIMEOUT."""
    timeout = float(os.environ.get(TIMEOUT_VARIABLE) or 0)

    def exit_on_timeout() -> None:
        error = RunError(f"not done after {timeout:,.0f} s; give it more time, or a larger machine")
        fail(topic, error)
        os._exit(error.exit_code)

    timer = threading.Timer(min(timeout, threading.TIMEOUT_MAX), exit_on_timeout)
    timer.daemon = True
    if timeout:
        timer.start()
    try:
        yield
    except Exception as failure:
        error = crash.as_error(failure)
        fail(topic, error)
        raise SystemExit(error.exit_code) from None
    finally:
        timer.cancel()


_INTERVAL_SECONDS = 2.0


class Meter:
    """Reports records, bytes, rates and the remaining time about every two seconds.

    The verb, in the past tense, says what happens to the records; a total of 0 means unknown.
    """

    def __init__(self, verb: str, total: int, *, rejected: int = 0, topic: str = "preprocess") -> None:
        self._verb = verb
        self._topic = topic
        self._total = total
        self._done = self._bytes = 0
        self._rejected = rejected
        self._started = self._reported = time.monotonic()

    @property
    def bytes_left(self) -> float:
        """Bytes of the remaining records, as many as those so far had on average; 0 if not known."""
        return self._bytes / max(self._done, 1) * (self._total - self._done)

    def advance(self, records: int, size: int = 0) -> None:
        """Counts processed records, and their bytes."""
        self._done += records
        self._bytes += size
        now = time.monotonic()
        if now - self._reported < _INTERVAL_SECONDS:
            return
        self._reported, seconds = now, max(now - self._started, 1e-9)
        # A source may not know its length: then the total is what has been read.
        total, rate = max(self._total, self._done), self._done / seconds
        parts = [f"{self._verb}, {rate:,.0f}/s"]
        if self._bytes:
            parts.append(f"{self._bytes / 1e6 / seconds:,.0f} MB/s")
        if self._total:
            left = datetime.timedelta(seconds=round((total - self._done) / max(rate, 1e-9)))
            parts.append(f"{self._done / total:.0%}, {left} left")
        if self._rejected:
            parts.append(f"{self._rejected:,} rejected")
        advance(self._topic, self._done, total, "records", ", ".join(parts))


class Measurements:
    """Reports of a trial of a tuning job to Vertex AI's agent, in the file that it reads.

    The file is as of cloudml-hypertune 0.1.0.dev6 does, a library of one class last released in 2019:
    https://github.com/GoogleCloudPlatform/cloudml-hypertune/blob/master/hypertune/hypertune.py
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Reads the reports of an earlier process; a SettingsError if the file cannot be written."""
        self._path = Path(environ.get(MEASUREMENTS_VARIABLE) or "/tmp/hypertune/output.metrics")
        self._trial = environ.get("CLOUD_ML_TRIAL_ID", "0")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a+", encoding="utf-8", errors="replace") as file:
                file.seek(0)
                self._lines = deque(file.read().splitlines(), maxlen=100)
        except OSError as error:
            raise crash.output_error(
                error,
                f"the trial's metric cannot be reported: {self._path} cannot be written ({error.strerror}); "
                "run the image as root, as the platform's own images do, or give its user that directory",
            ) from None

    def add(self, metric: str, value: float, step: int) -> None:
        """Reports the finite value of a metric at a training step."""
        report = {"timestamp": time.time(), "trial": self._trial, metric: str(value)}
        report |= {"global_step": str(step), "checkpoint_path": ""}
        self._lines.append(json.dumps(report, sort_keys=True))
        # Rewritten in place: it is not documented whether the agent would notice a replaced file.
        with self._path.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in self._lines)


def read_measurements(path: Path, metric: str) -> list[tuple[int, float, float]]:
    """Returns the reports of a trial: step, value and time (seconds since 1970) of each.

    Of two reports of one step, by a restarted trial, the last counts. An incomplete line is skipped, and a
    value that is not finite; a missing file has no reports.
    """
    reports: dict[int, tuple[int, float, float]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
            step, value = int(entry["global_step"]), float(entry[metric])
            if math.isfinite(value):
                reports[step] = (step, value, float(entry["timestamp"]))
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
    return [reports[step] for step in sorted(reports)]
