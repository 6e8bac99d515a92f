"""Rules about the pipeline itself: tasks and their inputs, retries, conditions, caching, and parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

from shardline.components.text import truncate
from shardline.components.vertex.forms import seconds
from shardline.components.vertex.payload import mapping_at, whole_number
from shardline.pipelines.check.pipeline import PARAMETER, UNKNOWN, Parameter, Pipeline, Task
from shardline.pipelines.check.registry import Found, rules
from shardline.pipelines.parameters import convert
from shardline.trainer.base.deserialize import did_you_mean
from shardline.trainer.base.errors import PipelineError


@rules(Pipeline)
def pipelines(pipeline: Pipeline) -> Found:
    """Schema, name and root of a pipeline, the order of its tasks, and the parameters of a run.

    SL501 error: A pipeline spec has schema version 2.
        Fix: compile the pipeline with KFP 2
        Source: PipelineJob.RuntimeConfig.
    SL502 error: A pipeline's name makes a valid job id.
        Fix: use at most 113 letters, digits and dashes, with a letter first
        Source: SDK, PipelineJob.
    SL508 error: No task waits for itself.
        Fix: break the cycle
        Source: pipeline_spec.proto.
    SL509 warning: A pipeline's default root is in Cloud Storage.
        Fix: write gs://BUCKET/PATH, or leave it out and set pipeline_root for the run
        Source: PipelineJob.RuntimeConfig.
    SL601 error: A run passes only parameters that the pipeline has.
        Fix: pass only parameters that the pipeline has
        Source: SDK, PipelineRuntimeConfigBuilder.
    """
    version = str(pipeline.spec.get("schemaVersion") or "")
    if not version.startswith("2."):
        yield "SL501", f"schemaVersion is {version!r}"
    slug = re.sub("[^-0-9a-z]+", "-", pipeline.name.lower()).strip("-")
    if not re.fullmatch(r"[a-z][-a-z0-9]{0,127}", f"{slug}-20261231235959"):  # as the SDK makes it
        yield "SL502", f"no job id can be made from the name {pipeline.name[:60]!r}"
    for name, component in [("root", pipeline.spec.get("root")), *pipeline.components.items()]:
        tasks = mapping_at(component, "dag", "tasks")
        try:
            TopologicalSorter({task: _upstream(mapping_at(tasks, task)) for task in tasks}).prepare()
        except CycleError as cycle:
            yield "SL508", f"{name}: {' -> '.join(cycle.args[1])}"
    root = pipeline.spec.get("defaultPipelineRoot")
    if root and not str(root).startswith("gs://"):
        yield "SL509", f"defaultPipelineRoot is {root!r}"
    known = [parameter.name for parameter in pipeline.parameters]
    for name in pipeline.given or ():
        if name not in known:
            hint = did_you_mean(name, known) or f"it has {', '.join(known) or 'none'}"
            yield "SL601", f"the pipeline has no parameter {name!r}; {hint}"


@rules(Task)
def references(task: Task) -> Found:
    """Component of a task, and its references to other tasks.

    SL503 error: A task's component exists and runs something.
    SL504 error: A task depends only on tasks of its own DAG.
        Fix: compile the pipeline again
        Source: pipeline_spec.proto.
    SL505 error: A task uses outputs that exist.
        Fix: use an output that the task has
        Source: pipeline_spec.proto.
    """
    label = str(task.component.get("executorLabel") or "")
    executors = mapping_at(task.pipeline.spec, "deploymentSpec", "executors")
    if task.component_name not in task.pipeline.components:
        yield "SL503", f"there is no component {task.component_name!r}"
    elif label and label not in executors:
        yield "SL503", f"there is no executor {label!r}"
    elif label and not any(mapping_at(executors, label).values()):
        yield "SL503", f"executor {label} runs nothing: it has neither a container nor an importer"
    elif not label and not task.component.get("dag"):
        yield "SL503", f"component {task.component_name} runs nothing"
    for name in sorted(_upstream(task.spec) - set(task.siblings)):
        yield "SL504", f"there is no task {name!r} in the same DAG"
    for kind, origin, key in _ORIGINS:
        for name, item in task.inputs(kind).items():
            source = mapping_at(item, origin)
            producer = str(source.get("producerTask", ""))
            if producer in task.siblings:
                component = str(mapping_at(task.siblings, producer, "componentRef").get("name", ""))
                outputs = mapping_at(task.pipeline.components, component, "outputDefinitions", kind)
                if str(source.get(key)) not in outputs:
                    yield "SL505", f"input {name}: task {producer} has no output {source.get(key)!r}"


@rules(Task)
def inputs(task: Task) -> Found:
    """Inputs of a task and of its component.

    SL506 error: A task gets every required input.
        Fix: pass it, or give it a default
        Source: pipeline_spec.proto.
    SL507 error: A task gets only inputs that its component has.
        Fix: remove it, or declare it in the component
        Source: pipeline_spec.proto.
    """
    for kind in ("parameters", "artifacts"):
        given, declared = task.inputs(kind), task.declared(kind)
        for name, declaration in declared.items():
            if _is_required(declaration) and name not in given and name != task.iterator_input:
                yield "SL506", f"the input {name} is missing"
        if task.component_name not in task.pipeline.components or task.iterator_input:
            continue
        for name, origin in given.items():
            # The compiler passes on the inputs that constants and resource limits name in placeholders.
            passed_on = name.startswith("pipelinechannel--") or PARAMETER.search(str(origin))
            if name not in declared and not passed_on:
                yield "SL507", f"component {task.component_name} has no input {name!r}"


#: Kinds of inputs, with the keys by which the IR refers to another task's output.
_ORIGINS = (
    ("parameters", "taskOutputParameter", "outputParameterKey"),
    ("artifacts", "taskOutputArtifact", "outputArtifactKey"),
)


def _upstream(task: Mapping[str, Any]) -> set[str]:
    """Returns the tasks that a task waits for or takes inputs from."""
    names = {str(name) for name in task.get("dependentTasks") or ()}
    for kind, origin, _ in _ORIGINS:
        for item in mapping_at(task, "inputs", kind).values():
            if producer := mapping_at(item, origin).get("producerTask"):
                names.add(str(producer))
    return names


def _is_required(declaration: Any) -> bool:
    found = mapping_at(declaration)
    return not found.get("isOptional") and found.get("defaultValue") is None


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

    SL511 error: A task's retries are constants.
        Fix: write numbers: retries are fixed when the pipeline is compiled
        Source: pipelines/configure-retries.
    SL512 warning: A condition compares numbers or booleans, not free text.
        Fix: let the task before it return a bool or a number, and compare that
        Source: KFP 2.17, local runs: such a condition may count as false.
    """
    policy = mapping_at(task.spec, "retryPolicy")
    count, factor = policy.get("maxRetryCount"), policy.get("backoffFactor")
    if count is not None and (whole_number(count) is None or (whole_number(count) or 0) < 0):
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


#: Types that a parameter has in IR 2.1; it was `type: STRING` up to 2.0.
_TYPES = ("STRING", "NUMBER_INTEGER", "NUMBER_DOUBLE", "BOOLEAN", "LIST", "STRUCT")


@rules(Parameter)
def declared_parameters(parameter: Parameter) -> Found:
    """Parameters that a pipeline declares.

    SL602 error: A value has its parameter's type.
        Fix: pass a value of the declared type
        Source: pipeline_spec.proto.
    SL603 error: A run passes every parameter that has no default.
        Fix: pass it: --param NAME=VALUE
        Source: pipeline_spec.proto.
    SL604 error: A default has its parameter's type.
        Fix: set a default of the declared type
        Source: pipeline_spec.proto.
    SL605 warning: A run can pass values of the parameter's type.
        Fix: annotate it with str, int, float, bool, list or dict
        Source: pipeline_spec.proto.
    """
    name, declaration, given = parameter.name, parameter.declaration, parameter.pipeline.given
    if given is not None and name in given:
        yield from _mistyped("SL602", parameter, given[name])
    elif given is not None and _is_required(declaration):
        yield "SL603", f"the parameter {name} has no default and is not set"
    if declaration.get("defaultValue") is not None:
        yield from _mistyped("SL604", parameter, declaration["defaultValue"])
    kind = declaration.get("parameterType")
    if kind is not None and kind not in _TYPES:
        yield "SL605", f"the parameter {name} is of type {kind}"


def _mistyped(code: str, parameter: Parameter, value: Any) -> Found:
    if parameter.declaration.get("parameterType") in _TYPES:
        try:
            convert(parameter.name, value, parameter.declaration)
        except PipelineError as error:
            yield code, str(error)
