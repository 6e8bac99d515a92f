"""The training component, and the custom job that runs a component on every replica of a cluster.

The cluster is known to the compiler, or to the run only: then two components check and complete its worker
pools. KFP embeds the source text of a component's function alone, so it imports inside.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from google_cloud_pipeline_components.v1.custom_job import (
    CustomTrainingJobOp,
    create_custom_training_job_from_component,
)
from kfp import dsl
from kfp.dsl.base_component import BaseComponent

from shardline.components.vertex.forms import check_labels, check_pasted_text
from shardline.components.vertex.job import CustomJobSettings
from shardline.trainer.errors import SettingsError

#: The executor input of a task, and the same of the launching task, escaped for a text inside its payload.
_EXECUTOR_INPUT, _ESCAPED_EXECUTOR_INPUT = "{{$}}", "{{$.json_escape[1]}}"


def train(dataset: dsl.Input[dsl.Dataset], model: dsl.Output[dsl.Model], training: dict) -> None:  # type: ignore[type-arg]  # KFP reads the bare type as a JSON object
    """Trains a compiled Keras model: the same program on the chief and on every worker of a CustomJob.

    Args:
        dataset: Dataset directory with its manifest.
        model: Receives model.keras, metrics.json, history.csv and settings.json.
        training: What is trained, and how: the fields of `components.train.settings.TrainingSettings`.
    """
    from shardline.components.train.replica import run

    run(dataset=dataset, model=model, training=training)


def check_worker_pools(worker_pool_specs: list, strategy: str) -> list:  # type: ignore[type-arg]  # KFP's own form
    """Checks the worker pools of a training job, at the start of the run.

    Args:
        worker_pool_specs: In the form of the CustomJob API; see `shardline.components.vertex.pools`.
        strategy: Scheduling strategy of the job: STANDARD, SPOT or FLEX_START.

    Returns:
        The same.
    """
    from shardline.components.vertex.job import CustomJobSettings
    from shardline.components.vertex.pools import read_specs
    from shardline.trainer.progress import errors_end_the_process

    with errors_end_the_process("train"):
        CustomJobSettings(cluster=read_specs(worker_pool_specs), strategy=strategy)
    return worker_pool_specs


def plan_training(
    worker_pool_specs: list,  # type: ignore[type-arg]
    image: str,
    dataset: dsl.Input[dsl.Dataset],
    model: dsl.Output[dsl.Model],
    training: dict,  # type: ignore[type-arg]
) -> NamedTuple("Outputs", [("worker_pool_specs", list), ("restart", bool)]):  # type: ignore[valid-type]
    """Completes worker pools by the program that every replica runs: the trainer, with these arguments.

    Args:
        worker_pool_specs: Machines, in the form of the CustomJob API.
        image: Container image of replicas that name none.
        dataset: Dataset directory with its manifest.
        model: Where the job will write the model.
        training: What is trained, and how, as for `train`.

    Returns:
        The complete pools, and whether all replicas start again when one has.
    """
    from shardline.components.train.replica import program
    from shardline.components.vertex.pools import read_specs
    from shardline.trainer.progress import errors_end_the_process

    with errors_end_the_process("train"):
        cluster = read_specs(worker_pool_specs)
        model.metadata.update(framework="keras", model_function=training["model"])
        container = program(image, dataset=dataset.path, model=model.path, training=training)
    return cluster.specs(container), cluster.is_synchronous


def custom_job(
    component: BaseComponent, settings: CustomJobSettings, labels: Mapping[str, str] | None = None
) -> Callable[..., dsl.PipelineTask]:
    """Returns what makes the task of a CustomJob that runs a component on every replica of the cluster.

    The task has the component's own parameters and outputs; labels of the settings win over `labels`.
    Raises SettingsError when the component has a parameter of the CustomJob's own name, which would be
    overridden without a word, or its source or a label cannot travel as it is.
    """
    clashes = set(component.component_spec.inputs or ()) & set(CustomTrainingJobOp.component_spec.inputs)
    if clashes:
        raise SettingsError(
            f"component {component.name!r} has parameters that a CustomJob has too: {sorted(clashes)}; "
            "rename them"
        )
    all_labels = {"component": component.name, **(labels or {}), **settings.labels}
    check_labels(all_labels)
    display_name = settings.display_name or component.name
    check_pasted_text("display_name", display_name)
    job = create_custom_training_job_from_component(
        component, display_name=display_name, labels=all_labels, **settings.arguments
    )
    specs = settings.cluster.specs(_container_of(component))
    job.component_spec.inputs["worker_pool_specs"].default = specs

    def task(**inputs: Any) -> dsl.PipelineTask:
        made = job(**inputs)
        _retry(made, settings)
        return made

    return task


def _container_of(component: BaseComponent) -> dict[str, Any]:
    """Returns the container_spec that runs a component on the replicas of a custom job."""
    container = component.component_spec.implementation.container
    parts = {key: [str(part) for part in getattr(container, key) or ()] for key in ("command", "args")}
    if any("{{$" in part and part != _EXECUTOR_INPUT for part in parts["command"] + parts["args"]):
        raise SettingsError(
            f"the source of component {component.name!r} holds '{{{{$', which begins a placeholder that "
            "the platform replaces; write it in two parts"
        )
    inputs = {_EXECUTOR_INPUT: _ESCAPED_EXECUTOR_INPUT}
    return {"image_uri": container.image} | {
        key: [inputs.get(part, part) for part in both] for key, both in parts.items()
    }


def custom_job_at_run_time(
    component: Callable[..., Any],
    image: str,
    settings: CustomJobSettings,
    labels: Mapping[str, str] | None = None,
) -> Any:
    """Makes the training step for worker pools that are known at run time only.

    The replicas get their arguments as plain text. The component's own form, in which the platform fills in
    the executor input, is known to work only where the pools are a constant of the compiled pipeline: that
    the platform fills in placeholders inside a value that another task has put out is said nowhere.

    Args:
        component: Makes a component of a function.
        image: Container image of replicas that name none.
        settings: The job; its cluster is not used.
        labels: Labels of the job, beside those of the settings, which win.

    Returns:
        A pipeline with the training component's parameters, base_output_directory, and worker_pool_specs,
        which `check_worker_pools` should have checked in a task at the start of the run.
    """
    plan_op = component(plan_training)
    all_labels = {"component": "train", **(labels or {}), **settings.labels}
    check_labels(all_labels)
    arguments = settings.arguments
    if settings.restart_job_on_worker_restart is None:
        del arguments["restart_job_on_worker_restart"]  # as the pools have it

    @dsl.pipeline(name="train-at-run-time")  # type: ignore[untyped-decorator]
    def train_at_run_time(
        worker_pool_specs: list,  # type: ignore[type-arg]
        dataset: dsl.Input[dsl.Dataset],
        training: dict,  # type: ignore[type-arg]
        base_output_directory: str = "",
    ) -> dsl.Model:
        """Trains on the machines of a parameter."""
        plan = plan_op(worker_pool_specs=worker_pool_specs, image=image, dataset=dataset, training=training)
        # A plan that is cached names the model of an earlier run.
        plan.set_caching_options(False)
        restart = {"restart_job_on_worker_restart": plan.outputs["restart"]}
        job = CustomTrainingJobOp(
            display_name=settings.display_name or "train",
            worker_pool_specs=plan.outputs["worker_pool_specs"],
            labels=all_labels,
            **{**restart, **arguments, "base_output_directory": base_output_directory},
        )
        _retry(job, settings)
        return plan.outputs["model"]

    return train_at_run_time


def _retry(job: dsl.PipelineTask, settings: CustomJobSettings) -> None:
    if settings.num_retries:
        job.set_retry(settings.num_retries, backoff_duration=settings.backoff_duration)
