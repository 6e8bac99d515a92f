"""What became of the replicas of a job: a table for people and job.json for programs."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardline.pipelines.local import processes, record
from shardline.trainer import files

JOB_FILE = "job.json"

_TITLES = ("replica", "start", "end", "exit", "restarts", "peak memory")


class History:
    """The starts and ends of every replica, in seconds since the job began.

    Args:
        display_name: Name of the job.
        names: Names of its replicas.
    """

    def __init__(self, display_name: str, names: Sequence[str]) -> None:
        self._display_name = display_name
        self._created = record.timestamp(datetime.datetime.now(datetime.UTC))
        self._began = time.monotonic()
        self._starts: dict[str, list[dict[str, Any]]] = {name: [] for name in names}

    def started(self, name: str) -> None:
        """Notes that a replica has been started."""
        self._starts[name].append(
            {"start_s": self._now(), "end_s": None, "exit": None, "stopped": False, "peak_memory_bytes": 0}
        )

    def ended(self, name: str, code: int, peak_memory: int, *, stopped: bool) -> None:
        """Notes that it has ended.

        Args:
            name: The replica.
            code: Its exit status.
            peak_memory: In bytes.
            stopped: Whether it was stopped because the job needed it no longer.
        """
        self._starts[name][-1] |= {
            "end_s": self._now(),
            "exit": processes.signal_name(code) or code,
            "stopped": stopped,
            "peak_memory_bytes": peak_memory,
        }

    def table(self) -> list[str]:
        """Returns the table, a line per replica: first start, last end and exit, largest memory."""
        rows = [_TITLES, *(_row(name, starts) for name, starts in self._starts.items() if starts)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [
            "  ".join(
                cell.ljust(width) if number in (0, 3) else cell.rjust(width)
                for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]

    def save(self, directory: Path, state: str, error: str | None) -> None:
        """Writes job.json.

        Args:
            directory: Where.
            state: "succeeded", "failed" or "stopped".
            error: Why the job has not succeeded.
        """
        content = {
            "display_name": self._display_name,
            "state": state,
            "error": error,
            "created": self._created,
            "duration_s": self._now(),
            "replicas": [
                {"name": name, "restarts": max(0, len(starts) - 1), "starts": starts}
                for name, starts in self._starts.items()
            ],
        }
        files.write_json(directory / JOB_FILE, content)

    def _now(self) -> float:
        return round(time.monotonic() - self._began, 3)


def _row(name: str, starts: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    last = starts[-1]
    return (
        name,
        f"{starts[0]['start_s']:.1f} s",
        f"{last['end_s']:.1f} s",
        "stopped" if last["stopped"] and last["exit"] != 0 else str(last["exit"]),
        str(len(starts) - 1),
        f"{max(start['peak_memory_bytes'] for start in starts) / 2**20:,.0f} MiB",
    )
