"""The part of a pipeline that begins with a dataset: train, judge, register."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kfp import dsl

from shardline.components.register.component import register, registry_evaluation, serving_model
from shardline.components.register.tasks import batch_prediction_task, deploy_tasks, upload_task
from shardline.components.train.component import train
from shardline.components.train.custom_job import custom_job, custom_job_at_run_time
from shardline.components.validate.component import export_validate
from shardline.pipelines.settings import Settings

_F = TypeVar("_F", bound=Callable[..., None])


def train_and_register_pipeline(component: Callable[..., Any], settings: Settings, name: str) -> Any:
    """Builds the part of the pipeline that begins with a dataset.

    Args:
        component: Makes a component of a function.
        settings: Image and machines.
        name: Of the whole pipeline, for labels.
    """
    train_model = _train(component, settings, name)
    export_validate_op = component(export_validate)
    register_op = component(register)
    serving_model_op = component(serving_model)
    registry_evaluation_op = component(registry_evaluation)

    @dsl.pipeline(name="train-and-register")  # type: ignore[untyped-decorator]
    @fitting_parameters(settings)
    def train_and_register(
        dataset: dsl.Input[dsl.Dataset],
        model: str,
        hparams: dict,  # type: ignore[type-arg]
        epochs: int,
        per_replica_batch_size: int,
        learning_rate: float,
        seed: int,
        train_options: dict,  # type: ignore[type-arg]
        min_accuracy: float,
        rules: list,  # type: ignore[type-arg]
        first_run: str,
        champion_uri: str,
        worker_pool_specs: list = [],  # type: ignore[type-arg]  # noqa: B006
    ) -> dsl.Model:
        """Trains on a dataset, judges the exported model, and registers it if it is blessed."""
        trained = train_model(
            worker_pool_specs=worker_pool_specs,
            dataset=dataset,
            model_function=model,
            hparams=hparams,
            epochs=epochs,
            per_replica_batch_size=per_replica_batch_size,
            learning_rate=learning_rate,
            seed=seed,
            train_options=train_options,
        )
        validated = export_validate_op(
            dataset=dataset,
            model=trained,
            min_accuracy=min_accuracy,
            rules=rules,
            champion_uri=champion_uri,
            first_run=first_run,
        )
        # Compared with the champion of today: never cached, nor is what comes after.
        validated.set_caching_options(False)
        with dsl.If(validated.outputs["blessed"] == True, name="blessed"):  # noqa: E712  # a KFP condition
            registered = register_op(
                exported=validated.outputs["exported"],
                accuracy=validated.outputs["accuracy"],
                champion_uri=champion_uri,
            ).set_caching_options(False)
            if settings.model_upload:
                ready = serving_model_op(
                    exported=validated.outputs["exported"],
                    accuracy=validated.outputs["accuracy"],
                    image_uri=settings.model_upload.serving_image_uri,
                ).after(registered)
                uploaded = upload_task(settings.model_upload, ready, labels={"pipeline": name})
                registry_evaluation_op(
                    exported=validated.outputs["exported"], model=uploaded.outputs["model"]
                )
                _after_upload(component, settings, uploaded, labels={"pipeline": name})
        return validated.outputs["exported"]

    return train_and_register


def _after_upload(
    component: Callable[..., Any], settings: Settings, uploaded: Any, labels: Mapping[str, str]
) -> None:
    """Adds what the settings want to become of an uploaded model."""
    if settings.deploy:
        deploy_tasks(component, settings.deploy, uploaded, labels)
    if settings.batch_predict and settings.model_upload:
        batch_prediction_task(settings.batch_predict, settings.model_upload.display_name, uploaded, labels)


def _train(component: Callable[..., Any], settings: Settings, name: str) -> Callable[..., Any]:
    """Returns what makes the training task and gives its model."""
    labels = {"pipeline": name}
    if settings.pools_at_run_time:
        pipeline = custom_job_at_run_time(component, settings.image, settings.train, labels)
        return lambda **inputs: pipeline(**inputs).output
    job = custom_job(component(train), settings.train, labels)

    def train_model(worker_pool_specs: Any, **inputs: Any) -> Any:
        return job(**inputs).outputs["model"]

    return train_model


def fitting_parameters(settings: Settings) -> Callable[[_F], _F]:
    """Hides worker_pool_specs where pools are fixed: KFP makes a parameter of all that it sees."""

    def decorate(function: _F) -> _F:
        signature = inspect.signature(function)
        shown = [p for p in signature.parameters.values() if p.name != "worker_pool_specs"]
        if not settings.pools_at_run_time:
            function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        return function

    return decorate
