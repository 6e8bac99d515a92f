"""Does what a plan says, call by call."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping
from typing import Any

from shardline.components.vertex.client import Platform, ask, ask_all, platform_errors
from shardline.pipelines.remote.schedules.plan import Plan, make_plan, same_request
from shardline.pipelines.remote.schedules.steps import NEW, WAIT, Existing, Step, read_existing
from shardline.trainer import progress
from shardline.trainer.errors import PlatformError

#: Seconds that the platform may take to delete a schedule.
_DELETION_S = 120


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def list_schedules(platform: Platform) -> list[Existing]:
    """Returns all schedules of pipelines at a location, those of notebooks left out.

    Raises:
        PlatformError: When the platform refuses, fails or is not reached.
    """
    request = {"parent": platform.parent, "filter": "create_pipeline_job_request:*"}
    found = ask_all("list the schedules", platform.schedules.list_schedules, request)
    return [_read(message) for message in found]


def apply_plan(
    platform: Platform,
    plan: Plan,
    request: Mapping[str, Any],
    *,
    now: Callable[[], datetime.datetime] = _now,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Makes a schedule what it is declared to be.

    Args:
        platform: Where the schedule is.
        plan: What has to be done.
        request: CreatePipelineJobRequest of the schedule's runs.
        now: Tells the time.
        sleep: Waits for some seconds.

    Raises:
        PlatformError: When a call fails, or the platform has made something else of the schedule than was
            asked for. Another plan then says what is left to do.
    """
    name = plan.declared.display_name
    created = ""
    for step in plan.steps:
        if step.call == WAIT:
            seconds = (datetime.datetime.fromisoformat(step.request["until"]) - now()).total_seconds()
            if seconds > 0:
                progress.say(
                    "schedule", f"{name} is about to fire; waits {seconds:.0f} s for its run to start"
                )
                sleep(seconds)
        elif step.call == "CreateSchedule":
            created = call(platform, name, step).name
        elif step.call == "GetSchedule":
            new = _read(call(platform, name, _renamed(step, created)))
            _verify(new, request)
            # From here on as after an interruption: so that way is taken every time, and with the new time.
            rest = make_plan(plan.declared, request, [*plan.existing, new], now())
            apply_plan(platform, rest, request, now=now, sleep=sleep)
            return
        else:
            call(platform, name, _renamed(step, created))


def call(platform: Platform, display_name: str, step: Step) -> Any:
    """Makes one call of ScheduleService, and returns its answer.

    Raises:
        PlatformError: When the platform refuses, fails or is not reached.
    """
    from google.cloud.aiplatform_v1.types import schedule_service
    from google.protobuf import json_format

    methods: dict[str, Callable[..., Any]] = {
        "CreateSchedule": platform.schedules.create_schedule,
        "GetSchedule": platform.schedules.get_schedule,
        "UpdateSchedule": platform.schedules.update_schedule,
        "PauseSchedule": platform.schedules.pause_schedule,
        "ResumeSchedule": platform.schedules.resume_schedule,
        "DeleteSchedule": platform.schedules.delete_schedule,
    }
    kind = getattr(schedule_service, f"{step.call}Request")
    message = kind(json_format.ParseDict(step.request, kind.pb(kind())))
    doing = f"{step.call.removesuffix('Schedule').lower()} the schedule {display_name}"
    if step.call == "DeleteSchedule":
        return _delete(doing, methods[step.call], message)
    # A second schedule would be made by a second attempt, where the answer to the first one was lost.
    return ask(doing, methods[step.call], message, repeatable=step.call != "CreateSchedule")


def _delete(doing: str, method: Callable[..., Any], message: Any) -> None:
    """Deletes a schedule, and waits for it; one that is not there is deleted: by us, or by somebody else."""
    from google.api_core.exceptions import NotFound

    try:
        operation = ask(doing, method, message)
    except PlatformError as error:
        if isinstance(error.__cause__, NotFound):
            return
        raise
    with platform_errors(doing):
        operation.result(timeout=_DELETION_S)


def _verify(new: Existing, request: Mapping[str, Any]) -> None:
    if not same_request(request, new.request):
        raise PlatformError(
            f"the schedule {new.display_name} was created as {new.name}, but it is not what was asked for; "
            "nothing else was changed: look at it in the console, and delete it"
        )


def _renamed(step: Step, created: str) -> Step:
    """Returns a step with the name of the schedule that was created, where it means that one."""
    if step.request.get("name") == NEW:
        return Step(step.call, {**step.request, "name": created})
    return step


def _read(message: Any) -> Existing:
    from google.protobuf import json_format

    return read_existing(json_format.MessageToDict(type(message).pb(message)))
