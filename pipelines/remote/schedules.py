"""Schedules: declared in a file, compared with those on the platform, and applied.

A schedule has no labels. The API keeps those of the runs that it starts, in its request; two of them are
digests of the pipeline and the request, so that no copy of the request is needed for a comparison.

A schedule that differs from its declaration is replaced: a new one is created before the old one is deleted.
The plan depends on the existing schedules alone: applied again after an interruption, it does what is left.
Between the two calls both schedules fire.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from shardline.components.custom_job import mapping_at
from shardline.components.text import truncate
from shardline.components.vertex import (
    Platform,
    RefusalKind,
    call_api,
    list_all,
    platform_errors,
    refusal_kind,
)
from shardline.pipelines.check import Schedule, split_zone, zone_of
from shardline.pipelines.parameters import check_json, read_parameters
from shardline.pipelines.remote.submit import job_request
from shardline.pipelines.settings import Environment, read_settings_file
from shardline.trainer.base.deserialize import convert, read_dataclass
from shardline.trainer.base.errors import PlatformError, SettingsError, error_prefix

SCHEDULES_TABLE = "schedules"

#: Labels of the runs that a schedule starts: digests of the pipeline, and of its request without pipeline and
#: parameters.
TEMPLATE_LABEL = "shardline-template"
REQUEST_LABEL = "shardline-request"

#: Fields of a schedule other than its runs' request.
_FIELDS = ("cron", "max_concurrent_active_run_count", "max_run_count")

ACTIVE = "ACTIVE"
PAUSED = "PAUSED"
COMPLETED = "COMPLETED"
#: Placeholder for the name of the schedule that an earlier call creates.
NEW = "(the new schedule)"


def load_schedules(path: Path) -> dict[str, Schedule]:
    """Reads a file of schedules, by name; settings/schedules.toml.example shows all of its keys.

    A pipeline that is a file becomes an absolute path, or relative as `path` is. Parameters are those of
    `params`, too. Raises SettingsError when the file is missing or no TOML, or a key is unknown, missing,
    mistyped or wrong.
    """
    content, declared = read_settings_file(path, SCHEDULES_TABLE), {}
    with error_prefix(f"{path}: "):
        tables = convert(Mapping[str, Any], content.pop(SCHEDULES_TABLE, {}), SCHEDULES_TABLE)
        if content:
            raise SettingsError(f"unknown key {next(iter(content))}; write tables [{SCHEDULES_TABLE}.NAME]")
        for name, item in tables.items():
            found = read_dataclass(Schedule, item, f"{SCHEDULES_TABLE}.{name}", display_name=name)
            if not found.pipeline.startswith("https://"):
                found = replace(found, pipeline=str(path.parent / found.pipeline))
            with error_prefix(f"{SCHEDULES_TABLE}.{name}: "):
                check_json({"parameters": found.parameters})
                if found.params:
                    shared = read_parameters(path.parent / found.params)
                    found = replace(found, parameters={**shared, **found.parameters})
            declared[name] = found
    return declared


#: A Schedule of the platform in the API's JSON, without values that are 0, false or "".
Existing = Mapping[str, Any]


def list_schedules(platform: Platform) -> list[Existing]:
    """Returns all schedules of pipelines at a location, those of notebooks left out."""
    request = {"parent": platform.parent, "filter": "create_pipeline_job_request:*"}
    return [
        _read(item) for item in list_all("list the schedules", platform.schedules.list_schedules, request)
    ]


def schedule_request(
    environment: Environment,
    spec: Mapping[str, Any],
    parameters: Mapping[str, Any],
    *,
    template_uri: str = "",
) -> dict[str, Any]:
    """Returns the CreatePipelineJobRequest of each run, with its digests as labels.

    The arguments and errors are those of `job_request`.
    """
    request = job_request(environment, spec, parameters, template_uri=template_uri)
    job = request["pipelineJob"]
    rest = {name: value for name, value in job.items() if name not in ("pipelineSpec", "runtimeConfig")}
    rest["root"] = job["runtimeConfig"]["gcsOutputDirectory"]
    digests = {TEMPLATE_LABEL: _digest(job["pipelineSpec"]), REQUEST_LABEL: _digest(rest)}
    job["labels"] = {**job.get("labels", {}), **digests}
    return request


def schedule_body(declared: Schedule, request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the declared Schedule in the API's JSON."""
    content = {
        "displayName": declared.display_name,
        "createPipelineJobRequest": request,
        "maxConcurrentRunCount": "1",
    }
    for name in _FIELDS:
        if value := getattr(declared, name):
            # JSON has 64-bit numbers as text.
            content[_key(name)] = str(value) if type(value) is int else value
    return content


class Difference(NamedTuple):
    """One difference: the field in the declaration, the present value, and the declared one."""

    field: str
    before: str
    after: str


class ScheduleStep(NamedTuple):
    """One call: a method of ScheduleService and its request in the API's JSON."""

    call: str
    request: Mapping[str, Any]


class SchedulePlan(NamedTuple):
    """Steps for the schedule declared as `name`; none where there is nothing to do.

    The first existing schedule is kept, or replaced where it differs from the declaration; `paused` is
    whether the result is paused.
    """

    name: str
    existing: tuple[Existing, ...]
    action: str
    differences: tuple[Difference, ...]
    paused: bool
    steps: tuple[ScheduleStep, ...]


def _is_own(item: Existing) -> bool:
    """Whether Shardline created a schedule of the platform; any other is never changed or deleted."""
    return TEMPLATE_LABEL in mapping_at(_job(item), "labels")


def _foreign_error(item: Existing, reason: str, fix: str) -> SettingsError:
    """Returns the error for a schedule that is not to be changed."""
    return SettingsError(f"the schedule {item.get('displayName')!r} ({item['name']}) {reason}; {fix}")


def _job(schedule: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping_at(schedule, "createPipelineJobRequest", "pipelineJob")


def _check_replaceable(name: str, item: Existing) -> None:
    """Raises SettingsError unless Shardline created the schedule, for the pipeline `name`."""
    if not _is_own(item):
        fix = "give yours another name, or delete that one in the console"
        raise _foreign_error(item, "was not made by Shardline, and is not replaced", fix)
    if (found := mapping_at(_job(item), "pipelineSpec", "pipelineInfo").get("name")) != name:
        fix = "give yours another name, or delete that one with 'shardline schedule delete NAME'"
        raise _foreign_error(item, f"runs the pipeline {found!r}, not {name!r}, and is not replaced", fix)


def plan_schedule(
    declared: Schedule, request: Mapping[str, Any], existing: Iterable[Existing]
) -> SchedulePlan:
    """Compares a declared schedule, and the `request` of its runs, with the existing ones of its name.

    Raises SettingsError when one of these is not Shardline's, or of another pipeline.
    """
    body = schedule_body(declared, request)
    existing = tuple(existing)
    for item in existing:
        _check_replaceable(request["pipelineJob"]["pipelineSpec"]["pipelineInfo"]["name"], item)

    def rank(item: Existing) -> tuple[Any, ...]:
        count = len(_differences(body, item))
        return count, item["state"] == COMPLETED, item.get("createTime", ""), item["name"]

    found = tuple(sorted(existing, key=rank))
    # While one that was paused by hand is replaced, the new one may not be paused yet.
    paused = any(item["state"] == PAUSED for item in found) if declared.paused is None else declared.paused
    differences = _differences(body, found[0]) if found else []
    steps: list[ScheduleStep] = []
    if not found or differences:
        action, rest = ("replaced" if found else "created"), found
        steps.append(ScheduleStep("CreateSchedule", {"parent": request["parent"], "schedule": body}))
        steps += [ScheduleStep("PauseSchedule", {"name": NEW})] * paused
    else:
        kept, rest = found[0], found[1:]
        action = "cleaned up" if rest else "nothing to do"
        if kept["state"] != COMPLETED and paused != (kept["state"] == PAUSED):
            action = "changed"
            differences.append(Difference("paused", _text(not paused), _text(paused)))
            call = "PauseSchedule" if paused else "ResumeSchedule"
            steps.append(ScheduleStep(call, {"name": kept["name"]}))
    steps += [ScheduleStep("DeleteSchedule", {"name": item["name"]}) for item in rest]
    return SchedulePlan(declared.display_name, found, action, tuple(differences), paused, tuple(steps))


def _differences(body: Mapping[str, Any], item: Existing) -> list[Difference]:
    """Returns the differences between a schedule and its declaration.

    The pipeline and the request are compared by their labels, since the platform may rewrite them; parameters
    by value, since they can be edited in the console.
    """
    before, after = _parts(item), _parts(body)
    return [
        Difference(name, _text(before.get(name)), _text(after.get(name)))
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]


def _parts(schedule: Mapping[str, Any]) -> dict[str, Any]:
    job = _job(schedule)
    labels, parameters = mapping_at(job, "labels"), mapping_at(job, "runtimeConfig", "parameterValues")
    return {
        # 3 and 3.0 are equal here, as they are in the API.
        **{f"parameters.{name}": parameters[name] for name in sorted(parameters)},
        "pipeline": labels.get(TEMPLATE_LABEL, "unknown")[:12],
        "environment": labels.get(REQUEST_LABEL, "unknown")[:12],
        **{name: schedule.get(_key(name)) for name in _FIELDS},
    }


def apply_plan(platform: Platform, plan: SchedulePlan) -> Existing | None:
    """Executes the steps of a plan; returns the schedule as last read from the platform.

    Raises PlatformError when a call fails. A new plan then has the remaining steps.
    """
    last = plan.existing[0] if plan.existing else None
    for step in plan.steps:
        if last and step.request.get("name") == NEW:
            step = ScheduleStep(step.call, {"name": last["name"]})
        response = _send_step(platform, plan.name, step)
        if step.call == "CreateSchedule":
            last = _read(response)
    return last


def _send_step(platform: Platform, display_name: str, step: ScheduleStep) -> Any:
    """Sends one call to ScheduleService and returns its response; raises PlatformError as `call_api` does.

    Waits two minutes at most for a deletion; a missing schedule counts as deleted.
    """
    from google.cloud.aiplatform_v1.types import schedule_service
    from google.protobuf import json_format

    verb = step.call.removesuffix("Schedule").lower()
    kind = getattr(schedule_service, f"{step.call}Request")
    message = kind(json_format.ParseDict(step.request, kind.pb(kind())))
    action, method = f"{verb} the schedule {display_name}", getattr(platform.schedules, f"{verb}_schedule")
    try:
        # Where a response was lost, a second attempt would create a second schedule.
        response = call_api(action, method, message, repeatable=verb != "create")
    except PlatformError as error:
        if verb == "delete" and refusal_kind(error.__cause__) is RefusalKind.MISSING:
            return None
        raise
    if verb == "delete":
        try:
            with platform_errors(action):
                return response.result(timeout=120)
        except TimeoutError:
            raise PlatformError(f"cannot {action}: it takes longer than two minutes; try again") from None
    return response


def delete_schedules(platform: Platform, name: str) -> list[str]:
    """Deletes the schedules of a name that Shardline made, and returns their resource names.

    Raises SettingsError when there are only others.
    """
    named = [item for item in list_schedules(platform) if item.get("displayName") == name]
    found = [str(item["name"]) for item in named if _is_own(item)]
    if named and not found:
        raise _foreign_error(named[0], "was not made by Shardline", "delete it in the console")
    for each in found:
        _send_step(platform, name, ScheduleStep("DeleteSchedule", {"name": each}))
    return found


def next_run(item: Existing) -> datetime.datetime | None:
    """Returns when a schedule of the platform fires next, in its own zone; None if it does not."""
    if not item.get("nextRunTime") or item["state"] != ACTIVE:
        return None
    moment = datetime.datetime.fromisoformat(item["nextRunTime"])
    # The platform may know more zones than this machine.
    return moment.astimezone(zone_of(split_zone(item["cron"])[0]) or datetime.UTC)


def _read(message: Any) -> Existing:
    from google.protobuf import json_format

    return {"state": "", **json_format.MessageToDict(type(message).pb(message))}


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]  # a label has 63 characters at most


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "none"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return truncate(json.dumps(value, ensure_ascii=False, sort_keys=True), 80)


def _key(name: str) -> str:
    return re.sub(r"_(\w)", lambda match: match[1].upper(), name)
