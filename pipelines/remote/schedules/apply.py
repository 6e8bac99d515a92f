"""Application of a plan, call by call, and the schedules that are on the platform."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping
from typing import Any

from shardline.components.vertex.client import Platform, ask, ask_all, platform_errors
from shardline.components.vertex.refusals import Kind, kind_of
from shardline.pipelines.remote.schedules.plan import Plan, make_plan, same_request
from shardline.pipelines.remote.schedules.steps import NEW, WAIT, Existing, Step, read_existing
from shardline.trainer import progress
from shardline.trainer.errors import PlatformError

#: Seconds that the platform may take to delete a schedule.
_DELETION_S = 120


def list_schedules(platform: Platform) -> list[Existing]:
    """Returns all schedules of pipelines at a location, those of notebooks left out."""
    request = {"parent": platform.parent, "filter": "create_pipeline_job_request:*"}
    return [_read(item) for item in ask_all("list the schedules", platform.schedules.list_schedules, request)]


def apply_plan(
    platform: Platform,
    plan: Plan,
    request: Mapping[str, Any],
    *,
    now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Makes a schedule what it is declared to be, with `request` (CreatePipelineJobRequest) for its runs.

    Raises:
        PlatformError: When a call fails, or the platform has made something else of the schedule than was
            asked for. Another plan then says what is left to do.
    """
    name = plan.declared.display_name
    created = ""
    for step in plan.steps:
        if step.request.get("name") == NEW:
            step = Step(step.call, {**step.request, "name": created})
        if step.call == WAIT:
            seconds = (datetime.datetime.fromisoformat(step.request["until"]) - now()).total_seconds()
            if seconds > 0:
                progress.say(
                    "schedule", f"{name} is about to fire: waiting {seconds:.0f} s for its run to start"
                )
                sleep(seconds)
            continue
        answer = call(platform, name, step)
        if step.call == "CreateSchedule":
            created = answer.name
        elif step.call == "GetSchedule":
            new = _read(answer)
            if not same_request(request, new.request):
                raise PlatformError(
                    f"the schedule {name} was created as {new.name}, but it is not what was asked for; "
                    "nothing else was changed: look at it in the console, and delete it"
                )
            # From here on as after an interruption: so that way is taken every time, and with the new time.
            rest = make_plan(plan.declared, request, [*plan.existing, new], now())
            apply_plan(platform, rest, request, now=now, sleep=sleep)
            return


def call(platform: Platform, display_name: str, step: Step) -> Any:
    """Makes one call of ScheduleService, and returns its answer; raises PlatformError as `ask` does.

    A deletion is waited for; a schedule that is not there has been deleted, by us or by somebody else.
    """
    from google.cloud.aiplatform_v1.types import schedule_service
    from google.protobuf import json_format

    verb = step.call.removesuffix("Schedule").lower()
    kind = getattr(schedule_service, f"{step.call}Request")
    message = kind(json_format.ParseDict(step.request, kind.pb(kind())))
    doing, method = f"{verb} the schedule {display_name}", getattr(platform.schedules, f"{verb}_schedule")
    try:
        # A second schedule would be made by a second attempt, where the answer to the first one was lost.
        answer = ask(doing, method, message, repeatable=verb != "create")
    except PlatformError as error:
        if verb == "delete" and kind_of(error.__cause__) is Kind.MISSING:
            return None
        raise
    if verb == "delete":
        with platform_errors(doing):
            answer.result(timeout=_DELETION_S)
    return answer


def _read(message: Any) -> Existing:
    from google.protobuf import json_format

    return read_existing(json_format.MessageToDict(type(message).pb(message)))
