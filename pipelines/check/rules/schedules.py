"""Rules about schedules."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from shardline.pipelines.check.registry import error, warning
from shardline.pipelines.check.schedule import Cron, Schedule, parse, split_zone

_CRON = "write five fields (minute hour day month weekday) with a time zone: TZ=Europe/Vienna 0 6 * * 1"
_LONGEST_NAME = 128


@error("SL901", Schedule, fix=_CRON)
def cron_is_valid(schedule: Schedule) -> Iterator[str]:
    """A cron expression has five valid fields.

    Source: google.cloud.aiplatform_v1.types.Schedule.cron; en.wikipedia.org/wiki/Cron.
    """
    try:
        parse(split_zone(schedule.cron)[1])
    except ValueError as fault:
        yield f"cron {schedule.cron!r}: {fault}"


@warning("SL902", Schedule, fix="write the zone in front: TZ=Europe/Vienna 0 6 * * 1, or TZ=UTC")
def cron_has_a_zone(schedule: Schedule) -> Iterator[str]:
    """A cron expression says its time zone.

    Source: google.cloud.aiplatform_v1.types.Schedule.cron: prefix "TZ=" or "CRON_TZ=".
    """
    if not split_zone(schedule.cron)[0]:
        yield f"cron {schedule.cron!r} has no time zone"


@error(
    "SL903", Schedule, fix="take a name of the IANA time zone database: Europe/Vienna, America/New_York, UTC"
)
def zone_exists(schedule: Schedule) -> Iterator[str]:
    """A time zone is one of the IANA database.

    Source: google.cloud.aiplatform_v1.types.Schedule.cron: "a valid string from IANA time zone database".
    """
    name = split_zone(schedule.cron)[0]
    if name and _zone(name) is None:
        yield f"there is no time zone {name!r}"


@error("SL904", Schedule, fix="take a day that the month has")
def cron_fires(schedule: Schedule) -> Iterator[str]:
    """A cron expression names a day that there is.

    Source: en.wikipedia.org/wiki/Cron; 30 February never comes.
    """
    cron = _cron(schedule)
    if cron and not cron.has_a_day:
        yield f"cron {schedule.cron!r} names no day of any year"


@warning("SL905", Schedule, fix="take an hour after the change of clocks (4 or later), or TZ=UTC")
def cron_survives_clock_changes(schedule: Schedule) -> Iterator[str]:
    """A schedule's hour comes once on every day.

    When clocks go forward an hour is left out, and a run that falls into it is skipped or moved; when they go
    back an hour comes twice, and so may the run.

    Source: IANA time zone database.
    """
    cron, zone = _cron(schedule), _zone(split_zone(schedule.cron)[0])
    odd = _odd(cron, zone) if cron and zone else None
    if odd:
        words = f"{odd:%H:%M} comes twice" if _exists(odd) else f"there is no {odd:%H:%M}"
        yield f"cron {schedule.cron!r}: {words} on {odd:%Y-%m-%d}"


@warning("SL906", Schedule, fix="set max_concurrent_active_run_count to 1, unless runs may overlap")
def runs_do_not_overlap(schedule: Schedule) -> Iterator[str]:
    """One run ends before the next one begins.

    Source: google.cloud.aiplatform_v1.types.Schedule: max_concurrent_run_count limits "starting the scheduled
    requests and not the execution"; max_concurrent_active_run_count limits the runs.
    """
    active = schedule.max_concurrent_active_run_count
    if active is None:
        yield "max_concurrent_active_run_count is not set: max_concurrent_run_count limits starts only"
    elif active > 1:
        yield f"max_concurrent_active_run_count is {active}"


@error("SL907", Schedule, fix="give whole numbers of 1 or more")
def counts_are_positive(schedule: Schedule) -> Iterator[str]:
    """A schedule's counts are 1 or more.

    Source: google.cloud.aiplatform_v1.types.Schedule: max_concurrent_run_count is required.
    """
    for name in ("max_concurrent_run_count", "max_concurrent_active_run_count", "max_run_count"):
        count = getattr(schedule, name)
        if count is not None and count < 1:
            yield f"{name} is {count}"


@error("SL908", Schedule, fix="shorten the name to 128 characters")
def schedule_name_fits(schedule: Schedule) -> Iterator[str]:
    """A schedule's name has at most 128 characters.

    Source: google.cloud.aiplatform_v1.types.Schedule.display_name.
    """
    if len(schedule.display_name) > _LONGEST_NAME:
        yield f"display_name has {len(schedule.display_name)} characters"


def _cron(schedule: Schedule) -> Cron | None:
    try:
        return parse(split_zone(schedule.cron)[1])
    except ValueError:
        return None


def _zone(name: str) -> ZoneInfo | None:
    try:
        return ZoneInfo(name) if name else None
    except (ZoneInfoNotFoundError, ValueError, OSError):
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


def _exists(local: datetime.datetime) -> bool:
    back = local.astimezone(datetime.UTC).astimezone(local.tzinfo)
    return back.replace(tzinfo=None) == local.replace(tzinfo=None)
