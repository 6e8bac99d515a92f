"""The training component, and the custom job that runs a component on every replica of a cluster.

KFP embeds the source text of a component's function alone, so it imports inside.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from google_cloud_pipeline_components.v1.custom_job import create_custom_training_job_from_component
from kfp import dsl
from kfp.dsl.base_component import BaseComponent

from shardline.components.vertex.job import CustomJobSettings

#: The executor input of a task, and the same of the launching task, escaped for a text inside its payload.
_EXECUTOR_INPUT, _ESCAPED_EXECUTOR_INPUT = "{{$}}", "{{$.json_escape[1]}}"


def train(
    dataset: dsl.Input[dsl.Dataset],
    model: dsl.Output[dsl.Model],
    training: dict,  # type: ignore[type-arg]  # KFP reads the bare type as a JSON object
) -> None:
    """Trains a compiled Keras model: the same program on the chief and every worker of a CustomJob.

    Args:
        dataset: Dataset directory with its manifest.
        model: Receives model.keras, metrics.json, history.csv and settings.json.
        training: Fields of `components.train.settings.TrainingSettings`.
    """
    from shardline.components.train.replica import run

    run(dataset=dataset, model=model, training=training)


def custom_job(
    component: BaseComponent, settings: CustomJobSettings, labels: Mapping[str, str] | None = None
) -> Callable[..., dsl.PipelineTask]:
    """Returns a factory of CustomJob tasks that run a component on every replica of the cluster.

    The task has the component's own parameters and outputs; tags of the settings override `labels`.
    """
    all_labels = {"component": component.name, **(labels or {}), **settings.tags}
    job = create_custom_training_job_from_component(
        component, display_name=component.name, labels=all_labels, **settings.arguments
    )
    specs = settings.cluster.specs(_container_of(component))
    job.component_spec.inputs["worker_pool_specs"].default = specs
    launcher = job.component_spec.implementation.container
    launcher.args = [_with_extra(str(part), settings.extra) for part in launcher.args]

    def task(**inputs: Any) -> dsl.PipelineTask:
        created = job(**inputs)
        if settings.num_retries:
            created.set_retry(settings.num_retries, backoff_duration="60s")
        return created

    return task


def _with_extra(argument: str, extra: Mapping[str, Any]) -> str:
    """Returns an argument of the launcher with the fields `extra` last: of equal names JSON takes that."""
    job = {name: value for name, value in extra.items() if name != "scheduling"}
    for fields, following in ((extra.get("scheduling"), "service_account"), (job, "labels")):
        if fields:
            end = f'}}, "{following}": '
            argument = argument.replace(end, f", {json.dumps(fields)[1:-1]}{end}")
    return argument


def _container_of(component: BaseComponent) -> dict[str, Any]:
    container = component.component_spec.implementation.container
    parts = {key: [str(part) for part in getattr(container, key) or ()] for key in ("command", "args")}
    inputs = {_EXECUTOR_INPUT: _ESCAPED_EXECUTOR_INPUT}
    return {"image_uri": container.image, "env": container.env or {}} | {
        key: [inputs.get(part, part) for part in both] for key, both in parts.items()
    }
