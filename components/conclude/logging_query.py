"""What replicas on the platform have printed, as Cloud Logging keeps it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from google.cloud.logging_v2.types import LogEntry


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
