"""List requests' `filter` and `order_by`: of https://google.aip.dev/160 and 132 what is used here."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.contract.fake.api import refuse

#: How a field of a resource is read: by its name, as the filter has it.
Reader = Callable[[Any, str], Any]

_PART = re.compile(r"([\w.]+)(=|>=|:)(.+)")


def matching(resources: Iterable[Any], text: str, read: Reader) -> list[Any]:
    """Returns the resources that a filter lets through: comparisons, joined by AND."""
    parts = [part for part in text.split(" AND ") if part]
    refuse(*(f"filter: cannot be read: {part!r}" for part in parts if not _PART.fullmatch(part)))
    wanted = [match.groups() for part in parts if (match := _PART.fullmatch(part))]
    return [item for item in resources if all(_fits(read(item, name), *rest) for name, *rest in wanted)]


def ordered(resources: Sequence[Any], order_by: str, fields: Sequence[str]) -> list[Any]:
    """Returns resources in a request's order, "FIELD desc"; the newest first where it has none."""
    name, _, direction = (order_by or "create_time desc").partition(" ")
    if name not in fields or direction != "desc":
        refuse(f"order_by: cannot order by {order_by!r}")
    return sorted(resources, key=lambda item: getattr(item, name), reverse=True)


def _fits(actual: Any, operation: str, value: str) -> bool:
    # field=("a" OR "b") is one of these values.
    values = re.findall(r'"([^"]*)"', value) or [value]
    if operation == ":":
        return bool(actual)
    if operation == ">=":
        # Resources' times are finer than a datetime, which compares only with its own kind.
        return actual.timestamp() >= datetime.datetime.fromisoformat(values[0]).timestamp()
    return str(actual) in values
