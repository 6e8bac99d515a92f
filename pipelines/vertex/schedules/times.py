"""When a schedule fires."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from itertools import islice, product
from zoneinfo import ZoneInfo

from shardline.pipelines.check.cron import Cron, parse, split_zone

#: A cron expression that names a day fires within so many days: 29 February, over a century that has none.
_LONGEST_PAUSE_DAYS = 9 * 366


def fire_times(
    expression: str,
    after: datetime.datetime,
    *,
    until: datetime.datetime | None = None,
) -> Iterator[datetime.datetime]:
    """Yields the times at which a schedule fires, in the schedule's own zone.

    These are the moments at which a clock in that zone shows a time that the expression names. One that the
    clock leaves out, when it goes forward, is not among them; one that it shows twice, when it goes back, is
    there twice. The platform does not say what it does on these two days, and rule SL905 warns of them.

    Args:
        expression: A valid cron expression, with a zone in front or in UTC.
        after: The times begin after this one.
        until: And end with this one; None for never.
    """
    zone = zone_of(expression)
    cron = parse(split_zone(expression)[1])
    today = after.astimezone(zone).date()
    silent = 0
    while silent <= _LONGEST_PAUSE_DAYS:
        silent += 1
        for moment in _of_day(cron, today, zone):
            if until is not None and moment > until:
                return
            if moment > after:
                silent = 0
                yield moment.astimezone(zone)
        today += datetime.timedelta(days=1)


def next_times(
    expression: str,
    after: datetime.datetime,
    count: int = 5,
    *,
    until: datetime.datetime | None = None,
) -> list[datetime.datetime]:
    """Returns the next times at which a schedule fires, as `fire_times` yields them."""
    return list(islice(fire_times(expression, after, until=until), count))


def zone_of(expression: str) -> ZoneInfo:
    """Returns the time zone of a cron expression, UTC where it names none."""
    return ZoneInfo(split_zone(expression)[0] or "UTC")


def _of_day(cron: Cron, date: datetime.date, zone: ZoneInfo) -> list[datetime.datetime]:
    """Returns the moments of one day, in UTC: times of one zone are compared without their offsets."""
    if not cron.matches(date):
        return []
    moments = set()
    for hour, minute, fold in product(cron.hours, cron.minutes, (0, 1)):
        local = datetime.datetime.combine(date, datetime.time(hour, minute, fold=fold), zone)
        moment = local.astimezone(datetime.UTC)
        if moment.astimezone(zone).replace(tzinfo=None) == local.replace(tzinfo=None):
            moments.add(moment)
    return sorted(moments)
