"""Rules about the pipeline itself: tasks, inputs, conditions, parameters, and the launcher's payload."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

from shardline.components.vertex.forms import LONGEST_NAME
from shardline.components.vertex.payload import argv, at
from shardline.pipelines.check.job import Job, Pool
from shardline.pipelines.check.pipeline import PARAMETER, Executor, Parameter, Pipeline, Task, without_unknown
from shardline.pipelines.check.registry import Found, rules
from shardline.pipelines.parameters import convert
from shardline.trainer.errors import PipelineError
from shardline.trainer.records import did_you_mean

_JOB_ID = re.compile(r"[a-z][-a-z0-9]{0,127}")
#: What the SDK puts behind the pipeline's name to make a job's id: "-20261231235959".
_TIMESTAMP = 15


@rules(Pipeline)
def pipelines(pipeline: Pipeline) -> Found:
    """Schema and name of a pipeline, the order of its tasks, and the parameters that a run gives.

    SL501 error: A pipeline spec is of schema 2.
        Fix: compile the pipeline with KFP 2
        Source: google.cloud.aiplatform_v1.types.PipelineJob.RuntimeConfig: parameters by schema version.
    SL502 error: A pipeline's name makes a valid job id.
        Fix: name it with letters, digits and dashes, beginning with a letter; 113 at most
        Source: google.cloud.aiplatform.PipelineJob: the id is "{name}-{timestamp}" and must match
            [a-z][-a-z0-9]{0,127}.
    SL508 error: No task waits for itself.
        Fix: break the circle
        Source: kubeflow/pipelines, pipeline_spec.proto: a DagSpec is acyclic.
    SL601 error: A run gives only parameters that the pipeline has.
        Fix: give only parameters that the pipeline has
        Source: google.cloud.aiplatform, PipelineRuntimeConfigBuilder: it raises on a name it does not know.
    """
    version = str(pipeline.spec.get("schemaVersion") or "")
    if not version.startswith("2."):
        yield "SL501", f"schemaVersion is {version!r}"
    slug = re.sub("[^-0-9a-z]+", "-", pipeline.name.lower()).strip("-")
    if not _JOB_ID.fullmatch(slug + "-" * _TIMESTAMP):
        yield "SL502", f"no job id can be made from the name {pipeline.name[:60]!r}"
    for name, component in [("root", pipeline.spec.get("root")), *pipeline.components.items()]:
        tasks = at(component, "dag", "tasks")
        try:
            TopologicalSorter({task: _upstream(at(tasks, task)) for task in tasks}).prepare()
        except CycleError as cycle:
            yield "SL508", f"{name}: {' -> '.join(cycle.args[1])}"
    known = [parameter.name for parameter in pipeline.parameters]
    for name in pipeline.given or ():
        if name not in known:
            hint = did_you_mean(name, known) or f"it has {', '.join(known) or 'none'}"
            yield "SL601", f"the pipeline has no parameter {name!r}; {hint}"


@rules(Task)
def references(task: Task) -> Found:
    """What a task runs, and what it takes from other tasks.

    SL503 error: A task's component is there, and so is what it runs.
        Fix: compile the pipeline again
        Source: kubeflow/pipelines, pipeline_spec.proto: ComponentRef, ComponentSpec.executor_label.
    SL504 error: The tasks that a task waits for or takes inputs from are in its DAG.
        Fix: compile the pipeline again
        Source: kubeflow/pipelines, pipeline_spec.proto: PipelineTaskSpec.dependent_tasks, producer_task.
    SL505 error: An output that a task takes is one that its producer has.
        Fix: take one of the outputs that the task has
        Source: kubeflow/pipelines, pipeline_spec.proto: TaskOutputParameterSpec, TaskOutputArtifactSpec.
    """
    label = str(task.component.get("executorLabel") or "")
    executors = at(task.pipeline.spec, "deploymentSpec", "executors")
    if task.component_name not in task.pipeline.components:
        yield "SL503", f"there is no component {task.component_name!r}"
    elif label and label not in executors:
        yield "SL503", f"there is no executor {label!r}"
    elif label and not any(at(executors, label).values()):
        yield "SL503", f"executor {label} runs nothing: it has neither a container nor an importer"
    elif not label and not task.component.get("dag"):
        yield "SL503", f"component {task.component_name} runs nothing"
    for name in sorted(_upstream(task.spec) - set(task.siblings)):
        yield "SL504", f"there is no task {name!r} in the same DAG"
    for kind, origin, key in _ORIGINS:
        for name, item in task.inputs(kind).items():
            source = at(item, origin)
            producer = str(source.get("producerTask", ""))
            if producer in task.siblings:
                component = str(at(task.siblings, producer, "componentRef").get("name", ""))
                outputs = at(task.pipeline.components, component, "outputDefinitions", kind)
                if str(source.get(key)) not in outputs:
                    yield "SL505", f"input {name}: task {producer} has no output {source.get(key)!r}"


@rules(Task)
def inputs(task: Task) -> Found:
    """Inputs of a task and of its component.

    SL506 error: A task gets every input that its component demands.
        Fix: pass it, or give it a default
        Source: kubeflow/pipelines, pipeline_spec.proto: ComponentInputsSpec, is_optional and default_value.
    SL507 error: A task gets no input that its component does not have.
        Fix: leave it out, or declare it in the component
        Source: kubeflow/pipelines, pipeline_spec.proto: ComponentInputsSpec.
    """
    for kind in ("parameters", "artifacts"):
        given, declared = task.inputs(kind), task.declared(kind)
        for name, declaration in declared.items():
            if _is_required(declaration) and name not in given and name != task.iterator_input:
                yield "SL506", f"the input {name} is not given"
        if task.component_name not in task.pipeline.components or task.iterator_input:
            continue
        for name, origin in given.items():
            # The compiler passes on what constants and limits of resources name in placeholders.
            passed_on = name.startswith("pipelinechannel--") or PARAMETER.search(str(origin))
            if name not in declared and not passed_on:
                yield "SL507", f"component {task.component_name} has no input {name!r}"


#: Kinds of inputs, and how the IR says that one is another task's output.
_ORIGINS = (
    ("parameters", "taskOutputParameter", "outputParameterKey"),
    ("artifacts", "taskOutputArtifact", "outputArtifactKey"),
)


def _upstream(task: Mapping[str, Any]) -> set[str]:
    """Returns the tasks that a task waits for or takes inputs from."""
    names = {str(name) for name in task.get("dependentTasks") or ()}
    for kind, origin, _ in _ORIGINS:
        for item in at(task, "inputs", kind).values():
            if producer := at(item, origin).get("producerTask"):
                names.add(str(producer))
    return names


def _is_required(declaration: Any) -> bool:
    found = at(declaration)
    return not found.get("isOptional") and found.get("defaultValue") is None


_VALUE = r"inputs\.parameter_values\['([^']+)'\]"
#: A parameter that is compared with a text, but for 'true' and 'false', which are as good as a bool.
_TEXT_COMPARED = re.compile(
    rf"{_VALUE}\s*[=!]=\s*'(?!(?i:true|false)')|(?<![Tt]rue)(?<![Ff]alse)'\s*[=!]=\s*{_VALUE}"
)


@rules(Task)
def policies(task: Task) -> Found:
    """Conditions of a task.

    A text with an apostrophe makes a condition that cannot be evaluated; kfp.local then takes it for false,
    and the run succeeds without the tasks behind it.

    SL512 warning: A condition compares numbers or booleans, not free text.
        Fix: let the task before it return a bool or a number, and compare that
        Source: kfp 2.17, local/orchestrator.
    """
    for match in _TEXT_COMPARED.finditer(at(task.spec, "triggerPolicy").get("condition") or ""):
        name = (match[1] or match[2]).removeprefix("pipelinechannel--")
        yield "SL512", f"the condition compares the text {name}"


#: Types that a parameter has in IR 2.1; it was `type: STRING` up to 2.0.
_TYPES = ("STRING", "NUMBER_INTEGER", "NUMBER_DOUBLE", "BOOLEAN", "LIST", "STRUCT")


@rules(Parameter)
def declared_parameters(parameter: Parameter) -> Found:
    """Parameters that a pipeline declares.

    SL602 error: A value is of the type that its parameter declares.
        Fix: give a value of the declared type
        Source: kubeflow/pipelines, pipeline_spec.proto: ParameterType; the SDK does not compare types.
    SL603 error: A run gives every parameter that has no default.
        Fix: give it: --param NAME=VALUE
        Source: kubeflow/pipelines, pipeline_spec.proto: ComponentInputsSpec; the SDK does not look.
    SL604 error: A default is of the type that its parameter declares.
        Fix: give the parameter a default of its type
        Source: kubeflow/pipelines, pipeline_spec.proto: ComponentInputsSpec.ParameterSpec.
    """
    name, declaration, given = parameter.name, parameter.declaration, parameter.pipeline.given
    if given is not None and name in given:
        yield from _mistyped("SL602", parameter, given[name])
    elif given is not None and _is_required(declaration):
        yield "SL603", f"the parameter {name} has no default and is not given"
    if declaration.get("defaultValue") is not None:
        yield from _mistyped("SL604", parameter, declaration["defaultValue"])


def _mistyped(code: str, parameter: Parameter, value: Any) -> Found:
    if parameter.declaration.get("parameterType") in _TYPES:
        try:
            convert(parameter.name, value, parameter.declaration)
        except PipelineError as error:
            yield code, str(error)


#: Linux: bytes of one argument of a process, with its final NUL.
ARGUMENT_BYTES = 128 * 1024
_TASK_BYTES = 131_072


@rules(Executor, Pool)
def arguments(part: Executor | Pool) -> Found:
    """Arguments of tasks and replicas.

    SL310 error: Each argument of a container, a component's source among them, has less than 128 KiB.
    SL311 error: Each argument of a replica has less than 128 KiB.
        Fix: move the source into the image and import it
        Source: execve(2), MAX_ARG_STRLEN: 131,072 bytes with the final NUL.
    """
    for argument in argv(part.container):
        size = len(argument.encode(errors="replace"))
        if size >= ARGUMENT_BYTES:
            code = "SL310" if isinstance(part, Executor) else "SL311"
            yield code, f"an argument has {size:,} bytes: {argument.strip()[:40]!r}..."


@rules(Task)
def sizes(task: Task) -> Found:
    """Inputs of tasks; only what is known before the run is counted.

    SL312 error: A task's parameters and artifacts have at most 131,072 bytes as JSON.
        Fix: pass files or artifacts instead of long values
        Source: docs.cloud.google.com, Vertex AI quotas and limits, pipelines.
    """
    if not task.container:
        return
    known = {name: without_unknown(value) for name, value in task.values().items()}
    size = len(json.dumps(known, default=str).encode())
    if size > _TASK_BYTES:
        longest = max(known, key=lambda name: len(json.dumps(known[name], default=str)))
        yield "SL312", f"the parameters have {size:,} bytes as JSON, most of them in {longest}"


_BREAKING = {'"': "a double quote", "\\": "a backslash"}


@rules(Job)
def payload(job: Job) -> Found:
    """Payload of a custom job. The platform pastes a text between the quotes of its JSON as it is.

    SL301 error: The launcher's payload is JSON once the parameters are in it.
        Fix: check what the task's parameters put into the payload
        Source: google_cloud_pipeline_components, gcp_launcher/job_remote_runner.py: json.loads(payload).
    SL302 error: A text in the payload has neither double quotes nor backslashes.
        Fix: leave double quotes and backslashes out of it
        Source: google_cloud_pipeline_components, CustomTrainingJobOp: "display_name": "{{$.inputs...}}".
    SL303 error: The payload fits into one argument of a process.
        Fix: move sources and long lists into the image or into files
        Source: execve(2), MAX_ARG_STRLEN: 131,072 bytes with the final NUL; the launcher gets --payload as
            one.
    SL304 error: A job's display name has 1 to 128 characters.
        Fix: give the job a display_name of 1 to 128 characters
        Source: google.cloud.aiplatform_v1.types.CustomJob: "The name can be up to 128 characters long".
    """
    broken = list(_breaking_texts(job))
    if job.fault and not broken:
        yield "SL301", f"the payload is no JSON: {job.fault}"
    for why in broken:
        yield "SL302", why
    size = len(job.payload.encode(errors="replace"))
    if size >= ARGUMENT_BYTES:
        yield "SL303", f"the payload has {size:,} bytes"
    name = job.content.get("display_name", "")
    if not job.fault and not name:
        yield "SL304", "the job has no display_name"
    elif isinstance(name, str) and "{{$" not in name and len(name) > LONGEST_NAME:
        yield "SL304", f"display_name has {len(name)} characters"


def _breaking_texts(job: Job) -> Iterator[str]:
    for name in sorted({match[1] for match in PARAMETER.finditer(job.template) if not match[2]}):
        value = job.task.value(name)
        # A list or a mapping goes in as JSON, which escapes what is in it.
        if not isinstance(value, str) or f"\"{{{{$.inputs.parameters['{name}']}}}}\"" not in job.template:
            continue
        found = [word for character, word in _BREAKING.items() if character in value]
        if found:
            yield f"{name} has {' and '.join(found)}: {value[:60]!r}"
