"""The calls that bring a schedule to what is declared, in an order in which being broken off does no harm.

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
from typing import Any

from shardline.pipelines.vertex.schedules.existing import COMPLETED, PAUSED, Existing
from shardline.pipelines.vertex.schedules.times import next_times

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
    """One call.

    Attributes:
        call: Method of ScheduleService; or WAIT.
        request: Its request in the API's JSON form; of a WAIT, until when.
    """

    call: str
    request: Mapping[str, Any]


def create_steps(
    wanted: Mapping[str, Any], rivals: Sequence[Existing], *, paused: bool, now: datetime.datetime
) -> Iterator[Step]:
    """Yields the steps that make a schedule and retire those that it replaces.

    Args:
        wanted: The Schedule in the API's JSON form.
        rivals: Those that it replaces.
        paused: Whether it is to be paused.
        now: Time.
    """
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

    Args:
        name: Its resource name.
        wanted: The Schedule that is declared, in the API's JSON form.
        fields: Keys of it that change.
        rivals: Other schedules of its name, which it is going to replace.
        now: Time.
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

    Of schedules that fire every minute this is the calmest moment in sight.

    Args:
        crons: Their cron expressions; one that cannot be read here is left out.
        now: Time.
    """
    times = [moment for cron in crons for moment in _near(cron, now)]
    moment = now
    for near in sorted(times):
        if moment - _SETTLED < near <= moment + _QUIET:
            moment = near + _SETTLED
    return moment


def timestamp(moment: datetime.datetime) -> str:
    """Returns a time as the API writes it."""
    return moment.astimezone(datetime.UTC).isoformat().replace("+00:00", "Z")


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
