"""Schedules as they are shown: what has to be done about each, when it fires, and those on the platform."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardline.pipelines.remote.schedules.declared import Declared
    from shardline.pipelines.remote.schedules.plan import Plan
    from shardline.pipelines.remote.schedules.steps import Existing

#: The number of next times that a plan shows.
_NEXT = 5


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A schedule as the file declares it, the request of its runs, and whether its pipeline has run here."""

    declared: Declared
    request: dict[str, Any]
    proof: str


def name_of(plan: Plan) -> str:
    """Returns the name of the schedule that a plan is for."""
    return plan.declared.display_name


def plan_lines(plan: Plan, wanted: Wanted, now: datetime.datetime) -> Iterator[str]:
    """Yields what a plan says, for a person."""
    yield f"{name_of(plan)}: {plan.action}"
    for difference in plan.differences:
        yield f"  {difference.what}: {difference.before} -> {difference.after}"
    if len(plan.existing) > 1:
        names = ", ".join(f"{_id(item.name)} ({item.state.lower()})" for item in plan.existing)
        yield f"  {len(plan.existing)} schedules have this name: {names}"
    for step in plan.steps:
        if step.call == "DeleteSchedule":
            yield f"  deletes {_id(step.request['name'])}"
    yield from declared_lines(wanted, now, paused=plan.paused)


def declared_lines(wanted: Wanted, now: datetime.datetime, *, paused: bool | None = None) -> Iterator[str]:
    """Yields what is known of a schedule without the platform: its proof, and when it fires.

    `paused` is None where the platform has not been asked, and the schedule's name is then said first.
    """
    if paused is None:
        yield f"{wanted.declared.display_name}: the file is right"
    yield f"  proof: {wanted.proof}"
    times = _fire_times(wanted.declared, now)
    if not times:
        yield "  never fires again: its end has passed"
    else:
        yield "  is paused; would fire" if paused else "  fires"
    for moment in times:
        yield f"    {_moment_text(moment)}"


def plan_content(plan: Plan, wanted: Wanted, now: datetime.datetime) -> dict[str, Any]:
    """Returns a plan for a program."""
    return {
        "name": name_of(plan),
        "action": plan.action.name.lower(),
        "differences": [dataclasses.asdict(difference) for difference in plan.differences],
        "existing": [{"name": item.name, "state": item.state} for item in plan.existing],
        "calls": [step.call for step in plan.steps],
        "paused": plan.paused,
        "proof": wanted.proof,
        "fires": [moment.isoformat() for moment in _fire_times(plan.declared, now)],
    }


def summary(plans: Iterable[Plan]) -> str:
    """Returns the number of schedules for each action, in one line."""
    from shardline.pipelines.remote.schedules.plan import Action

    actions = [plan.action for plan in plans]
    counts = [f"{actions.count(action)} to {action}" for action in Action if action in actions]
    return ", ".join(counts).replace("to nothing to do", "with nothing to do")


def done_line(plan: Plan, now: datetime.datetime) -> str:
    """Returns what has been done about a schedule, and when it fires next."""
    following = _fire_times(plan.declared, now)
    then = f"; fires next {_moment_text(following[0])}" if following else ""
    return f"{plan.declared.display_name}: {plan.action.done}{'; is paused' if plan.paused else then}"


def existing_content(item: Existing) -> dict[str, Any]:
    """Returns a schedule of the platform for a program, without its request."""
    return {
        key: value.isoformat() if isinstance(value, datetime.datetime) else value
        for key, value in vars(item).items()
        if key != "request"
    }


def existing_row(item: Existing) -> tuple[str, ...]:
    """Returns a schedule of the platform as a row: name, id, state, cron, next run, runs."""
    from shardline.pipelines.remote.schedules.steps import zone_of

    following = ""
    if item.next_run_time is not None and item.state == "ACTIVE":
        try:
            zone: datetime.tzinfo = zone_of(item.cron)
        except (ValueError, KeyError):  # the platform may know more zones than this machine
            zone = datetime.UTC
        following = _moment_text(item.next_run_time.astimezone(zone))
    count = f"{item.started_run_count}{f' of {item.max_run_count}' if item.max_run_count else ''}"
    return item.display_name, _id(item.name), item.state.lower(), item.cron, following, count


def _fire_times(declared: Declared, now: datetime.datetime) -> list[datetime.datetime]:
    """Returns the next times at which the declared schedule fires, in its own zone."""
    from shardline.pipelines.remote.schedules.steps import next_times

    # One that fires at its very start fires then.
    start = declared.start_time - datetime.timedelta(seconds=1) if declared.start_time else now
    return next_times(declared.cron, max(now, start), _NEXT, until=declared.end_time)


def _moment_text(moment: datetime.datetime) -> str:
    """Returns a time as a person reads it: in its zone, and in UTC."""
    return f"{moment:%a %Y-%m-%d %H:%M %Z} ({moment.astimezone(datetime.UTC):%H:%M} UTC)"


def _id(name: str) -> str:
    return name.rpartition("/")[2]
