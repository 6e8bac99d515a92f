"""Plan of a schedule: what has to be done so that it is as it is declared, for `plan` and for `apply`.

A schedule has no labels of its own. The API keeps those of the runs that it starts, with its request, and two
of them tell these runs from any other: a later look needs no copy of what was sent.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from shardline.components.text import short, timestamp
from shardline.components.vertex.payload import at
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

#: Labels of the runs that a schedule starts: digests of the pipeline, and of the whole request.
TEMPLATE_LABEL = "shardline-template"
REQUEST_LABEL = "shardline-request"

#: Hexadecimal digits of a digest; a label's value has 63 characters at most.
_DIGITS = 32

#: What of a run is told by name when it differs, by its place in the request.
_PARTS = {
    "pipeline_root": ("runtimeConfig", "gcsOutputDirectory"),
    "service_account": ("serviceAccount",),
    "network": ("network",),
    "encryption_spec_key_name": ("encryptionSpec", "kmsKeyName"),
    "template_uri": ("templateUri",),
}

#: What UpdateSchedule changes in place. It cannot unset what is set (schedule_service.proto, comment on
#: UpdateScheduleRequest.schedule), and nothing says whether it changes the request: that is another schedule.
IN_PLACE = (
    "cron",
    "max_concurrent_run_count",
    "max_concurrent_active_run_count",
    "allow_queueing",
    "max_run_count",
    "start_time",
    "end_time",
)

#: Stands for a parameter that is not given.
_UNSET = object()
#: A start so near is one that was given in order to wake the schedule.
_SOON = datetime.timedelta(seconds=60)


class Action(StrEnum):
    """What happens to a schedule."""

    NOTHING = "nothing to do"
    CREATE = "create"
    UPDATE = "change in place"
    REPLACE = "replace"
    RETIRE = "clean up"

    @property
    def done(self) -> str:
        """The action once it has been done."""
        names = {Action.CREATE: "created", Action.UPDATE: "changed in place"}
        names |= {Action.REPLACE: "replaced", Action.RETIRE: "cleaned up"}
        return names.get(self, self.value)


@dataclass(frozen=True)
class Difference:
    """One thing that is not as it is declared: its name in the declaration, as it is, and as declared."""

    what: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What has to be done about one declared schedule; no steps where there is nothing to do.

    Attributes:
        existing: Schedules of its name on the platform; the first is kept, or is the one that is replaced.
        differences: Where the first is not as it is declared.
        paused: Whether it is paused then.
    """

    declared: Declared
    action: Action
    paused: bool = False
    existing: tuple[Existing, ...] = ()
    differences: tuple[Difference, ...] = ()
    steps: tuple[Step, ...] = ()


def run_request(
    environment: Environment,
    declared: Declared,
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
    digests = {TEMPLATE_LABEL: _digest(job["pipelineSpec"]), REQUEST_LABEL: _digest(request)}
    job["labels"] = {**job.get("labels", {}), **digests}
    return request


def schedule_body(declared: Declared, request: Mapping[str, Any], now: datetime.datetime) -> dict[str, Any]:
    """Returns the Schedule, in the API's JSON form, that is declared.

    A start that has passed is left out: the API may refuse it, and it says nothing any more.
    """
    content = {"displayName": declared.display_name, "createPipelineJobRequest": request}
    for name in IN_PLACE:
        value = _start(declared, now) if name == "start_time" else getattr(declared, name)
        if value is not None:
            content[_key(name)] = timestamp(value) if isinstance(value, datetime.datetime) else value
    return content


def make_plan(
    declared: Declared,
    request: Mapping[str, Any],
    existing: Sequence[Existing],
    now: datetime.datetime,
) -> Plan:
    """Compares a declared schedule, with the `request` of its runs, with all those of its name.

    The plan depends on what there is alone, not on how it came about: made again after it was broken off
    anywhere, it is what was left to do.
    """
    look = _Look(declared, request, now)
    found = sorted(existing, key=look.rank)
    if declared.end_time and declared.end_time <= now:
        # What has not ended by itself is deleted.
        left = [item for item in found if item.state != COMPLETED and item.end_time != declared.end_time]
        action, steps = (Action.RETIRE if left else Action.NOTHING), delete_steps(left, now)
        return Plan(declared=declared, action=action, existing=tuple(found), steps=tuple(steps))
    wanted = schedule_body(declared, request, now)
    paused = look.is_to_be_paused(found)
    if not found:
        steps = create_steps(wanted, (), paused=paused, now=now)
        return Plan(declared=declared, action=Action.CREATE, steps=tuple(steps), paused=paused)
    first, *others = found
    differences = look.differences(first)
    if not look.can_be_kept(first):
        action, steps = Action.REPLACE, create_steps(wanted, found, paused=paused, now=now)
    else:
        steps = look.keep_steps(wanted, first, others, paused=paused)
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


@dataclass(frozen=True)
class _Look:
    """A look at schedules of one name, beside what is declared, at one time."""

    declared: Declared
    request: Mapping[str, Any]
    now: datetime.datetime

    def rank(self, item: Existing) -> tuple[Any, ...]:
        """Orders schedules: first what is nearest to the declaration, then what is in use."""
        return (
            not self.can_be_kept(item),
            item.state == COMPLETED,
            len(self.changed(item)),
            not item.fires(self.now),
            item.create_time or self.now,
            item.name,
        )

    def can_be_kept(self, item: Existing) -> bool:
        """Whether the calls that change a schedule in place can make it as it is declared."""
        changed = self.changed(item)
        if not same_request(self.request, item.request) or (item.state == COMPLETED and changed):
            return False
        return not any(name != "start_time" and not getattr(self.declared, name) for name in changed)

    def changed(self, item: Existing) -> list[str]:
        """Returns what of `IN_PLACE` is not as it is declared."""
        start = _start(self.declared, self.now)
        changed = [
            name
            for name in IN_PLACE
            if getattr(item, name) != (start if name == "start_time" else getattr(self.declared, name))
        ]
        if "start_time" in changed and start is None:
            # Any start will do that has passed, or is passing.
            ahead = item.start_time is not None and item.start_time > self.now + _SOON
            if item.state == COMPLETED or not ahead:
                changed.remove("start_time")
        return changed

    def differences(self, item: Existing) -> list[Difference]:
        """Returns where a schedule is not as it is declared."""
        found = request_differences(self.request, item.request)
        for name in self.changed(item):
            before, after = getattr(item, name), getattr(self.declared, name)
            at_once = name == "start_time" and after is None
            found.append(Difference(name, _text(before), "at once" if at_once else _text(after)))
        return found

    def is_to_be_paused(self, found: Sequence[Existing]) -> bool:
        """Whether it is to be paused: as it is declared, else as it is."""
        if self.declared.paused is not None:
            return self.declared.paused
        fires = any(item.fires(self.now) for item in found)
        return not fires and any(item.state == PAUSED for item in found)

    def keep_steps(
        self, wanted: Mapping[str, Any], kept: Existing, others: Sequence[Existing], *, paused: bool
    ) -> Iterator[Step]:
        """Yields the steps that change a schedule in place, and retire the others."""
        changed = [_key(name) for name in self.changed(kept)]
        state = [] if kept.state == COMPLETED else list(state_steps(kept, paused=paused))
        update = list(update_steps(kept.name, wanted, changed, others, now=self.now)) if changed else []
        # One that is to be paused must not fire in between, nor one that is resumed at its old times.
        yield from state + update if paused else update + state
        yield from delete_steps(others, self.now)


def same_request(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether a schedule starts the runs that are wanted.

    The label says what was sent; the parameters are compared as well, since they can be edited elsewhere.
    """
    labels = [_labels(request).get(REQUEST_LABEL) for request in (wanted, found)]
    return labels[0] == labels[1] and _parameters(wanted) == _parameters(found)


def request_differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[Difference]:
    """Returns where the runs that a schedule starts differ from those that are wanted."""
    if same_request(wanted, found):
        return []
    differences = []

    both = (found, wanted)

    def compare(what: str, values: list[Any], text: Callable[[Any], str] = str) -> None:
        if values[0] != values[1]:
            differences.append(Difference(what, *map(text, values)))

    parameters = [_parameters(request) for request in both]
    for name in sorted({*parameters[0], *parameters[1]}):
        # 3 and 3.0 are equal here, as they are in the API.
        compare(f"parameters.{name}", [values.get(name, _UNSET) for values in parameters], _json)
    templates = [_labels(request).get(TEMPLATE_LABEL, "") for request in both]
    compare("pipeline", templates, lambda digest: digest[:12] or "unknown")
    for what, (*tables, key) in _PARTS.items():
        compare(what, [str(at(request["pipelineJob"], *tables).get(key) or "") for request in both])
    compare("labels", [_own_labels(request) for request in both], _json)
    return differences or [Difference("request", "something else", "as declared")]


def _parameters(request: Mapping[str, Any]) -> dict[str, Any]:
    return at(request["pipelineJob"], "runtimeConfig", "parameterValues")


def _labels(request: Mapping[str, Any]) -> dict[str, str]:
    return at(request["pipelineJob"], "labels")


def _own_labels(request: Mapping[str, Any]) -> dict[str, str]:
    ours = (TEMPLATE_LABEL, REQUEST_LABEL)
    return {name: value for name, value in _labels(request).items() if name not in ours}


def _json(value: Any) -> str:
    if value is _UNSET:
        return "its default"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return short(json.dumps(value, ensure_ascii=False, sort_keys=True), 80)


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _start(declared: Declared, now: datetime.datetime) -> datetime.datetime | None:
    """Returns the declared start, unless it has passed."""
    return declared.start_time if declared.start_time and declared.start_time > now else None


def _text(value: Any) -> str:
    if isinstance(value, datetime.datetime):
        return timestamp(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def _key(name: str) -> str:
    """Returns a field's name in the API's JSON form."""
    return re.sub(r"_(\w)", lambda found: found[1].upper(), name)
