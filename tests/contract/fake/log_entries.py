"""Cloud Logging: entries that a test has put in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.api.monitored_resource_pb2 import MonitoredResource
from google.cloud.logging_v2.types import ListLogEntriesResponse, LogEntry
from google.protobuf import json_format

from tests.contract.fake.api import PROJECT, now, page, refuse
from tests.contract.fake.filters import matching


class LogEntries:
    """Answers entries:list.

    Attributes:
        entries: In no particular order.
    """

    def __init__(self, number: Callable[[], int]) -> None:
        self.entries: list[LogEntry] = []
        self._number = number

    def add(self, text: str, resource: tuple[str, dict[str, str]], *, log: str) -> None:
        """Puts in an entry as a replica leaves one: jsonPayload.message; `resource` is type and labels."""
        kind, names = resource
        entry = LogEntry(
            log_name=f"projects/{PROJECT}/logs/{log.replace('/', '%2F')}",
            resource=MonitoredResource(type=kind, labels={"project_id": PROJECT, **names}),
            json_payload={"message": text},
            timestamp=now(),
            insert_id=f"{self._number():08}",
        )
        entry.receive_timestamp = entry.timestamp
        self.entries.append(entry)

    def list_log_entries(self, request: Any) -> ListLogEntriesResponse:
        if set(request.resource_names) - {f"projects/{PROJECT}"}:
            refuse(f"resource_names: {list(request.resource_names)} is not this project")
        found = matching(self.entries, request.filter.replace("\n", " "), _read)
        if request.order_by not in ("", "timestamp asc", "timestamp desc"):
            refuse(f"order_by: cannot order by {request.order_by!r}")
        # Entries of the same time are in the order of their insert_id.
        found.sort(
            key=lambda entry: (entry.timestamp.timestamp(), entry.insert_id),
            reverse=request.order_by == "timestamp desc",
        )
        entries, token = page(found, request, 50)
        return ListLogEntriesResponse(entries=entries, next_page_token=token)


def _read(entry: LogEntry, name: str) -> Any:
    """Returns what a filter means by a field of an entry, as JSON names it: resource.labels.job_id."""
    if name == "timestamp":
        return entry.timestamp
    found: Any = json_format.MessageToDict(LogEntry.pb(entry))
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found
