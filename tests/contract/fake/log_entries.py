"""Cloud Logging: entries that a test has put in."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from typing import Any

from google.api.monitored_resource_pb2 import MonitoredResource
from google.cloud.logging_v2.types import ListLogEntriesResponse, LogEntry
from google.protobuf import json_format

from tests.contract.fake.api import PROJECT, now, page, refuse

#: A comparison of https://google.aip.dev/160, of what is used here.
_PART = re.compile(r"([\w.]+)(=|>=)(.+)")


class LogEntries:
    """Answers entries:list."""

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
        wanted = [_PART.fullmatch(part) for part in request.filter.split(" AND ")]
        refuse(*(() if all(wanted) else (f"filter: cannot be read: {request.filter!r}",)))
        found = [entry for entry in self.entries if all(_fits(entry, *match.groups()) for match in wanted)]
        # Entries of the same time are in the order of their insert_id.
        found.sort(
            key=lambda entry: (entry.timestamp.timestamp(), entry.insert_id),
            reverse=request.order_by == "timestamp desc",
        )
        entries, token = page(found, request, 50)
        return ListLogEntriesResponse(entries=entries, next_page_token=token)


def _fits(entry: LogEntry, name: str, operation: str, value: str) -> bool:
    values = re.findall(r'"([^"]*)"', value)  # field=("a" OR "b") is one of these
    if operation == ">=":
        # Entries' times are finer than a datetime, which compares only with its own kind.
        return entry.timestamp.timestamp() >= datetime.datetime.fromisoformat(values[0]).timestamp()
    return _read(entry, name) in values


def _read(entry: LogEntry, name: str) -> Any:
    """Returns what a filter means by a field of an entry, as JSON names it: resource.labels.job_id."""
    found: Any = json_format.MessageToDict(LogEntry.pb(entry))
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found
