"""Rules about placeholders, {{$...}}, which the platform fills in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from shardline.pipelines.check.ir import PARAMETER, PLACEHOLDER, at, list_at
from shardline.pipelines.check.pipeline import Task
from shardline.pipelines.check.registry import error

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


@error("SL521", Task, fix="use one of kfp.dsl's or of google_cloud_pipeline_components' placeholders")
def placeholder_exists(task: Task) -> Iterator[str]:
    """A placeholder is one that the platform fills in.

    Source: kfp.dsl 2.17, and google_cloud_pipeline_components 2.22, _placeholders.py.
    """
    for found in sorted({match[0] for text in _texts(task) for match in PLACEHOLDER.finditer(text)}):
        if not _KNOWN.fullmatch(found[3:-2]):
            yield f"nothing fills in {found}"


@error("SL522", Task, fix="name an input that the component has")
def placeholder_has_an_input(task: Task) -> Iterator[str]:
    """A placeholder names an input that is there.

    Source: kubeflow/pipelines, pipeline_spec.proto: PipelineContainerSpec, "Placeholders".
    """
    inputs = {**task.declared("parameters"), **task.inputs("parameters")}
    container = task.container
    texts = [*list_at(container, "command"), *list_at(container, "args")]
    for name in sorted({match[1] for text in texts for match in PARAMETER.finditer(text)} - set(inputs)):
        yield f"a placeholder names the input {name!r}, which component {task.component_name} does not have"


def _texts(task: Task) -> Iterator[str]:
    """Yields every text of a task that the platform fills in: its container, constants and defaults."""
    container = task.container
    yield from list_at(container, "command")
    yield from list_at(container, "args")
    for item in list_at(container, "env"):
        yield str(item.get("value", ""))
    values: list[Any] = [at(item).get("runtimeValue") for item in task.inputs("parameters").values()]
    values += [at(item).get("defaultValue") for item in task.declared("parameters").values()]
    for value in values:
        if "{{$" in str(value):
            # One text, in which nested texts have their quotes as they are.
            yield from _strings(value)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
