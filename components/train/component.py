"""The training component, and the custom job that runs a component on every replica of a cluster.

KFP embeds the source text of a component's function alone, so it imports inside.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from google_cloud_pipeline_components.v1.custom_job import create_custom_training_job_from_component
from kfp import dsl
from kfp.dsl.base_component import BaseComponent

from shardline.components.custom_job import CustomJobSettings

#: An input of a task; its executor input, and that of the launching task, escaped for a text in its payload.
_PLACEHOLDER = "{{{{$.inputs.parameters['{}']}}}}"
_EXECUTOR_INPUT, _ESCAPED_EXECUTOR_INPUT = "{{$}}", "{{$.json_escape[1]}}"


def train(
    dataset: dsl.Input[dsl.Dataset],
    model: dsl.Output[dsl.Model],
    model_function: str,
    hparams: dict[str, Any] = {},
    epochs: int = 20,
    per_replica_batch_size: int = 0,
    learning_rate: float = 0.0,
    seed: int = 0,
    options: dict[str, Any] = {},
    tuned: dict[str, Any] = {},
) -> None:
    """Trains a compiled Keras model: the same program on the chief and every worker of a CustomJob.

    Args:
        dataset: Dataset directory with its manifest.
        model: Receives model.keras, metrics.json, history.csv and settings.json.
        model_function: mnist_cnn, resnet50, keras:NAME, or pkg.module:function.
        hparams: Further keyword arguments of the model function.
        epochs: Epochs over the training split.
        per_replica_batch_size: Examples per replica and step; 0 for 16, or a worker's share of the training
            split where that is less.
        learning_rate: Argument of the model function; 0 for the model's own default.
        seed: Seed of the weights, the shuffling and the order of the examples, from 0; not of the split.
        options: Other options of `shardline train`, {"early_stopping": "val_loss", "checkpoint_steps": 500}.
        tuned: Parameters of the best trial, in place of the above or of arguments of the model function.
    """
    arguments = dict(locals())
    from shardline.components.train import train_replica

    train_replica(**arguments)


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
    inputs, fixed = job.component_spec.inputs, {}
    own = {*(component.component_spec.inputs or ()), "base_output_directory", "worker_pool_specs"}
    for name in [name for name, each in inputs.items() if name not in own and each.default is not None]:
        value = inputs.pop(name).default
        fixed[_PLACEHOLDER.format(name)] = value if isinstance(value, str) else json.dumps(value)
    launcher.args = [_with_values(str(part), fixed, settings.extra) for part in launcher.args]

    def task(**inputs: Any) -> dsl.PipelineTask:
        created = job(**inputs)
        if settings.num_retries:
            created.set_retry(settings.num_retries, backoff_duration="60s")
        return created

    return task


def _with_values(argument: str, fixed: Mapping[str, str], extra: Mapping[str, Any]) -> str:
    """Returns an argument of the launcher with its fixed inputs filled in, as the platform would do it.

    The fields `extra` are last: of equal names JSON takes that.
    """
    for placeholder, text in fixed.items():
        argument = argument.replace(placeholder, text)
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
