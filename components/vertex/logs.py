"""Log lines: KFP's own told from a task's, replicas and errors in them, and entries of Cloud Logging."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardline.components.vertex.client import ask_all

if TYPE_CHECKING:
    from google.cloud.logging_v2.types import LogEntry

    from shardline.components.vertex.client import Platform

#: The number of last lines that explain a failure.
LAST_LINES = 12

_REPLICA = re.compile(r"((?:chief|worker|ps|evaluator)-\d+) \| (.*)", re.DOTALL)
#: An error as `shardline.trainer.progress` renders it; a local run's own repeats a task's.
_ERROR = re.compile(r"(?!pipeline:)(\w+): error: (.*)")
_KFP = re.compile(r"\[KFP Executor [^]]*\]: ")
#: How the lines begin that follow one of KFP's: those of a JSON document.
_JSON = ("{", "}", " ")


class KfpLines:
    """Recognizes what KFP itself has written, line by line, of several processes at once."""

    def __init__(self) -> None:
        self._in_kfp: set[str] = set()

    def has(self, text: str, source: str = "") -> bool:
        """Whether the next line of a process is KFP's own, or empty; `source` tells processes apart."""
        if _KFP.match(text):
            self._in_kfp.add(source)
            return True
        if source in self._in_kfp and text.startswith(_JSON):
            return True
        self._in_kfp.discard(source)
        return not text.strip()


def readable(lines: Iterable[str]) -> Iterator[str]:
    """Yields the lines that are neither KFP's own nor empty.

    They are of one process, or of several, each after the name of its replica: "worker-0 | ...".
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


def own_error(lines: Iterable[str]) -> str:
    """Returns the message of Shardline's last error among lines; "" for none."""
    found = [match[2] for line in lines if (match := _ERROR.fullmatch(line))]
    return found[-1] if found else ""


def last_lines(lines: Iterable[str]) -> tuple[str, ...]:
    """Returns the last readable lines, Shardline's own errors left out."""
    return tuple(line for line in readable(lines) if not _ERROR.fullmatch(line))[-LAST_LINES:]


@dataclass(frozen=True)
class LogLine:
    """One line of a replica's output, without line end, and when (UTC) Cloud Logging received it.

    Attributes:
        job: Id of the custom job.
        replica: workerpool0-0; "" for what the platform itself says of the job.
        key: Tells entries apart.
    """

    time: datetime.datetime
    job: str
    replica: str
    text: str
    key: str


def read_entries(
    platform: Platform,
    jobs: Iterable[str],
    limit: int,
    replica: str = "",
    since: datetime.datetime | None = None,
) -> list[LogLine]:
    """Returns the newest lines that custom jobs have printed, the oldest of them first.

    Source: https://cloud.google.com/vertex-ai/docs/training/monitor-training-logs

    Args:
        platform: Where the jobs are.
        jobs: Ids of the custom jobs.
        limit: The largest number of entries.
        replica: workerpool0-0; "" for all.
        since: Only what came at or after this time.
    """
    ids = " OR ".join(json.dumps(job) for job in jobs)
    parts = ['resource.type="ml_job"', f"resource.labels.job_id=({ids})"]
    if replica:
        parts.append(f'resource.labels.task_name="{replica}"')
    if since:
        parts.append(f'timestamp>="{since.astimezone(datetime.UTC).isoformat()}"')
    request = {
        "resource_names": [f"projects/{platform.project}"],
        "filter": " AND ".join(parts),
        "order_by": "timestamp desc",
        "page_size": min(limit, 1000),
    }
    found = ask_all("read the logs", platform.logs.list_log_entries, request, limit=limit)
    return list(_lines(found[::-1]))


def _lines(entries: Sequence[LogEntry]) -> Iterator[LogLine]:
    """Yields the lines of log entries, a text of several lines as several."""
    for entry in entries:
        labels = dict(entry.resource.labels)
        text = str(entry.text_payload or (entry.json_payload or {}).get("message", ""))
        for number, line in enumerate(text.splitlines() or [""]):
            yield LogLine(
                time=entry.timestamp,
                job=labels.get("job_id", ""),
                # "service" is the platform itself.
                replica=labels.get("task_name", "").removeprefix("service"),
                text=line,
                key=f"{entry.timestamp}{entry.insert_id}{number}",
            )
