"""Schedules as the Vertex AI API has them, the cron expressions that say when they fire, and their rules.

A cron expression has five fields, and a time zone in front. It is read here and not by cronsim, whose errors
("Bad minute") do not say what was found and what is allowed.
"""

from __future__ import annotations

import calendar
import datetime
import re
from dataclasses import dataclass
from zoneinfo import ZoneInfo

from shardline.components.vertex.forms import LONGEST_NAME
from shardline.pipelines.check.registry import Found, rules


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


#: Rule that a file of schedules enforces.
NO_ZONE = "SL902"


@rules(Schedule)
def times(schedule: Schedule) -> Found:
    """Times at which a schedule fires.

    When clocks go forward an hour is left out, and a run that falls into it is skipped or moved; when they go
    back an hour comes twice, and so may the run.

    SL901 error: A cron expression has five valid fields.
        Fix: write five fields (minute hour day month weekday) with a time zone: TZ=Europe/Vienna 0 6 * * 1
        Source: google.cloud.aiplatform_v1.types.Schedule.cron; en.wikipedia.org/wiki/Cron.
    SL902 warning: A cron expression says its time zone.
        Fix: write the zone in front: TZ=Europe/Vienna 0 6 * * 1, or TZ=UTC
        Source: google.cloud.aiplatform_v1.types.Schedule.cron: prefix "TZ=" or "CRON_TZ=".
    SL903 error: A time zone is one of the IANA database.
        Fix: take a name of the IANA time zone database: Europe/Vienna, America/New_York, UTC
        Source: google.cloud.aiplatform_v1.types.Schedule.cron: "a valid string from IANA time zone database".
    SL904 error: A cron expression names a day that there is.
        Fix: take a day that the month has
        Source: en.wikipedia.org/wiki/Cron; 30 February never comes.
    SL905 warning: A schedule's hour comes once on every day.
        Fix: take an hour after the change of clocks (4 or later), or TZ=UTC
        Source: IANA time zone database.
    SL909 warning: A schedule fires once an hour at most.
        Fix: name one minute and the hours that you mean: TZ=Europe/Vienna 0 6 * * 1
        Source: cloud.google.com/vertex-ai/pricing: each run costs a fee, and a machine for each step.
    """
    name, fields = split_zone(schedule.cron)
    cron, zone = None, zone_of(name)
    try:
        cron = parse(fields)
    except ValueError as fault:
        yield "SL901", f"cron {schedule.cron!r}: {fault}"
    if not name:
        yield NO_ZONE, f"cron {schedule.cron!r} has no time zone"
    elif zone is None:
        yield "SL903", f"there is no time zone {name!r}"
    if cron and len(cron.minutes) > 1:
        yield "SL909", f"cron {schedule.cron!r} fires {len(cron.minutes)} times an hour"
    if cron and not cron.has_a_day:
        yield "SL904", f"cron {schedule.cron!r} names no day of any year"
    odd = _odd(cron, zone) if cron and zone else None
    if odd:
        back = odd.astimezone(datetime.UTC).astimezone(odd.tzinfo)
        is_shown = back.replace(tzinfo=None) == odd.replace(tzinfo=None)
        words = f"{odd:%H:%M} comes twice" if is_shown else f"there is no {odd:%H:%M}"
        yield "SL905", f"cron {schedule.cron!r}: {words} on {odd:%Y-%m-%d}"


@rules(Schedule)
def counts(schedule: Schedule) -> Found:
    """Counts and name of a schedule.

    SL906 warning: One run ends before the next one begins.
        Fix: set max_concurrent_active_run_count to 1, unless runs may overlap
        Source: google.cloud.aiplatform_v1.types.Schedule: max_concurrent_run_count limits "starting the
            scheduled requests and not the execution"; max_concurrent_active_run_count limits the runs.
    SL907 error: A schedule's counts are 1 or more.
        Fix: give whole numbers of 1 or more
        Source: google.cloud.aiplatform_v1.types.Schedule: max_concurrent_run_count is required.
    SL908 error: A schedule's name has at most 128 characters.
        Fix: shorten the name to 128 characters
        Source: google.cloud.aiplatform_v1.types.Schedule.display_name.
    """
    active = schedule.max_concurrent_active_run_count
    if active is None:
        yield (
            "SL906",
            "max_concurrent_active_run_count is not set: max_concurrent_run_count limits starts only",
        )
    elif active > 1:
        yield "SL906", f"max_concurrent_active_run_count is {active}"
    for name in ("max_concurrent_run_count", "max_concurrent_active_run_count", "max_run_count"):
        count = getattr(schedule, name)
        if count is not None and count < 1:
            yield "SL907", f"{name} is {count}"
    if len(schedule.display_name) > LONGEST_NAME:
        yield "SL908", f"display_name has {len(schedule.display_name)} characters"


def zone_of(name: str) -> ZoneInfo | None:
    """Returns a time zone; None where there is none of this name, on this machine."""
    try:
        return ZoneInfo(name) if name else None
    except (KeyError, ValueError, OSError):
        return None


def _odd(cron: Cron, zone: ZoneInfo) -> datetime.datetime | None:
    """Returns the first time of the next year that is named and that the clock does not show just once."""
    if len(cron.hours) == 24:
        return None
    today = datetime.datetime.now(zone).date()
    for days in range(366):
        date = today + datetime.timedelta(days=days)
        if not cron.matches(date):
            continue
        for hour in sorted(cron.hours):
            local = datetime.datetime.combine(date, datetime.time(hour, min(cron.minutes)), zone)
            if local.utcoffset() != local.replace(fold=1).utcoffset():
                return local
    return None
