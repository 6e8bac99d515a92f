"""Rules about schedules."""

from __future__ import annotations

import datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from shardline.components.vertex.forms import LONGEST_NAME
from shardline.pipelines.check.registry import Found, rules
from shardline.pipelines.check.schedule import Cron, Schedule, parse, split_zone


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
    cron, zone = None, _zone(name)
    try:
        cron = parse(fields)
    except ValueError as fault:
        yield "SL901", f"cron {schedule.cron!r}: {fault}"
    if not name:
        yield "SL902", f"cron {schedule.cron!r} has no time zone"
    elif zone is None:
        yield "SL903", f"there is no time zone {name!r}"
    if cron and len(cron.minutes) > 1:
        yield "SL909", f"cron {schedule.cron!r} fires {len(cron.minutes)} times an hour"
    if cron and not cron.has_a_day:
        yield "SL904", f"cron {schedule.cron!r} names no day of any year"
    odd = _odd(cron, zone) if cron and zone else None
    if odd:
        words = f"{odd:%H:%M} comes twice" if _exists(odd) else f"there is no {odd:%H:%M}"
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
