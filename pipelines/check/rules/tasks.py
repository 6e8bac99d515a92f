"""Rules about tasks: retries, conditions, caching, and placeholders, {{$...}}, that the platform fills in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from shardline.components.text import truncate
from shardline.components.vertex.forms import seconds
from shardline.components.vertex.payload import argv, list_at, mapping_at, whole_number
from shardline.pipelines.check.pipeline import PARAMETER, PLACEHOLDER, UNKNOWN, Task
from shardline.pipelines.check.registry import Found, rules

_VALUE = r"inputs\.parameter_values\['([^']+)'\]"
#: A parameter that is compared with a text other than 'true' and 'false', which work as a bool does.
_TEXT_COMPARED = re.compile(
    rf"{_VALUE}\s*[=!]=\s*'(?!(?i:true|false)')|(?<![Tt]rue)(?<![Ff]alse)'\s*[=!]=\s*{_VALUE}"
)
#: A location or a query: it stays the same when its data changes.
_LOCATION = re.compile(
    r"(?:[a-z]+:)?(?:gs|bq|s3|https?|hdfs)://|(?:[a-z]+:)?/gcs/"
    r"|(?is:\s*(?:--|(?:select|with|create|insert|merge)\b).*\bfrom\b)"
)
_TABLE = re.compile(r"[\w-]+[.:]\w+\.\w+")
#: Names of inputs that change when the data does.
_FINGERPRINT = re.compile(r"(^|[_-])(time|timestamp|date|day|version|fingerprint|digest|hash|run_id)([_-]|$)")
#: Names of inputs that are paths for writing, not for reading.
_WRITTEN = re.compile(
    r"(^|_)(out|output|outputs|dest|destination|target|root|staging|tmp|temp|log|logs|export)(_|$)"
)


@rules(Task)
def policies(task: Task) -> Found:
    """Retries and conditions of a task.

    A condition on a text with an apostrophe cannot be evaluated; kfp.local then takes it for false, and the
    run succeeds without the tasks that depend on it.

    SL511 error: A task's retries are constants, and at most 10.
        Fix: write numbers, at most 10 retries; they are fixed when the pipeline is compiled
        Source: pipelines/configure-retries.
    SL512 warning: A condition compares numbers or booleans, not free text.
        Fix: let the task before it return a bool or a number, and compare that
        Source: KFP 2.17, local runs: such a condition may count as false.
    """
    policy = mapping_at(task.spec, "retryPolicy")
    count, factor = policy.get("maxRetryCount"), policy.get("backoffFactor")
    if count is not None and not 0 <= (-1 if (number := whole_number(count)) is None else number) <= 10:
        yield "SL511", f"the number of retries is {count!r}"
    if factor is not None and (isinstance(factor, bool) or not isinstance(factor, int | float)):
        yield "SL511", f"the backoff factor is {factor!r}"
    for key in ("backoffDuration", "backoffMaxDuration"):
        found = policy.get(key)
        if found is not None and seconds(str(found)) is None:
            yield "SL511", f"{key} is {found!r}"
    for match in _TEXT_COMPARED.finditer(mapping_at(task.spec, "triggerPolicy").get("condition") or ""):
        name = (match[1] or match[2]).removeprefix("pipelinechannel--")
        yield "SL512", f"the condition compares the text {name}"


@rules(Task)
def caching(task: Task) -> Found:
    """Caching of a task.

    SL513 warning: A cached task that reads a location has an input that changes with the data.
        Fix: call set_caching_options(False), or pass a fingerprint of the data
        Source: pipelines/configure-caching.
    """
    if not task.container or not mapping_at(task.spec, "cachingOptions").get("enableCache"):
        return
    if task.inputs("artifacts") or _may_change(task):
        return
    for name, value in task.values().items():
        if not isinstance(value, str) or _WRITTEN.search(name):
            continue
        if _LOCATION.match(value) or ("table" in name and _TABLE.fullmatch(value)):
            shown = truncate(" ".join(value.split()), 60)
            yield (
                "SL513",
                f"cached with {name} = {shown!r}: a later run on new data reuses the old result",
            )
            return


def _may_change(task: Task) -> bool:
    """Whether an input is computed in the run, is the run's name or time, or a fingerprint."""
    return any(
        _FINGERPRINT.search(name)
        or (task.value(name) is UNKNOWN and not _is_passed_down(task, name))
        or re.search(r"\{\{\$\.pipeline_(job|task)_", str(task.value(name)))
        for name in task.inputs("parameters")
    )


def _is_passed_down(task: Task, name: str) -> bool:
    """Whether an input is a parameter of the pipeline, directly or through outer DAGs."""
    outer = mapping_at(task.inputs("parameters"), name).get("componentInputParameter")
    if not isinstance(outer, str):
        return False
    return _is_passed_down(task.parent, outer) if task.parent else True


#: kfp.dsl 2.17 and google_cloud_pipeline_components 2.22 (_placeholders.py).
_RUN = (
    "job_create_time_utc job_id job_name job_resource_name job_schedule_time_utc "
    "job_schedule_time_utc_placeholder job_uuid root task_id task_name task_uuid google_cloud_location "
    "google_cloud_project_id service_account network persistent_resource_id encryption_key_name"
)
_KEY = r"\['[^']+'\]"
_KNOWN = re.compile(
    r"(\.json_escape\[\d\])?"
    rf"|\.inputs\.parameters{_KEY}(\.json_escape\[\d\])?"
    rf"|\.inputs\.artifacts{_KEY}(\.(uri|path|value|name|type|metadata({_KEY})*))?(\.json_escape\[\d\])?"
    rf"|\.outputs\.parameters{_KEY}\.output_file"
    rf"|\.outputs\.artifacts{_KEY}(\.(uri|path|value|name|type|metadata({_KEY})*))?"
    r"|\.outputs\.output_file|\.outputs\.output_metadata_uri|\.outputMetadataUri|\.workspace_path"
    rf"|\.pipeline_({_RUN.replace(' ', '|')})(\.json_escape\[\d\])?"
)


@rules(Task)
def placeholders(task: Task) -> Found:
    """Placeholders.

    SL521 error: The platform fills in every placeholder.
        Fix: use a placeholder of kfp.dsl or google_cloud_pipeline_components, or an input of the component
        Source: kfp.dsl 2.17; GCPC; pipeline_spec.proto.
    """
    for found in sorted({match[0] for text in _texts(task) for match in PLACEHOLDER.finditer(text)}):
        if not _KNOWN.fullmatch(found[3:-2]):
            yield "SL521", f"the platform does not fill in {found}"
    known = {*task.declared("parameters"), *task.inputs("parameters")}
    named = {match[1] for text in argv(task.container) for match in PARAMETER.finditer(text)}
    for name in sorted(named - known):
        component = f"component {task.component_name}"
        yield "SL521", f"a placeholder names the input {name!r}, which {component} does not have"


def _texts(task: Task) -> Iterator[str]:
    """Yields every text of a task that the platform fills in: its container, constants and defaults."""
    yield from argv(task.container)
    for item in list_at(task.container, "env"):
        yield str(item.get("value", ""))
    values: list[Any] = [mapping_at(item).get("runtimeValue") for item in task.inputs("parameters").values()]
    values += [mapping_at(item).get("defaultValue") for item in task.declared("parameters").values()]
    for value in values:
        if "{{$" in str(value):
            # Each text by itself: as one text, its quotes would be escaped.
            yield from _strings(value)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
