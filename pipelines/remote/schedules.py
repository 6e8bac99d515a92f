"""Schedules: declared in a file, compared with those on the platform, and made what is declared.

A schedule has no labels of its own. The API keeps those of the runs that it starts, with its request, and two
of them tell these runs from any other: a later look needs no copy of what was sent.

A schedule that is not as it is declared is replaced: another one is created, and looked at, and only then the
old one is deleted. What is to be done depends on what there is alone: applied again after it was broken off
anywhere, it is what was left to do. Between the two calls both fire.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from shardline.components.text import timestamp, truncate
from shardline.components.vertex.client import Platform, call_api, list_all, wait_for_operation
from shardline.components.vertex.payload import mapping_at
from shardline.components.vertex.refusals import RefusalKind, refusal_kind
from shardline.pipelines.check.registry import Severity, apply
from shardline.pipelines.check.rules.schedules import NO_ZONE, Schedule
from shardline.pipelines.remote.submit import job_request
from shardline.pipelines.settings import Environment
from shardline.pipelines.tables import error_prefix, read_tables
from shardline.trainer.base.errors import PlatformError, SettingsError

TABLE = "schedules"

#: Labels of the runs that a schedule starts: digests of the pipeline, and of its request without pipeline and
#: parameters.
TEMPLATE_LABEL = "shardline-template"
REQUEST_LABEL = "shardline-request"

#: What a schedule has beside its runs' request.
_FIELDS = (
    "cron",
    "max_concurrent_run_count",
    "max_concurrent_active_run_count",
    "allow_queueing",
    "max_run_count",
    "start_time",
    "end_time",
)

ACTIVE = "ACTIVE"
PAUSED = "PAUSED"
COMPLETED = "COMPLETED"
#: Stands for the name of the schedule that an earlier call creates.
NEW = "(the new schedule)"

#: A start that is nearer has passed, as far as clocks agree.
_SOON = datetime.timedelta(seconds=60)
#: Seconds that the platform may take to delete a schedule.
_DELETION_S = 120


@dataclass(frozen=True, kw_only=True)
class DeclaredSchedule(Schedule):
    """One schedule, [schedules.NAME]; the words are those of the Vertex AI API.

    Its display name is NAME, by which it is found on the platform, and its cron begins with a time zone.
    settings/schedules.toml.example explains the fields; None leaves it to the pipeline, or to `shardline
    schedule pause` and `resume`.
    """

    pipeline: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    enable_caching: bool | None = None
    max_concurrent_active_run_count: int | None = 1
    paused: bool | None = None

    def __post_init__(self) -> None:
        if not self.display_name.strip() or '"' in self.display_name:
            raise SettingsError(f"the name must be a text without quotes, got {self.display_name!r}")
        for finding in apply({Schedule: [self]}):
            if finding.severity is Severity.ERROR or finding.code == NO_ZONE:
                raise SettingsError(f"{finding.why}; {finding.fix}")
        for name in ("start_time", "end_time"):
            moment = getattr(self, name)
            if moment is not None and moment.tzinfo is None:
                raise SettingsError(f"{name} {moment.isoformat()} has no offset; write 2027-01-01T00:00:00Z")
        if self.start_time and self.end_time and self.start_time >= self.end_time:
            raise SettingsError(f"end_time {self.end_time.isoformat()} is not after start_time")
        try:
            json.dumps(dict(self.parameters), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise SettingsError(f"parameters must be JSON values: {error}") from None


def load_schedules(path: Path) -> dict[str, DeclaredSchedule]:
    """Reads a file of schedules, by name; settings/schedules.toml.example shows all of its keys.

    A pipeline that is a file becomes an absolute path, or relative as `path` is.

    Raises:
        SettingsError: When the file is missing or no TOML, or a key is unknown, missing, mistyped or wrong.
    """
    found = {}
    for name, table in read_tables(path, TABLE, DeclaredSchedule).items():
        if not table["pipeline"].startswith("https://"):
            table["pipeline"] = str(path.parent / table["pipeline"])
        with error_prefix(f"{path}: {TABLE}.{name}: "):
            found[name] = DeclaredSchedule(display_name=name, **table)
    return found


#: A Schedule of the platform, in the API's JSON form: what is 0, false or "" is left out.
Existing = Mapping[str, Any]


def list_schedules(platform: Platform) -> list[Existing]:
    """Returns all schedules of pipelines at a location, those of notebooks left out."""
    request = {"parent": platform.parent, "filter": "create_pipeline_job_request:*"}
    return [
        _read(item) for item in list_all("list the schedules", platform.schedules.list_schedules, request)
    ]


def run_request(
    environment: Environment,
    declared: DeclaredSchedule,
    spec: Mapping[str, Any],
    parameters: Mapping[str, Any],
    *,
    template_uri: str = "",
) -> dict[str, Any]:
    """Returns the CreatePipelineJobRequest of each run, with labels that tell it from any other.

    The arguments are those of `job_request`, which says what it raises.
    """
    request = job_request(
        environment, spec, parameters, enable_caching=declared.enable_caching, template_uri=template_uri
    )
    job = request["pipelineJob"]
    rest = {name: value for name, value in job.items() if name not in ("pipelineSpec", "runtimeConfig")}
    rest["root"] = job["runtimeConfig"]["gcsOutputDirectory"]
    digests = {TEMPLATE_LABEL: _digest(job["pipelineSpec"]), REQUEST_LABEL: _digest(rest)}
    job["labels"] = {**job.get("labels", {}), **digests}
    return request


def schedule_body(
    declared: DeclaredSchedule, request: Mapping[str, Any], now: datetime.datetime
) -> dict[str, Any]:
    """Returns the Schedule, in the API's JSON form, that is declared.

    A start that has passed is left out: the API may refuse it, and it says nothing any more.
    """
    content = {"displayName": declared.display_name, "createPipelineJobRequest": request}
    for name in _FIELDS:
        value = getattr(declared, name)
        if isinstance(value, datetime.datetime):
            is_over = name == "start_time" and value <= now
            value = None if is_over else timestamp(value.replace(microsecond=0))
        if value:
            # JSON has 64-bit numbers as text.
            content[_key(name)] = str(value) if type(value) is int else value
    return content


class Action(StrEnum):
    """What happens to a schedule, as it is said once it has happened."""

    NOTHING = "nothing to do"
    CREATE = "created"
    UPDATE = "changed"
    REPLACE = "replaced"
    RETIRE = "cleaned up"


class Difference(NamedTuple):
    """One thing that is not as it is declared: its name in the declaration, as it is, and as declared."""

    what: str
    before: str
    after: str


class ScheduleStep(NamedTuple):
    """One call: a method of ScheduleService and its request in the API's JSON form."""

    call: str
    request: Mapping[str, Any]


@dataclass(frozen=True)
class SchedulePlan:
    """What has to be done about one declared schedule; no steps where there is nothing to do.

    The first of those that exist is kept, or is the one that is replaced, where it differs from the `body`
    that is declared; `paused` is whether it is paused then.
    """

    body: Mapping[str, Any]
    existing: tuple[Existing, ...] = ()
    action: Action = Action.NOTHING
    differences: tuple[Difference, ...] = ()
    paused: bool = False
    steps: tuple[ScheduleStep, ...] = ()

    @property
    def name(self) -> str:
        """The schedule's display name."""
        return str(self.body["displayName"])


def make_plan(
    declared: DeclaredSchedule,
    request: Mapping[str, Any],
    existing: Iterable[Existing],
    now: datetime.datetime,
) -> SchedulePlan:
    """Compares a declared schedule, with the `request` of its runs, with all those of its name."""
    body = schedule_body(declared, request, now)

    def rank(item: Existing) -> tuple[Any, ...]:
        unlike = len(_differences(body, item, now))
        return unlike, item["state"] == COMPLETED, item.get("createTime", ""), item["name"]

    found = tuple(sorted(existing, key=rank))
    if declared.end_time and declared.end_time <= now:
        # What has not ended by itself is deleted.
        left = [
            item for item in found if item["state"] != COMPLETED and item.get("endTime") != body["endTime"]
        ]
        action = Action.RETIRE if left else Action.NOTHING
        return SchedulePlan(
            body,
            found,
            action,
            steps=tuple(ScheduleStep("DeleteSchedule", {"name": item["name"]}) for item in left),
        )
    # Of one that was paused by hand and is being replaced, the new one may not be paused yet.
    paused = any(item["state"] == PAUSED for item in found) if declared.paused is None else declared.paused
    differences = _differences(body, found[0], now) if found else []
    steps: list[ScheduleStep] = []
    if not found or differences:
        action, rest = (Action.REPLACE if found else Action.CREATE), found
        steps.append(ScheduleStep("CreateSchedule", {"parent": request["parent"], "schedule": body}))
        steps += [ScheduleStep("PauseSchedule", {"name": NEW})] * paused
    else:
        kept, rest = found[0], found[1:]
        action = Action.RETIRE if rest else Action.NOTHING
        if kept["state"] != COMPLETED and paused != (kept["state"] == PAUSED):
            action = Action.UPDATE
            differences.append(Difference("paused", _text(not paused), _text(paused)))
            steps.append(change_state(kept, paused=paused))
    steps += [ScheduleStep("DeleteSchedule", {"name": item["name"]}) for item in rest]
    return SchedulePlan(body, found, action, tuple(differences), paused, tuple(steps))


def change_state(item: Existing, *, paused: bool, catch_up: bool = False) -> ScheduleStep:
    """Returns the call that pauses a schedule, or resumes it, the runs first that it has missed."""
    if paused:
        return ScheduleStep("PauseSchedule", {"name": item["name"]})
    return ScheduleStep("ResumeSchedule", {"name": item["name"], "catchUp": catch_up})


def _differences(body: Mapping[str, Any], item: Existing, now: datetime.datetime) -> list[Difference]:
    """Returns where a schedule is not what is declared.

    Labels say what was sent, which the platform may write differently; parameters can be edited elsewhere.
    """
    before, after = _parts(item, now), _parts(body, now)
    return [
        Difference(name, _text(before.get(name)), _text(after.get(name)))
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]


def _parts(schedule: Mapping[str, Any], now: datetime.datetime) -> dict[str, Any]:
    job = schedule["createPipelineJobRequest"]["pipelineJob"]
    labels, parameters = mapping_at(job, "labels"), mapping_at(job, "runtimeConfig", "parameterValues")
    start = parse_time(schedule.get("startTime"))
    return {
        # 3 and 3.0 are equal here, as they are in the API.
        **{f"parameters.{name}": parameters[name] for name in sorted(parameters)},
        "pipeline": labels.get(TEMPLATE_LABEL, "unknown")[:12],
        "environment": labels.get(REQUEST_LABEL, "unknown")[:12],
        **{name: schedule.get(_key(name)) for name in _FIELDS},
        "start_time": schedule.get("startTime") if start and start > now + _SOON else None,
    }


def apply_plan(platform: Platform, plan: SchedulePlan) -> Existing | None:
    """Makes a schedule what it is declared to be; returns it as the platform has shown it last.

    Raises PlatformError when a call fails, or the platform has made something else of it than was asked for.
    Another plan then says what is left to do.
    """
    last = plan.existing[0] if plan.existing else None
    for step in plan.steps:
        if last and step.request.get("name") == NEW:
            step = ScheduleStep(step.call, {"name": last["name"]})
        answer = send_step(platform, plan.name, step)
        if step.call == "CreateSchedule":
            last = _read(answer)
            if _differences(plan.body, last, datetime.datetime.now(datetime.UTC)):
                raise PlatformError(
                    f"the schedule {plan.name} was created as {last['name']}, but it is not what was asked "
                    "for; nothing else was changed: look at it in the console, and delete it"
                )
    return last


def send_step(platform: Platform, display_name: str, step: ScheduleStep) -> Any:
    """Makes one call of ScheduleService, and returns its answer; raises PlatformError as `call_api` does.

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
        answer = call_api(doing, method, message, repeatable=verb != "create")
    except PlatformError as error:
        if verb == "delete" and refusal_kind(error.__cause__) is RefusalKind.MISSING:
            return None
        raise
    return wait_for_operation(doing, answer, _DELETION_S) if verb == "delete" else answer


def _read(message: Any) -> Existing:
    from google.protobuf import json_format

    content: dict[str, Any] = json_format.MessageToDict(type(message).pb(message))
    given = {name: value for name, value in content.items() if value not in (0, False, "", "0")}
    return {"state": "", **given}


def parse_time(text: str | None) -> datetime.datetime | None:
    """Returns a time of the API's JSON form; None where there is none."""
    return datetime.datetime.fromisoformat(text) if text else None


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]  # a label has 63 characters at most


def _text(value: Any) -> str:
    """Returns a value of the API's JSON form for a person."""
    if value is None or isinstance(value, str):
        return value or "none"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return truncate(json.dumps(value, ensure_ascii=False, sort_keys=True), 80)


def _key(name: str) -> str:
    """Returns a field's name in the API's JSON form."""
    return re.sub(r"_(\w)", lambda found: found[1].upper(), name)
