"""Schedules of the Vertex AI API, their cron expressions, and the rules about them.

A cron expression has five fields with a time zone in front.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from zoneinfo import ZoneInfo

from shardline.pipelines.check.registry import Found, rules
from shardline.trainer.base.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One schedule, [schedules.NAME]; the fields are those of the Vertex AI API.

    Its display name is NAME, by which it is found on the platform, and its cron expression begins with a time
    zone: "TZ=Europe/Vienna 0 6 * * 1". `params` is a file of parameters, which `parameters` override.
    settings/schedules.toml.example explains the fields; a count of None is no limit, and `paused` None leaves
    it as it is on the platform.
    """

    cron: str
    display_name: str
    pipeline: str
    params: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    max_concurrent_active_run_count: int | None = 1
    max_run_count: int | None = None
    paused: bool | None = None

    where = "schedule"  # its name in a finding

    def __post_init__(self) -> None:
        name = self.display_name
        if not name.strip() or '"' in name or not name.isprintable():
            raise SettingsError(f"the name must be a text without quotes and line breaks, got {name!r}")


#: Name, smallest value, largest value, and named values of each field.
_FIELDS: tuple[tuple[str, int, int, dict[str, int]], ...] = (
    ("minute", 0, 59, {}),
    ("hour", 0, 23, {}),
    ("day of month", 1, 31, {}),
    ("month", 1, 12, {name.lower(): number for number, name in enumerate(calendar.month_abbr) if name}),
    ("weekday", 0, 7, {name.lower(): (number + 1) % 7 for number, name in enumerate(calendar.day_abbr)}),
)
_PART = re.compile(r"(\*|\?|\w+)(?:-(\w+))?(?:/(\d+))?")


def split_zone(expression: str) -> tuple[str, str]:
    """Splits "TZ=ZONE FIELDS" (or CRON_TZ=) into zone and fields; the zone is "" without one."""
    match = re.match(r"(?s)(?:CRON_)?TZ=(\S*)\s*(.*)", expression.strip())
    return (match[1], match[2]) if match else ("", expression)


def parse(fields: str) -> list[set[int]]:
    """Returns the values of the five fields of a cron expression; ValueError names the invalid field."""
    parts = fields.split()
    if len(parts) != len(_FIELDS):
        raise ValueError(f"it has {len(parts)} fields, not {len(_FIELDS)}")
    return [_values(part, *field) for part, field in zip(parts, _FIELDS, strict=True)]


def _values(text: str, name: str, low: int, high: int, names: dict[str, int]) -> set[int]:
    def number(word: str) -> int:
        found = names.get(word.lower(), int(word) if word.isdecimal() else -1)
        if not low <= found <= high:
            raise ValueError(f"{word!r} is not a valid {name} ({low} to {high})")
        return found

    values: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None or (match[1] == "?" and name not in ("day of month", "weekday")):
            raise ValueError(f"{part!r} is not a valid {name}")
        first, last = low, high
        if match[1] not in ("*", "?"):
            first = number(match[1])
            # "5/15" means every 15th from 5.
            last = number(match[2]) if match[2] else high if match[3] else first
        if first > last or match[3] == "0":
            raise ValueError(f"{part!r} is not a valid {name}: it ends before it begins, or its step is 0")
        values.update(range(first, last + 1, int(match[3] or 1)))
    return values


@rules(Schedule)
def times(schedule: Schedule) -> Found:
    """Times at which a schedule fires.

    SL901 error: A cron expression has five valid fields, and names a day that exists.
        Fix: write minute, hour, day, month and weekday with a time zone: TZ=Europe/Vienna 0 6 * * 1
        Source: Schedule.cron.
    SL902 error: A cron expression has a time zone of the IANA database.
        Fix: put the zone in front, an IANA name: TZ=Europe/Vienna 0 6 * * 1
        Source: Schedule.cron.
    SL909 warning: A schedule fires at most once an hour.
        Fix: name one minute, and the hours that you mean: TZ=Europe/Vienna 0 6 * * 1
        Source: vertex-ai/pricing: each run costs a fee.
    """
    name, fields = split_zone(schedule.cron)
    try:
        minutes, _, days, months, _ = parse(fields)
    except ValueError as fault:
        yield "SL901", f"cron {schedule.cron!r}: {fault}"
    else:
        if len(minutes) > 1:
            yield "SL909", f"cron {schedule.cron!r} fires {len(minutes)} times an hour"
        is_any_weekday = fields.split()[4][0] in "*?"
        if is_any_weekday and min(days) > max(calendar.monthrange(2028, month)[1] for month in months):
            yield "SL901", f"cron {schedule.cron!r} names a day that does not exist"
    if not name:
        yield "SL902", f"cron {schedule.cron!r} has no time zone"
    elif zone_of(name) is None:
        yield "SL902", f"there is no time zone {name!r}"


@rules(Schedule)
def counts(schedule: Schedule) -> Found:
    """Counts of a schedule.

    SL906 warning: Runs of a schedule do not overlap.
        Fix: set max_concurrent_active_run_count to 1, unless runs may overlap
        Source: Schedule.
    SL911 error: A schedule's name and counts are within the API's limits.
        Fix: use at most 128 characters for the name, and counts of 1 or more
        Source: Schedule.
    """
    if len(schedule.display_name) > 128:
        yield "SL911", f"the name has {len(schedule.display_name)} characters"
    for name in ("max_concurrent_active_run_count", "max_run_count"):
        if (count := getattr(schedule, name)) is not None and count < 1:
            yield "SL911", f"{name} is {count}"
    active = schedule.max_concurrent_active_run_count
    if active != 1:
        yield "SL906", f"max_concurrent_active_run_count is {'not set' if active is None else active}"


def zone_of(name: str) -> ZoneInfo | None:
    """Returns a time zone; None if this machine knows none of this name."""
    try:
        return ZoneInfo(name) if name else None
    except (KeyError, ValueError, OSError):
        return None
