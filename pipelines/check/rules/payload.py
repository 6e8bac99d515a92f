"""Rules about the launcher's payload, sizes, and placeholders ({{$...}}), which the platform fills in."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

from shardline.components.vertex.forms import MAX_DISPLAY_NAME
from shardline.components.vertex.payload import argv, list_at, mapping_at
from shardline.pipelines.check.job import Job, Pool
from shardline.pipelines.check.pipeline import PARAMETER, PLACEHOLDER, Executor, Task, without_unknown
from shardline.pipelines.check.registry import Found, rules

#: Limit of Linux for one argument of a process, in bytes, with its final NUL (MAX_ARG_STRLEN).
ARGUMENT_BYTES = 128 * 1024


@rules(Executor, Pool)
def arguments(part: Executor | Pool) -> Found:
    """Arguments of tasks and replicas.

    SL310 error: An argument of a container, component source included, has less than 128 KiB.
    SL311 error: An argument of a replica has less than 128 KiB.
        Fix: move the source into the image and import it
        Source: execve(2), MAX_ARG_STRLEN.
    """
    for argument in argv(part.container):
        size = len(argument.encode(errors="replace"))
        if size >= ARGUMENT_BYTES:
            code = "SL310" if isinstance(part, Executor) else "SL311"
            yield code, f"an argument has {size:,} bytes: {argument.strip()[:40]!r}..."


@rules(Task)
def inputs(task: Task) -> Found:
    """Inputs of tasks; only values that are known before the run count.

    SL312 error: A task's inputs have at most 131,072 bytes as JSON.
        Fix: pass files or artifacts instead of long values
        Source: quotas of Vertex AI Pipelines.
    SL313 error: A task has at most 100 input and output artifacts.
        Fix: put the artifacts into one directory, or split the task
        Source: quotas of Vertex AI Pipelines.
    """
    if not task.container:
        return
    known = {name: without_unknown(value) for name, value in task.values().items()}
    size = len(json.dumps(known, default=str).encode())
    if size > 131_072:
        longest = max(known, key=lambda name: len(json.dumps(known[name], default=str)))
        yield "SL312", f"the parameters have {size:,} bytes as JSON, most of them in {longest}"
    count = len(task.declared("artifacts")) + len(
        mapping_at(task.component, "outputDefinitions", "artifacts")
    )
    if count > 100:
        yield "SL313", f"the task has {count} artifacts"


#: Parameters of GCPC's CustomTrainingJobOp (2.22).
_JOB = (
    "base_output_directory display_name enable_web_access encryption_spec_key_name labels location "
    "max_wait_duration network persistent_resource_id project psc_interface_config reserved_ip_ranges "
    "restart_job_on_worker_restart service_account strategy tensorboard timeout worker_pool_specs"
)
JOB_PARAMETERS = frozenset(_JOB.split())
_BREAKING = {'"': "a double quote", "\\": "a backslash"}


@rules(Job)
def payload(job: Job) -> Found:
    """Payload of a custom job. The platform inserts a text between the quotes of the JSON unescaped.

    SL301 error: The payload is JSON once the parameters are filled in.
        Fix: check what the task's parameters put into the payload
        Source: GCPC, job_remote_runner.py.
    SL302 error: A string in the payload has no double quotes or backslashes.
        Fix: remove double quotes and backslashes
        Source: GCPC, CustomTrainingJobOp.
    SL303 error: The payload has less than 128 KiB.
        Fix: move sources and long lists into the image or into files
        Source: execve(2), MAX_ARG_STRLEN.
    SL304 error: A job's display name has 1 to 128 characters.
        Fix: set a display_name of 1 to 128 characters
        Source: CustomJob.
    SL305 error: A component's parameter has none of the custom job's names.
        Fix: rename the component's parameter
        Source: GCPC, custom_job/utils.py.
    """
    broken = list(_breaking_texts(job))
    if job.fault and not broken:
        yield "SL301", f"the payload is not JSON: {job.fault}"
    for why in broken:
        yield "SL302", why
    size = len(job.payload.encode(errors="replace"))
    if size >= ARGUMENT_BYTES:
        yield "SL303", f"the payload has {size:,} bytes"
    name = job.content.get("display_name", "")
    if not job.fault and not name:
        yield "SL304", "the job has no display_name"
    elif isinstance(name, str) and "{{$" not in name and len(name) > MAX_DISPLAY_NAME:
        yield "SL304", f"display_name has {len(name)} characters"
    parts = job.pools[0].argv if job.pools else []
    if "--function_to_execute" in parts[:-1]:
        function = parts[parts.index("--function_to_execute") + 1]
        names = {name for part in parts for name in _parameters(part, function)}
        if clashes := sorted(names & JOB_PARAMETERS):
            yield "SL305", f"the component's parameter {', '.join(clashes)} overrides the job's own"


def _breaking_texts(job: Job) -> Iterator[str]:
    for name in sorted({match[1] for match in PARAMETER.finditer(job.template) if not match[2]}):
        value = job.task.value(name)
        # A list or a mapping goes in as JSON, which escapes its texts.
        if not isinstance(value, str) or f"\"{{{{$.inputs.parameters['{name}']}}}}\"" not in job.template:
            continue
        found = [word for character, word in _BREAKING.items() if character in value]
        if found:
            yield f"{name} has {' and '.join(found)}: {value[:60]!r}"


def _parameters(source: str, function: str) -> Iterator[str]:
    """Yields the names of a function's parameters, if the text is Python source that defines the function."""
    if f"def {function}(" not in source:
        return
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            yield from (argument.arg for argument in [*node.args.args, *node.args.kwonlyargs])


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

    SL521 error: The platform fills in the placeholder.
        Fix: use a placeholder of kfp.dsl or google_cloud_pipeline_components
        Source: kfp.dsl 2.17; GCPC.
    SL522 error: A placeholder names an input of its component.
        Fix: name an input that the component has
        Source: pipeline_spec.proto.
    """
    for found in sorted({match[0] for text in _texts(task) for match in PLACEHOLDER.finditer(text)}):
        if not _KNOWN.fullmatch(found[3:-2]):
            yield "SL521", f"the platform does not fill in {found}"
    known = {*task.declared("parameters"), *task.inputs("parameters")}
    named = {match[1] for text in argv(task.container) for match in PARAMETER.finditer(text)}
    for name in sorted(named - known):
        component = f"component {task.component_name}"
        yield "SL522", f"a placeholder names the input {name!r}, which {component} does not have"


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
