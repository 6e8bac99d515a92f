"""Schedules as the Vertex AI API has them, and the cron expressions that say when they fire.

A cron expression has five fields, and a time zone in front. It is read here and not by cronsim, whose errors
("Bad minute") do not say what was found and what is allowed.
"""

from __future__ import annotations

import calendar
import datetime
import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule, with the names of the Vertex AI API; settings/schedules.toml.example explains the fields.

    None stands for no limit, at once, or never; the cron expression is as in "TZ=Europe/Vienna 0 6 * * 1".
    """

    cron: str
    max_concurrent_run_count: int = 1
    max_concurrent_active_run_count: int | None = None
    allow_queueing: bool = False
    max_run_count: int | None = None
    start_time: datetime.datetime | None = None
    end_time: datetime.datetime | None = None
    display_name: str = ""

    @property
    def where(self) -> str:
        """What the schedule is called in a finding."""
        return "schedule"


_MONTHS = {name.lower(): number for number, name in enumerate(calendar.month_abbr) if name}
_WEEKDAYS = {name: number for number, name in enumerate(("sun", "mon", "tue", "wed", "thu", "fri", "sat"))}
#: Name, smallest and largest value, and names for values, of each field.
_FIELDS: tuple[tuple[str, int, int, dict[str, int]], ...] = (
    ("minute", 0, 59, {}),
    ("hour", 0, 23, {}),
    ("day of month", 1, 31, {}),
    ("month", 1, 12, _MONTHS),
    ("weekday", 0, 7, _WEEKDAYS),
)
_ZONE = re.compile(r"(?:CRON_)?TZ=(\S*)\s*(.*)", re.DOTALL)
_PART = re.compile(r"(\*|\?|\w+)(?:-(\w+))?(?:/(\d+))?")
_SHORTHANDS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


@dataclass(frozen=True)
class Cron:
    """The times that a cron expression names; weekday 0 is Sunday.

    Attributes:
        any_day: Whether the day of the month is left open.
        any_weekday: Whether the weekday is left open.
    """

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    any_day: bool
    any_weekday: bool

    @property
    def has_a_day(self) -> bool:
        """Whether there is a day in some year on which it fires."""
        if not self.any_weekday:
            return True
        return any(day <= calendar.monthrange(2028, month)[1] for month in self.months for day in self.days)

    def matches(self, date: datetime.date) -> bool:
        """Whether it fires on a date; where day and weekday are both given, either will do."""
        day = date.day in self.days
        weekday = date.isoweekday() % 7 in self.weekdays
        if date.month not in self.months:
            return False
        return day and weekday if self.any_day or self.any_weekday else day or weekday


def split_zone(expression: str) -> tuple[str, str]:
    """Splits "TZ=ZONE FIELDS" (or CRON_TZ=) into zone and fields; the zone is "" where there is none."""
    match = _ZONE.match(expression.strip())
    return (match[1], match[2]) if match else ("", expression)


def parse(fields: str) -> Cron:
    """Reads the five fields of a cron expression; a ValueError says which field is wrong."""
    parts = _SHORTHANDS.get(fields.strip(), fields).split()
    if len(parts) != len(_FIELDS):
        raise ValueError(f"it has {len(parts)} fields, not {len(_FIELDS)}")
    minutes, hours, days, months, weekdays = (
        _values(part, *field) for part, field in zip(parts, _FIELDS, strict=True)
    )
    return Cron(
        minutes,
        hours,
        days,
        months,
        frozenset(day % 7 for day in weekdays),
        any_day=parts[2][0] in "*?",
        any_weekday=parts[4][0] in "*?",
    )


def _values(text: str, name: str, low: int, high: int, names: dict[str, int]) -> frozenset[int]:
    found: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None or (match[1] == "?" and name not in ("day of month", "weekday")):
            raise ValueError(f"{part!r} is no {name}")
        if match[1] in ("*", "?"):
            first, last = low, high
        else:
            first = _number(match[1], name, low, high, names)
            # "5/15" means from 5 on.
            last = _number(match[2], name, low, high, names) if match[2] else high if match[3] else first
        step = int(match[3] or 1)
        if first > last:
            raise ValueError(f"{part!r} is no {name}: it ends before it begins")
        if step < 1:
            raise ValueError(f"{part!r} is no {name}: the step is 0")
        found.update(range(first, last + 1, step))
    return frozenset(found)


def _number(text: str, name: str, low: int, high: int, names: dict[str, int]) -> int:
    number = names.get(text.lower(), int(text) if text.isdecimal() else -1)
    if not low <= number <= high:
        raise ValueError(f"{text!r} is no {name} ({low} to {high})")
    return number
