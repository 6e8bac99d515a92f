"""Rules about how tasks, components and their inputs belong together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

from shardline.pipelines.check.ir import PARAMETER, at
from shardline.pipelines.check.pipeline import Pipeline, Task
from shardline.pipelines.check.registry import error, warning

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
