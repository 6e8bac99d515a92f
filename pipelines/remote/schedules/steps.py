"""Steps that bring a schedule to what is declared, in an order in which being broken off does no harm.

A schedule cannot be created asleep, and no call replaces one by another. So a new one is created with a start
far ahead, looked at, woken by giving it its start, and only then are the others deleted, at a moment at which
none of them is about to fire. Broken off:

    before it is woken      the old one fires as it did, the new one does not
    before the deletion     both fire from their next time on: this one moment, of one call, is the risk
    at any time             the next plan is what was left to do
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any
from zoneinfo import ZoneInfo

from shardline.components.text import timestamp
from shardline.pipelines.check.schedule import Cron, Schedule, parse, split_zone

#: A cron expression that names a day fires within so many days: 29 February, over a century that has none.
_LONGEST_PAUSE_DAYS = 9 * 366


def fire_times(
    expression: str,
    after: datetime.datetime,
    *,
    until: datetime.datetime | None = None,
) -> Iterator[datetime.datetime]:
    """Yields the times after one and up to another at which a schedule fires, in the schedule's own zone.

    These are the moments at which a clock in that zone shows a time that the expression names. One that the
    clock leaves out, when it goes forward, is not among them; one that it shows twice, when it goes back, is
    there twice. The platform does not say what it does on these two days, and rule SL905 warns of them.
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


ACTIVE = "ACTIVE"
PAUSED = "PAUSED"
COMPLETED = "COMPLETED"


@dataclass(frozen=True, kw_only=True)
class Existing(Schedule):
    """One schedule on the platform: ACTIVE, PAUSED or COMPLETED; `next_run_time` is None for never.

    Attributes:
        name: Resource name.
        request: CreatePipelineJobRequest of each run, in the API's JSON form.
    """

    name: str
    state: str
    started_run_count: int
    create_time: datetime.datetime | None
    next_run_time: datetime.datetime | None
    request: Mapping[str, Any]

    def fires(self, now: datetime.datetime) -> bool:
        """Whether it starts runs already."""
        return self.state == ACTIVE and (self.start_time is None or self.start_time <= now)


def read_existing(content: Mapping[str, Any]) -> Existing:
    """Reads a Schedule in the API's JSON form."""
    return Existing(
        name=content["name"],
        display_name=content.get("displayName", ""),
        state=content.get("state", ""),
        cron=content.get("cron", ""),
        max_concurrent_run_count=int(content.get("maxConcurrentRunCount", 0)),
        max_concurrent_active_run_count=_count(content, "maxConcurrentActiveRunCount"),
        allow_queueing=content.get("allowQueueing", False),
        max_run_count=_count(content, "maxRunCount"),
        started_run_count=int(content.get("startedRunCount", 0)),
        start_time=_time(content, "startTime"),
        end_time=_time(content, "endTime"),
        create_time=_time(content, "createTime"),
        next_run_time=_time(content, "nextRunTime"),
        request=content["createPipelineJobRequest"],
    )


def _count(content: Mapping[str, Any], key: str) -> int | None:
    # JSON has 64-bit numbers as text, and 0 is what is not set.
    return int(content.get(key, 0)) or None


def _time(content: Mapping[str, Any], key: str) -> datetime.datetime | None:
    text = content.get(key)
    return datetime.datetime.fromisoformat(text) if text else None


#: Stands for the name of the schedule that an earlier step creates.
NEW = "(the new schedule)"
#: Is no call: the time until which to wait.
WAIT = "Wait"

_ASLEEP = datetime.timedelta(days=365)
#: How long the hand-over may take, and how long after its time a schedule may still be starting a run.
_QUIET = datetime.timedelta(seconds=30)
_SETTLED = datetime.timedelta(seconds=10)
#: How far ahead a schedule's start is when it is woken: shorter than _QUIET, longer than clocks differ.
_WAKING = datetime.timedelta(seconds=15)


@dataclass(frozen=True)
class Step:
    """One call: a method of ScheduleService and its request in the API's JSON form; or WAIT until when."""

    call: str
    request: Mapping[str, Any]


def create_steps(
    wanted: Mapping[str, Any], rivals: Sequence[Existing], *, paused: bool, now: datetime.datetime
) -> Iterator[Step]:
    """Yields the steps that make a schedule, in the API's JSON form, and delete those that it replaces."""
    parent = wanted["createPipelineJobRequest"]["parent"]
    replaces = any(item.state != COMPLETED for item in rivals)
    if not replaces and not paused:
        yield Step("CreateSchedule", {"parent": parent, "schedule": wanted})
        yield Step("GetSchedule", {"name": NEW})
    else:
        asleep = {**wanted, "startTime": _asleep(wanted, now)}
        yield Step("CreateSchedule", {"parent": parent, "schedule": asleep})
        if paused:
            yield Step("PauseSchedule", {"name": NEW})
        yield Step("GetSchedule", {"name": NEW})
        yield from update_steps(NEW, wanted, ["startTime"], rivals, now=now)
    yield from delete_steps(rivals, now)


def update_steps(
    name: str,
    wanted: Mapping[str, Any],
    fields: Sequence[str],
    rivals: Sequence[Existing],
    *,
    now: datetime.datetime,
) -> Iterator[Step]:
    """Yields the steps that change a schedule in place; one that is woken by it waits for a quiet moment.

    `fields` are the keys of the wanted Schedule that change, `rivals` those that it is going to replace.
    """
    content = {key: wanted[key] for key in fields if key in wanted}
    if "startTime" in fields and "startTime" not in wanted:
        moment = now
        if any(item.fires(now) for item in rivals):
            moment = quiet_moment([wanted["cron"], *(item.cron for item in rivals)], now)
            if moment > now:
                yield Step(WAIT, {"until": timestamp(moment)})
        content["startTime"] = timestamp(moment + _WAKING)
    yield Step("UpdateSchedule", {"schedule": {"name": name, **content}, "updateMask": ",".join(fields)})


def state_steps(kept: Existing, *, paused: bool) -> Iterator[Step]:
    """Yields the step that pauses or resumes a schedule, where it is in the other state."""
    if paused and kept.state != PAUSED:
        yield Step("PauseSchedule", {"name": kept.name})
    elif not paused and kept.state == PAUSED:
        yield Step("ResumeSchedule", {"name": kept.name, "catchUp": False})


def delete_steps(rivals: Iterable[Existing], now: datetime.datetime) -> Iterator[Step]:
    """Yields the steps that delete schedules, first those that fire. Runs that they have started go on."""
    for item in sorted(rivals, key=lambda item: not item.fires(now)):
        yield Step("DeleteSchedule", {"name": item.name})


def quiet_moment(crons: Iterable[str], now: datetime.datetime) -> datetime.datetime:
    """Returns the first moment, not before `now`, at which no schedule has just fired or is about to fire.

    Of schedules that fire every minute this is the calmest moment in sight. A cron expression that cannot be
    read here is left out.
    """
    times = [moment for cron in crons for moment in _near(cron, now)]
    moment = now
    for near in sorted(times):
        if moment - _SETTLED < near <= moment + _QUIET:
            moment = near + _SETTLED
    return moment


def _near(cron: str, now: datetime.datetime) -> list[datetime.datetime]:
    try:
        return next_times(cron, now - _SETTLED, until=now + 10 * _QUIET)
    except (ValueError, KeyError):  # the platform may understand more than we do
        return []


def _asleep(wanted: Mapping[str, Any], now: datetime.datetime) -> str:
    """Returns a start far ahead, and before the end of a schedule that has one."""
    start = now + _ASLEEP
    if "endTime" in wanted:
        start = min(start, datetime.datetime.fromisoformat(wanted["endTime"]) - datetime.timedelta(seconds=1))
    return timestamp(start)
