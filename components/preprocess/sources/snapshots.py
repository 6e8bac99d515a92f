"""Snapshots: what of BigQuery a source string names, and as of which moment; loads no client.

The moment is in the string, TABLE@TIME, or where a query has {snapshot}: whoever makes a dataset fills it in
first (`pinned`), so that the manifest names it, and the same source gives the same rows again.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import NamedTuple

from shardline.trainer.errors import SourceError

PREFIX = "bigquery:"
#: Where a query has its moment.
SNAPSHOT = "{snapshot}"

_NAME = r"(?:[\w-]|\{date[^{}]*\})+"
_TABLE = re.compile(
    rf"((?:[\w.-]+:)?{_NAME}\.{_NAME}\.{_NAME})(?:@(\S+))?(?:\s+WHERE\s+(\S.*))?", re.IGNORECASE | re.DOTALL
)
_QUERY = re.compile(r"\s*(SELECT|WITH)\b", re.IGNORECASE)
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
_SHOWN = 80


class Reference(NamedTuple):
    """What stands behind "bigquery:": a table with its moment and row filter, or a query; "" for none."""

    table: str = ""
    snapshot: str = ""
    row_filter: str = ""
    query: str = ""

    @property
    def name(self) -> str:
        """The table, or the beginning of the query, for messages."""
        text = self.table or " ".join(self.query.split())
        return PREFIX + (text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")

    @property
    def moment(self) -> datetime | None:
        """The time as of which a table is read, or the first that a query names as it was filled in."""
        moments = [self.snapshot] if self.snapshot else _MOMENT.findall(self.query)
        return min(map(_time, moments), default=None)


def parse(source: str) -> Reference:
    """Returns what a source "bigquery:..." names; SourceError if it names nothing that can be read."""
    rest = source.removeprefix(PREFIX).strip()
    if _QUERY.match(rest):
        return Reference(query=rest)
    match = _TABLE.fullmatch(rest)
    if not match:
        raise SourceError(
            f"source {source!r} is neither bigquery:PROJECT.DATASET.TABLE[@TIME] [WHERE FILTER] nor "
            "bigquery:SELECT ...; wildcards and partitions ($) need a query"
        )
    table, snapshot, row_filter = (text or "" for text in match.groups())
    if snapshot and "{" not in snapshot:
        _time(snapshot)
    return Reference(table, snapshot, row_filter)


def pinned(source: str, time: datetime | None = None, earlier: str = "") -> str:
    """Returns a source as of one moment: a source of BigQuery that names none gets this time, now by default.

    Where `earlier` is the same source as of any moment, it is returned: an interrupted run keeps its own.
    """
    if not source.startswith(PREFIX):
        return source
    reference = parse(source)
    if reference.table and not reference.snapshot:
        head, table, tail = source.partition(reference.table)
        source = f"{head}{table}@{SNAPSHOT}{tail}"
    if re.fullmatch(re.escape(source).replace(re.escape(SNAPSHOT), r"[\dTZ:.+-]+"), earlier):
        return earlier
    moment = (time or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="milliseconds")
    return source.replace(SNAPSHOT, moment.replace("+00:00", "Z"))


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise SourceError(
            f"{text!r} is not a time; write it as in TABLE@2026-11-20T10:00:00Z, or leave it out for now"
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)
