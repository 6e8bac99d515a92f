"""Rules about how tasks, components and their inputs belong together.

Rules about how tasks are retried, gated and cached.

Rules about the pipeline's parameters and the values that a run gives them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

from shardline.components.vertex.payload import at, whole
from shardline.pipelines.check.pipeline import PARAMETER, UNKNOWN, Parameter, Pipeline, Task
from shardline.pipelines.check.registry import error, warning
from shardline.pipelines.parameters import check_parameters
from shardline.trainer.errors import PipelineError

_JOB_ID = re.compile(r"[a-z][-a-z0-9]{0,127}")
#: What the SDK puts behind the pipeline's name to make a job's id: "-20261231235959".
_TIMESTAMP = 15


@error("SL501", Pipeline, fix="compile the pipeline with KFP 2")
def schema_is_supported(pipeline: Pipeline) -> Iterator[str]:
    """A pipeline spec is of schema 2.

    Source: google.cloud.aiplatform_v1.types.PipelineJob.RuntimeConfig: parameters by schema version.
    """
    version = str(pipeline.spec.get("schemaVersion") or "")
    if not version.startswith("2."):
        yield f"schemaVersion is {version!r}"


@error("SL502", Pipeline, fix="name it with letters, digits and dashes, beginning with a letter; 113 at most")
def name_makes_a_job_id(pipeline: Pipeline) -> Iterator[str]:
    """A pipeline's name makes a valid job id.

    Source: google.cloud.aiplatform.PipelineJob: the id is "{name}-{timestamp}" and must match
    [a-z][-a-z0-9]{0,127}.
    """
    slug = re.sub("[^-0-9a-z]+", "-", pipeline.name.lower()).strip("-")
    if not _JOB_ID.fullmatch(slug + "-" * _TIMESTAMP):
        yield f"no job id can be made from the name {pipeline.name[:60]!r}"


@error("SL503", Task, fix="compile the pipeline again")
def component_exists(task: Task) -> Iterator[str]:
    """A task's component is there, and so is what it runs.

    Source: kubeflow/pipelines, pipeline_spec.proto: ComponentRef, ComponentSpec.executor_label.
    """
    label = str(task.component.get("executorLabel") or "")
    if task.component_name not in task.pipeline.components:
        yield f"there is no component {task.component_name!r}"
    elif label and label not in at(task.pipeline.spec, "deploymentSpec", "executors"):
        yield f"there is no executor {label!r}"
    elif not label and not task.component.get("dag"):
        yield f"component {task.component_name} runs nothing"


@error("SL504", Task, fix="compile the pipeline again")
def upstream_exists(task: Task) -> Iterator[str]:
    """The tasks that a task waits for or takes inputs from are in its DAG.

    Source: kubeflow/pipelines, pipeline_spec.proto: PipelineTaskSpec.dependent_tasks, producer_task.
    """
    for name in sorted(_upstream(task.spec) - set(task.siblings)):
        yield f"there is no task {name!r} in the same DAG"


@error("SL505", Task, fix="take one of the outputs that the task has")
def output_exists(task: Task) -> Iterator[str]:
    """An output that a task takes is one that its producer has.

    Source: kubeflow/pipelines, pipeline_spec.proto: TaskOutputParameterSpec, TaskOutputArtifactSpec.
    """
    for kind, origin, key in (
        ("parameters", "taskOutputParameter", "outputParameterKey"),
        ("artifacts", "taskOutputArtifact", "outputArtifactKey"),
    ):
        for name in task.inputs(kind):
            source = at(task.inputs(kind), name, origin)
            producer = str(source.get("producerTask", ""))
            if producer in task.siblings:
                component = str(at(task.siblings, producer, "componentRef").get("name", ""))
                outputs = at(task.pipeline.components, component, "outputDefinitions", kind)
                if str(source.get(key)) not in outputs:
                    yield f"input {name}: task {producer} has no output {source.get(key)!r}"


@error("SL506", Task, fix="pass it, or give it a default")
def required_inputs_are_given(task: Task) -> Iterator[str]:
    """A task gets every input that its component demands.

    Source: kubeflow/pipelines, pipeline_spec.proto: ComponentInputsSpec, is_optional and default_value.
    """
    for kind in ("parameters", "artifacts"):
        for name, declaration in task.declared(kind).items():
            required = (
                not (declaration or {}).get("isOptional")
                and at({"_": declaration}, "_").get("defaultValue") is None
            )
            if required and name not in task.inputs(kind) and name != task.iterator_input:
                yield f"the input {name} is not given"


@error("SL507", Task, fix="leave it out, or declare it in the component")
def given_inputs_are_declared(task: Task) -> Iterator[str]:
    """A task gets no input that its component does not have.

    Source: kubeflow/pipelines, pipeline_spec.proto: ComponentInputsSpec.
    """
    if task.component_name not in task.pipeline.components or task.iterator_input:
        return
    for kind in ("parameters", "artifacts"):
        for name, origin in task.inputs(kind).items():
            # The compiler passes on what constants and limits of resources name in placeholders.
            passed_on = name.startswith("pipelinechannel--") or PARAMETER.search(str(origin))
            if name not in task.declared(kind) and not passed_on:
                yield f"component {task.component_name} has no input {name!r}"


@error("SL508", Pipeline, fix="break the circle")
def tasks_have_an_order(pipeline: Pipeline) -> Iterator[str]:
    """No task waits for itself.

    Source: kubeflow/pipelines, pipeline_spec.proto: a DagSpec is acyclic.
    """
    spec = pipeline.spec
    for name, component in [("root", spec.get("root")), *pipeline.components.items()]:
        tasks = at({"_": component}, "_", "dag", "tasks")
        try:
            TopologicalSorter({task: _upstream(at(tasks, task)) for task in tasks}).prepare()
        except CycleError as cycle:
            yield f"{name}: {' -> '.join(cycle.args[1])}"


@warning("SL509", Pipeline, fix="write gs://BUCKET/PATH, or leave it out and give pipeline_root to the run")
def root_is_in_a_bucket(pipeline: Pipeline) -> Iterator[str]:
    """A pipeline's default root is a Cloud Storage location.

    Source: google.cloud.aiplatform_v1.types.PipelineJob.RuntimeConfig: gcs_output_directory.
    """
    root = pipeline.spec.get("defaultPipelineRoot")
    if root and not str(root).startswith("gs://"):
        yield f"defaultPipelineRoot is {root!r}"


def _upstream(task: Mapping[str, Any]) -> set[str]:
    """Returns the tasks that a task waits for or takes inputs from."""
    names = {str(name) for name in task.get("dependentTasks") or ()}
    for kind, origin in (("parameters", "taskOutputParameter"), ("artifacts", "taskOutputArtifact")):
        for item in at(task, "inputs", kind).values():
            producer = at({"_": item}, "_", origin).get("producerTask")
            if producer:
                names.add(str(producer))
    return names


_SECONDS = re.compile(r"\d+(\.\d+)?s")
_VALUE = r"inputs\.parameter_values\['([^']+)'\]"
#: A parameter that is compared with a text, but for 'true' and 'false', which are as good as a bool.
_TEXT_COMPARED = re.compile(
    rf"{_VALUE}\s*[=!]=\s*'(?!(?i:true|false)')|(?<![Tt]rue)(?<![Ff]alse)'\s*[=!]=\s*{_VALUE}"
)
#: A location or a query: it stays the same while what it stands for changes.
_LOCATION = re.compile(
    r"(?:[a-z]+:)?(?:gs|bq|s3|https?|hdfs)://|(?:[a-z]+:)?/gcs/"
    r"|(?is:\s*(?:--|(?:select|with|create|insert|merge)\b).*\bfrom\b)"
)
_TABLE = re.compile(r"[\w-]+[.:]\w+\.\w+")
#: Names of inputs that change when the data does.
_FINGERPRINT = re.compile(r"(^|[_-])(time|timestamp|date|day|version|fingerprint|digest|hash|run_id)([_-]|$)")
#: Names of inputs that say where something is written, not read.
_WRITTEN = re.compile(
    r"(^|_)(out|output|outputs|dest|destination|target|root|staging|tmp|temp|log|logs|export)(_|$)"
)
_OWN_PLACEHOLDERS = re.compile(r"\{\{\$\.pipeline_(job|task)_")


@error("SL511", Task, fix="write numbers: retries are fixed when the pipeline is compiled")
def retries_are_constant(task: Task) -> Iterator[str]:
    """A task's retries are constants.

    Source: docs.cloud.google.com, pipelines/configure-retries: "These values must be available when you
    compile the pipeline".
    """
    policy = task.spec.get("retryPolicy") or {}
    count = policy.get("maxRetryCount")
    if count is not None and (whole(count) is None or (whole(count) or 0) < 0):
        yield f"the number of retries is {count!r}"
    factor = policy.get("backoffFactor")
    if factor is not None and (isinstance(factor, bool) or not isinstance(factor, int | float)):
        yield f"the backoff factor is {factor!r}"
    for key in ("backoffDuration", "backoffMaxDuration"):
        found = policy.get(key)
        if found is not None and not _SECONDS.fullmatch(str(found)):
            yield f"{key} is {found!r}"


@warning("SL512", Task, fix="let the task before it return a bool or a number, and compare that")
def condition_is_no_text(task: Task) -> Iterator[str]:
    """A condition compares numbers or booleans, not free text.

    A text with an apostrophe makes it an expression that cannot be evaluated; kfp.local then takes it for
    false, and the run succeeds without the tasks behind it.

    Source: kfp 2.17, local/orchestrator.
    """
    condition = (task.spec.get("triggerPolicy") or {}).get("condition") or ""
    for match in _TEXT_COMPARED.finditer(condition):
        name = match[1] or match[2]
        yield f"the condition compares the text {name.removeprefix('pipelinechannel--')}"


@warning("SL513", Task, fix="set_caching_options(False), or pass a fingerprint of the data as an input")
def changing_data_is_not_cached(task: Task) -> Iterator[str]:
    """A task that reads a location is not cached, unless an input changes when the data does.

    Source: docs.cloud.google.com, pipelines/configure-caching: the cache key is the inputs' values, the
    image and the command; what a location holds is not part of it.
    """
    if not task.container or not (task.spec.get("cachingOptions") or {}).get("enableCache"):
        return
    if task.inputs("artifacts") or _may_change(task):
        return
    for name, value in task.values().items():
        if isinstance(value, str) and _is_location(name, value) and not _WRITTEN.search(name):
            yield f"cached with {name} = {_short(value)}: a later run on new data reuses the old result"
            return


def _may_change(task: Task) -> bool:
    """Whether some input is computed in the run, is the run's own name or time, or a fingerprint."""
    passed: dict[str, Any] = task.inputs("parameters")
    return any(
        _FINGERPRINT.search(name)
        or (task.value(name) is UNKNOWN and not _is_passed_down(task, name))
        or _OWN_PLACEHOLDERS.search(str(task.value(name)))
        for name in passed
    )


def _is_location(name: str, value: str) -> bool:
    return bool(_LOCATION.match(value) or ("table" in name and _TABLE.fullmatch(value)))


def _is_passed_down(task: Task, name: str) -> bool:
    """Whether an input is a parameter of the pipeline, through however many DAGs."""
    outer = (task.inputs("parameters").get(name) or {}).get("componentInputParameter")
    if not isinstance(outer, str):
        return False
    return _is_passed_down(task.parent, outer) if task.parent else True


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else f"{line[:57]}...")


#: Types that a parameter has in IR 2.1; it was `type: STRING` up to 2.0.
_TYPES = ("STRING", "NUMBER_INTEGER", "NUMBER_DOUBLE", "BOOLEAN", "LIST", "STRUCT")


@error("SL601", Pipeline, fix="give only parameters that the pipeline has")
def given_parameters_are_declared(pipeline: Pipeline) -> Iterator[str]:
    """A run gives only parameters that the pipeline has.

    Source: google.cloud.aiplatform, PipelineRuntimeConfigBuilder: it raises on a name it does not know.
    """
    known = [parameter.name for parameter in pipeline.parameters]
    for name in pipeline.given or ():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known) or 'none'}"
            yield f"the pipeline has no parameter {name!r}; {hint}"


@error("SL602", Parameter, fix="give a value of the declared type")
def given_value_has_its_type(parameter: Parameter) -> Iterator[str]:
    """A value is of the type that its parameter declares.

    Source: kubeflow/pipelines, pipeline_spec.proto: ParameterType; the SDK does not compare types.
    """
    given = parameter.pipeline.given or {}
    if parameter.name in given:
        yield from _mistyped(parameter, given[parameter.name])


@error("SL603", Parameter, fix="give it: --param NAME=VALUE")
def required_parameter_is_given(parameter: Parameter) -> Iterator[str]:
    """A run gives every parameter that has no default.

    Source: kubeflow/pipelines, pipeline_spec.proto: ComponentInputsSpec; the SDK does not look.
    """
    given = parameter.pipeline.given
    declaration = parameter.declaration
    required = declaration.get("defaultValue") is None and not declaration.get("isOptional")
    if given is not None and required and parameter.name not in given:
        yield f"the parameter {parameter.name} has no default and is not given"


@error("SL604", Parameter, fix="give the parameter a default of its type")
def default_has_its_type(parameter: Parameter) -> Iterator[str]:
    """A default is of the type that its parameter declares.

    Source: kubeflow/pipelines, pipeline_spec.proto: ComponentInputsSpec.ParameterSpec.
    """
    if parameter.declaration.get("defaultValue") is not None:
        yield from _mistyped(parameter, parameter.declaration["defaultValue"])


@warning("SL605", Parameter, fix="annotate it with str, int, float, bool, list or dict")
def type_is_known(parameter: Parameter) -> Iterator[str]:
    """A parameter is of a type that a run can be given.

    Source: kubeflow/pipelines, pipeline_spec.proto: ParameterType.
    """
    kind = parameter.declaration.get("parameterType")
    if kind is not None and kind not in _TYPES:
        yield f"the parameter {parameter.name} is of type {kind}"


def _mistyped(parameter: Parameter, value: Any) -> Iterator[str]:
    declaration = dict(parameter.declaration)
    if declaration.get("parameterType") not in _TYPES:
        return
    alone = {"root": {"inputDefinitions": {"parameters": {parameter.name: declaration}}}}
    try:
        check_parameters(alone, {parameter.name: value})
    except PipelineError as error_found:
        yield str(error_found)
