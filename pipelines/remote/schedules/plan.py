"""What has to be done so that a schedule is as it is declared: one pure function, for `plan` and `apply`.

What a declared schedule asks of the platform, as JSON, and how drift from it is recognized.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from shardline.components.text import timestamp
from shardline.pipelines.remote.environment import Environment
from shardline.pipelines.remote.schedules.declared import Declared
from shardline.pipelines.remote.schedules.steps import (
    COMPLETED,
    PAUSED,
    Existing,
    Step,
    create_steps,
    delete_steps,
    state_steps,
    update_steps,
)
from shardline.pipelines.remote.submit import job_request

#: Labels of the runs that a schedule starts. A schedule has no labels of its own; the API keeps these with
#: its request, so that a later look needs no copy of what was sent.
TEMPLATE_LABEL = "shardline-template"
REQUEST_LABEL = "shardline-request"

#: Hexadecimal digits of a digest; a label's value has 63 characters at most.
_DIGITS = 32

#: What of a run is said by name when it differs, by its place in the request.
_PARTS = {
    "pipeline_root": ("runtimeConfig", "gcsOutputDirectory"),
    "service_account": ("serviceAccount",),
    "network": ("network",),
    "encryption_spec_key_name": ("encryptionSpec", "kmsKeyName"),
    "template_uri": ("templateUri",),
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """One thing that is not as it is declared.

    Attributes:
        what: Its name in the declaration.
        before: As it is on the platform.
        after: As it is declared.
    """

    what: str
    before: str
    after: str


def run_request(
    environment: Environment,
    declared: Declared,
    spec: Mapping[str, Any],
    parameters: Mapping[str, Any],
    *,
    template_uri: str = "",
) -> dict[str, Any]:
    """Returns the CreatePipelineJobRequest of each run, with labels that tell it from any other.

    Args:
        environment: Where, in whose name, and with which labels.
        declared: The schedule.
        spec: Its pipeline (IR).
        parameters: Its parameters, checked.
        template_uri: Where in the registry the pipeline came from.

    Raises:
        SettingsError: When there is no pipeline root.
        PipelineError: When the pipeline is of a form that cannot be submitted.
    """
    request = job_request(
        environment,
        spec,
        parameters,
        enable_caching=declared.enable_caching,
        template_uri=template_uri,
    )
    job = request["pipelineJob"]
    job["labels"] = {
        **job.get("labels", {}),
        TEMPLATE_LABEL: _digest(job["pipelineSpec"]),
        REQUEST_LABEL: _digest(request),
    }
    return request


def same_request(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether a schedule starts the runs that are wanted.

    The label says what was sent; the parameters are compared as well, since they can be edited elsewhere.
    """
    return _label(wanted, REQUEST_LABEL) == _label(found, REQUEST_LABEL) and not list(
        _parameter_differences(wanted, found)
    )


def request_differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[Difference]:
    """Returns in what the runs that a schedule starts differ from those that are wanted."""
    if same_request(wanted, found):
        return []
    differences = list(_parameter_differences(wanted, found))
    template = [_label(request, TEMPLATE_LABEL) for request in (found, wanted)]
    if template[0] != template[1]:
        before, after = (_short_digest(text) for text in template)
        differences.append(Difference("pipeline", before, after))
    for what, place in _PARTS.items():
        before, after = (_at(request["pipelineJob"], place) for request in (found, wanted))
        if before != after:
            differences.append(Difference(what, before, after))
    labels = [_own_labels(request) for request in (found, wanted)]
    if labels[0] != labels[1]:
        differences.append(Difference("labels", _request_text(labels[0]), _request_text(labels[1])))
    return differences or [Difference("request", "something else", "as declared")]


def _parameter_differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Difference]:
    before, after = (_parameters(request) for request in (found, wanted))
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            yield Difference(
                f"parameters.{name}",
                _request_text(before[name]) if name in before else "its default",
                _request_text(after[name]) if name in after else "its default",
            )


def _parameters(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a request; 3 and 3.0 are equal here, as they are in the API."""
    return dict(request["pipelineJob"].get("runtimeConfig", {}).get("parameterValues", {}))


def _own_labels(request: Mapping[str, Any]) -> dict[str, str]:
    labels = request["pipelineJob"].get("labels", {})
    return {name: labels[name] for name in labels if name not in (TEMPLATE_LABEL, REQUEST_LABEL)}


def _label(request: Mapping[str, Any], name: str) -> str:
    return str(request["pipelineJob"].get("labels", {}).get(name, ""))


def _at(job: Mapping[str, Any], place: tuple[str, ...]) -> str:
    node: Any = job
    for key in place:
        node = node.get(key, {})
    return str(node or "")


def _request_text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _short_digest(digest: str) -> str:
    return digest[:12] or "unknown"


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


#: What UpdateSchedule changes in place. It cannot unset what is set (schedule_service.proto, comment on
#: UpdateScheduleRequest.schedule), and nobody says whether it changes the request: that is another schedule.
IN_PLACE = (
    "cron",
    "max_concurrent_run_count",
    "max_concurrent_active_run_count",
    "allow_queueing",
    "max_run_count",
    "start_time",
    "end_time",
)

#: A start so near is one that was given in order to wake the schedule.
_SOON = datetime.timedelta(seconds=60)


class Action(StrEnum):
    """What happens to a schedule."""

    NOTHING = "nothing to do"
    CREATE = "create"
    UPDATE = "change in place"
    REPLACE = "replace"
    RETIRE = "clean up"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What has to be done about one declared schedule.

    Attributes:
        declared: The schedule.
        action: What happens to it.
        existing: Schedules of its name that there are; the first is kept, or is the one that is replaced.
        differences: In what the first is not as it is declared.
        steps: What is done, in order; none where there is nothing to do.
        paused: Whether it is paused then.
    """

    declared: Declared
    action: Action
    paused: bool = False
    existing: tuple[Existing, ...] = ()
    differences: tuple[Difference, ...] = ()
    steps: tuple[Step, ...] = ()


def make_plan(
    declared: Declared,
    request: Mapping[str, Any],
    existing: Sequence[Existing],
    now: datetime.datetime,
) -> Plan:
    """Compares a declared schedule with those of its name.

    The plan depends on what there is alone, not on how it came about: made again after it was broken off
    anywhere, it is what was left to do.

    Args:
        declared: The schedule.
        request: CreatePipelineJobRequest of its runs (`run_request`).
        existing: All schedules of pipelines that have its name.
        now: Time.
    """
    found = sorted(existing, key=lambda item: _rank(declared, request, item, now))
    if declared.end_time and declared.end_time <= now:
        return _ended(declared, found, now)
    wanted = schedule_body(declared, request, now)
    paused = _is_to_be_paused(declared, found, now)
    if not found:
        created = create_steps(wanted, (), paused=paused, now=now)
        return Plan(declared=declared, action=Action.CREATE, steps=tuple(created), paused=paused)
    first, *others = found
    differences = [
        *request_differences(request, first.request),
        *(_difference(declared, first, name) for name in _changed(declared, first, now)),
    ]
    if not _can_be_kept(declared, request, first, now):
        steps = list(create_steps(wanted, found, paused=paused, now=now))
        action = Action.REPLACE
    else:
        steps = _keep_steps(declared, wanted, first, others, paused=paused, now=now)
        if first.state != COMPLETED and paused != (first.state == PAUSED):
            differences.append(Difference("paused", _text(not paused), _text(paused)))
        action = Action.UPDATE if differences else Action.RETIRE if others else Action.NOTHING
    return Plan(
        declared=declared,
        action=action,
        existing=tuple(found),
        differences=tuple(differences),
        steps=tuple(steps),
        paused=paused,
    )


def schedule_body(declared: Declared, request: Mapping[str, Any], now: datetime.datetime) -> dict[str, Any]:
    """Returns the Schedule, in the API's JSON form, that is declared.

    A start that has passed is left out: the API may refuse it, and it says nothing any more.
    """
    content = {
        "displayName": declared.display_name,
        "createPipelineJobRequest": request,
    }
    for name in IN_PLACE:
        value = _start(declared, now) if name == "start_time" else getattr(declared, name)
        if value is not None:
            content[_key(name)] = timestamp(value) if isinstance(value, datetime.datetime) else value
    return content


def _keep_steps(
    declared: Declared,
    wanted: Mapping[str, Any],
    kept: Existing,
    others: Sequence[Existing],
    *,
    paused: bool,
    now: datetime.datetime,
) -> list[Step]:
    changed = [_key(name) for name in _changed(declared, kept, now)]
    state = [] if kept.state == COMPLETED else list(state_steps(kept, paused=paused))
    update = list(update_steps(kept.name, wanted, changed, others, now=now)) if changed else []
    # One that is to be paused must not fire in between, nor one that is resumed fire at its old times.
    return [*(state + update if paused else update + state), *delete_steps(others, now)]


def _ended(declared: Declared, found: Sequence[Existing], now: datetime.datetime) -> Plan:
    """Returns the plan where the declared end has passed: what has not ended by itself is retired."""
    left = [item for item in found if item.state != COMPLETED and item.end_time != declared.end_time]
    return Plan(
        declared=declared,
        action=Action.RETIRE if left else Action.NOTHING,
        existing=tuple(found),
        steps=tuple(delete_steps(left, now)),
    )


def _rank(
    declared: Declared, request: Mapping[str, Any], item: Existing, now: datetime.datetime
) -> tuple[Any, ...]:
    """Orders the schedules of one name: first what is nearest to the declaration, then what is in use."""
    return (
        not _can_be_kept(declared, request, item, now),
        item.state == COMPLETED,
        len(_changed(declared, item, now)),
        not item.fires(now),
        item.create_time or now,
        item.name,
    )


def _can_be_kept(
    declared: Declared, request: Mapping[str, Any], item: Existing, now: datetime.datetime
) -> bool:
    changed = _changed(declared, item, now)
    if not same_request(request, item.request) or (item.state == COMPLETED and changed):
        return False
    unset = [name for name in changed if name != "start_time" and not getattr(declared, name)]
    return not unset


def _changed(declared: Declared, item: Existing, now: datetime.datetime) -> list[str]:
    """Returns what of `IN_PLACE` is not as it is declared."""
    return [name for name in IN_PLACE if _differs(declared, item, name, now)]


def _differs(declared: Declared, item: Existing, name: str, now: datetime.datetime) -> bool:
    found = getattr(item, name)
    if name != "start_time":
        return bool(found != getattr(declared, name))
    wanted = _start(declared, now)
    if wanted is None:  # any start will do that has passed, or is passing
        return item.state != COMPLETED and found is not None and found > now + _SOON
    return bool(found != wanted)


def _is_to_be_paused(declared: Declared, found: Sequence[Existing], now: datetime.datetime) -> bool:
    """Whether it is to be paused: as it is declared, else as it is."""
    if declared.paused is not None:
        return declared.paused
    return any(item.state == PAUSED for item in found) and not any(item.fires(now) for item in found)


def _start(declared: Declared, now: datetime.datetime) -> datetime.datetime | None:
    return declared.start_time if declared.start_time and declared.start_time > now else None


def _difference(declared: Declared, item: Existing, name: str) -> Difference:
    after = getattr(declared, name)
    if name == "start_time" and after is None:
        return Difference(name, _text(item.start_time), "at once")
    return Difference(name, _text(getattr(item, name)), _text(after))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        timestamp(value) if isinstance(value, datetime.datetime) else "none" if value is None else str(value)
    )


def _key(name: str) -> str:
    """Returns a field's name in the API's JSON form."""
    return re.sub(r"_(\w)", lambda found: found[1].upper(), name)
