"""What the commands of `shardline schedule` show."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Iterator
from typing import Any

from shardline.pipelines.remote.schedules.plan import Action, Plan
from shardline.pipelines.remote.schedules.steps import Existing, next_times, zone_of

_NEXT = 5
_DONE = {
    Action.NOTHING: "nothing to do",
    Action.CREATE: "created",
    Action.UPDATE: "changed in place",
    Action.REPLACE: "replaced",
    Action.RETIRE: "cleaned up",
}


def plan_lines(plan: Plan, now: datetime.datetime) -> Iterator[str]:
    """Yields what a plan says, for a person."""
    yield f"{plan.declared.display_name}: {plan.action}"
    for difference in plan.differences:
        yield f"  {difference.what}: {difference.before} -> {difference.after}"
    if len(plan.existing) > 1:
        names = ", ".join(f"{short_name(item)} ({item.state.lower()})" for item in plan.existing)
        yield f"  {len(plan.existing)} schedules have this name: {names}"
    for step in plan.steps:
        if step.call == "DeleteSchedule":
            yield f"  deletes {step.request['name'].rpartition('/')[2]}"
    times = fire_times(plan, now)
    if not times:
        yield "  never fires again: its end has passed"
    elif plan.paused:
        yield "  is paused; would fire"
    else:
        yield "  fires"
    for moment in times:
        yield f"    {moment_text(moment)}"


def plan_content(plan: Plan, now: datetime.datetime) -> dict[str, Any]:
    """Returns a plan for a program."""
    return {
        "name": plan.declared.display_name,
        "action": plan.action.name.lower(),
        "differences": [dataclasses.asdict(difference) for difference in plan.differences],
        "existing": [{"name": item.name, "state": item.state} for item in plan.existing],
        "calls": [step.call for step in plan.steps],
        "paused": plan.paused,
        "fires": [moment.isoformat() for moment in fire_times(plan, now)],
    }


def summary(plans: Iterable[Plan]) -> str:
    """Returns how many schedules something happens to, in one line."""
    actions = [plan.action for plan in plans]
    counts = [f"{actions.count(action)} to {action}" for action in Action if action in actions]
    return ", ".join(counts).replace("to nothing to do", "with nothing to do")


def done_line(plan: Plan, now: datetime.datetime) -> str:
    """Returns what has been done about a schedule, and when it fires next."""
    following = fire_times(plan, now)
    then = f"; fires next {moment_text(following[0])}" if following else ""
    return f"{plan.declared.display_name}: {_DONE[plan.action]}{'; is paused' if plan.paused else then}"


def existing_content(item: Existing) -> dict[str, Any]:
    """Returns a schedule of the platform for a program, without its request."""
    content = {key: value for key, value in vars(item).items() if key != "request"}
    return {
        key: value.isoformat() if isinstance(value, datetime.datetime) else value
        for key, value in content.items()
    }


def existing_row(item: Existing) -> tuple[str, ...]:
    """Returns a schedule of the platform as a row: name, id, state, cron, next run, runs."""
    following = ""
    if item.next_run_time is not None and item.state == "ACTIVE":
        following = moment_text(item.next_run_time.astimezone(_zone(item)))
    runs = f"{item.started_run_count}{f' of {item.max_run_count}' if item.max_run_count else ''}"
    return item.display_name, short_name(item), item.state.lower(), item.cron, following, runs


def fire_times(plan: Plan, now: datetime.datetime) -> list[datetime.datetime]:
    """Returns the next times at which the declared schedule fires, in its own zone."""
    declared = plan.declared
    # One that fires at its very start fires then.
    start = declared.start_time - datetime.timedelta(seconds=1) if declared.start_time else now
    return next_times(declared.cron, max(now, start), _NEXT, until=declared.end_time)


def moment_text(moment: datetime.datetime) -> str:
    """Returns a time as a person reads it: in its zone, and in UTC."""
    utc = moment.astimezone(datetime.UTC)
    return f"{moment:%a %Y-%m-%d %H:%M %Z} ({utc:%H:%M} UTC)"


def short_name(item: Existing) -> str:
    """Returns the last part of a resource name."""
    return item.name.rpartition("/")[2]


def _zone(item: Existing) -> datetime.tzinfo:
    try:
        return zone_of(item.cron)
    except (ValueError, KeyError):
        return datetime.UTC
