"""Rules about the launcher's payload: JSON in which the platform fills in parameters as they are."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardline.pipelines.check.ir import PARAMETER
from shardline.pipelines.check.job import Job
from shardline.pipelines.check.registry import error
from shardline.pipelines.check.rules.limits import ARGUMENT_BYTES

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
