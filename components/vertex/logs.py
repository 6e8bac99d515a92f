"""The lines of a log that say something, told from those with which KFP repeats a task's whole input.

What replicas on the platform have printed, as Cloud Logging keeps it.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from google.cloud.logging_v2.types import LogEntry

_REPLICA = re.compile(r"((?:chief|worker|ps|evaluator)-\d+) \| (.*)", re.DOTALL)
_KFP = re.compile(r"\[KFP Executor [^]]*\]: ")
#: How the lines begin that follow one of KFP's: those of a JSON document.
_JSON = ("{", "}", " ")


class KfpLines:
    """Recognizes what KFP itself has written, line by line, of several processes at once."""

    def __init__(self) -> None:
        self._in_kfp: set[str] = set()

    def has(self, text: str, source: str = "") -> bool:
        """Whether a line is KFP's own, or empty.

        Args:
            text: The next line of a process.
            source: Tells processes apart.
        """
        if _KFP.match(text):
            self._in_kfp.add(source)
            return True
        if source in self._in_kfp and text.startswith(_JSON):
            return True
        self._in_kfp.discard(source)
        return not text.strip()


def readable(lines: Iterable[str]) -> Iterator[str]:
    """Yields the lines that neither KFP has written nor are empty.

    Args:
        lines: Of one process, or of several, each line after the name of its replica: "worker-0 | ...".
    """
    kfp = KfpLines()
    for line in lines:
        replica, text = split_replica(line)
        if not kfp.has(text, replica):
            yield line


def split_replica(line: str) -> tuple[str, str]:
    """Returns the name of the replica at the beginning of a line, "" for none, and the rest."""
    match = _REPLICA.fullmatch(line)
    return (match[1], match[2]) if match else ("", line)


@dataclass(frozen=True)
class LogLine:
    """One line of a replica's output.

    Attributes:
        time: When Cloud Logging received it, UTC.
        job: Id of the custom job.
        replica: workerpool0-0; "" for what the platform itself says of the job.
        text: Without line end.
        key: Tells entries apart.
    """

    time: datetime.datetime
    job: str
    replica: str
    text: str
    key: str


def log_filter(jobs: Sequence[str], replica: str = "", *, since: datetime.datetime | None = None) -> str:
    """Returns the filter for the output of custom jobs in the language of Cloud Logging.

    Source: https://cloud.google.com/vertex-ai/docs/training/monitor-training-logs

    Args:
        jobs: Ids of the custom jobs.
        replica: workerpool0-0; "" for all.
        since: Only what came at or after this time.
    """
    ids = " OR ".join(json.dumps(job) for job in jobs)
    parts = ['resource.type="ml_job"', f"resource.labels.job_id=({ids})"]
    if replica:
        parts.append(f'resource.labels.task_name="{replica}"')
    if since:
        parts.append(f'timestamp>="{since.astimezone(datetime.UTC).isoformat()}"')
    return " AND ".join(parts)


def lines_of(entries: Iterable[LogEntry]) -> Iterator[LogLine]:
    """Yields the lines of log entries, a text of several lines as several."""
    for entry in entries:
        labels = dict(entry.resource.labels)
        for number, text in enumerate(_text(entry).splitlines() or [""]):
            yield LogLine(
                time=entry.timestamp,
                job=labels.get("job_id", ""),
                # "service" is the platform itself.
                replica=labels.get("task_name", "").removeprefix("service"),
                text=text,
                key=f"{entry.timestamp}{entry.insert_id}{number}",
            )


def _text(entry: LogEntry) -> str:
    if entry.text_payload:
        return str(entry.text_payload)
    return str((entry.json_payload or {}).get("message", ""))
