"""Rules about the launcher's payload: JSON in which the platform fills in parameters as they are.

Rules about sizes and numbers.

Rules about placeholders, {{$...}}, which the platform fills in.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

from shardline.components.vertex.payload import at, list_at
from shardline.pipelines.check.job import Job, Pool
from shardline.pipelines.check.pipeline import PARAMETER, PLACEHOLDER, Executor, Task, without_unknown
from shardline.pipelines.check.registry import error

#: Linux: bytes of one argument of a process, with its final NUL.
ARGUMENT_BYTES = 128 * 1024
_TASK_BYTES = 131_072
_ARTIFACTS = 100
_VARIABLES = 100


@error("SL310", Executor, fix="move the source into the image and import it")
def argument_fits(executor: Executor) -> Iterator[str]:
    """Each argument of a container, a component's source among them, has less than 128 KiB.

    Source: execve(2), MAX_ARG_STRLEN: 131,072 bytes with the final NUL.
    """
    parts = [*list_at(executor.container, "command"), *list_at(executor.container, "args")]
    yield from _too_long(parts)


@error("SL311", Pool, fix="move the source into the image and import it")
def replica_argument_fits(pool: Pool) -> Iterator[str]:
    """Each argument of a replica has less than 128 KiB.

    Source: execve(2), MAX_ARG_STRLEN: 131,072 bytes with the final NUL.
    """
    yield from _too_long(pool.argv)


@error("SL312", Task, fix="pass files or artifacts instead of long values")
def task_inputs_fit(task: Task) -> Iterator[str]:
    """A task's parameters and artifacts have at most 131,072 bytes as JSON.

    Only what is known before the run is counted.

    Source: docs.cloud.google.com, Vertex AI quotas and limits, pipelines.
    """
    if not task.container:
        return
    known = {name: without_unknown(value) for name, value in task.values().items()}
    size = len(json.dumps(known, default=str).encode())
    if size > _TASK_BYTES:
        longest = max(known, key=lambda name: len(json.dumps(known[name], default=str)))
        yield f"the parameters have {size:,} bytes as JSON, most of them in {longest}"


@error("SL313", Task, fix="gather the artifacts in one directory, or split the task")
def task_artifacts_are_few(task: Task) -> Iterator[str]:
    """A task has at most 100 input and output artifacts.

    Source: docs.cloud.google.com, Vertex AI quotas and limits, pipelines.
    """
    count = len(task.declared("artifacts")) + len(at(task.component, "outputDefinitions", "artifacts"))
    if task.container and count > _ARTIFACTS:
        yield f"the task has {count} artifacts"


@error("SL314", Pool, fix="pass settings as arguments or in a file")
def variables_are_few(pool: Pool) -> Iterator[str]:
    """A container has at most 100 environment variables.

    Source: google.cloud.aiplatform_v1.types.ContainerSpec: env, "Maximum limit is 100".
    """
    if len(pool.env) > _VARIABLES:
        yield f"the pool sets {len(pool.env)} environment variables"


def _too_long(parts: list[str]) -> Iterator[str]:
    for part in parts:
        size = len(part.encode(errors="replace"))
        if size >= ARGUMENT_BYTES:
            yield f"an argument has {size:,} bytes: {part.strip()[:40]!r}..."


#: Parameters of GCPC's CustomTrainingJobOp (2.22).
JOB_PARAMETERS = frozenset(
    {
        "base_output_directory",
        "display_name",
        "enable_web_access",
        "encryption_spec_key_name",
        "labels",
        "location",
        "max_wait_duration",
        "network",
        "persistent_resource_id",
        "project",
        "psc_interface_config",
        "reserved_ip_ranges",
        "restart_job_on_worker_restart",
        "service_account",
        "strategy",
        "tensorboard",
        "timeout",
        "worker_pool_specs",
    }
)
_BREAKING = {'"': "a double quote", "\\": "a backslash"}
_LONGEST_NAME = 128


@error("SL301", Job, fix="check what the task's parameters put into the payload")
def payload_is_json(job: Job) -> Iterator[str]:
    """The launcher's payload is JSON once the parameters are in it.

    Source: google_cloud_pipeline_components, gcp_launcher/job_remote_runner.py: json.loads(payload).
    """
    if job.fault and not list(texts_keep_the_payload_whole(job)):
        yield f"the payload is no JSON: {job.fault}"


@error("SL302", Job, fix="leave double quotes and backslashes out of it")
def texts_keep_the_payload_whole(job: Job) -> Iterator[str]:
    """A text in the payload has neither double quotes nor backslashes.

    The platform pastes it between the quotes of the payload's JSON as it is.

    Source: google_cloud_pipeline_components, CustomTrainingJobOp: "display_name": "{{$.inputs...}}".
    """
    for name in sorted({match[1] for match in PARAMETER.finditer(job.template) if not match[2]}):
        value = job.task.value(name)
        # A list or a mapping goes in as JSON, which escapes what is in it.
        if not isinstance(value, str) or f"\"{{{{$.inputs.parameters['{name}']}}}}\"" not in job.template:
            continue
        found = [word for character, word in _BREAKING.items() if character in value]
        if found:
            yield f"{name} has {' and '.join(found)}: {value[:60]!r}"


@error("SL303", Job, fix="move sources and long lists into the image or into files")
def payload_fits_an_argument(job: Job) -> Iterator[str]:
    """The payload fits into one argument of a process.

    Source: execve(2), MAX_ARG_STRLEN: 131,072 bytes with the final NUL; the launcher gets --payload as one.
    """
    size = len(job.payload.encode(errors="replace"))
    if size >= ARGUMENT_BYTES:
        yield f"the payload has {size:,} bytes"


@error("SL304", Job, fix="give the job a display_name of 1 to 128 characters")
def display_name_fits(job: Job) -> Iterator[str]:
    """A job's display name has 1 to 128 characters.

    Source: google.cloud.aiplatform_v1.types.CustomJob: "The name can be up to 128 characters long".
    """
    name = job.content.get("display_name", "")
    if not job.fault and not name:
        yield "the job has no display_name"
    elif isinstance(name, str) and "{{$" not in name and len(name) > _LONGEST_NAME:
        yield f"display_name has {len(name)} characters"


@error("SL305", Job, fix="rename the component's parameter")
def parameters_do_not_replace_fields(job: Job) -> Iterator[str]:
    """A component's parameter is not called like one of the custom job's own.

    Source: google_cloud_pipeline_components, v1/custom_job/utils.py: the two sets are merged without a word.
    """
    for pool in job.pools[:1]:
        argv = pool.argv
        if "--function_to_execute" in argv[:-1]:
            function = argv[argv.index("--function_to_execute") + 1]
            clashes = sorted({name for part in argv for name in _parameters(part, function)} & JOB_PARAMETERS)
            if clashes:
                yield f"the component's parameter {', '.join(clashes)} takes the place of the job's own"


def _parameters(source: str, function: str) -> Iterator[str]:
    """Yields the names of a function's parameters, if the text is the Python source that defines it."""
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
