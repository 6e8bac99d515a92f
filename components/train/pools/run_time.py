"""A training job whose worker pools are a pipeline parameter."""

from collections.abc import Callable, Mapping
from typing import Any

from google_cloud_pipeline_components.v1.custom_job import CustomTrainingJobOp
from kfp import dsl

from shardline.components.train.pools.job import CustomJobSettings, check_labels
from shardline.components.train.pools.planning import plan_training


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
        A pipeline with the training component's parameters, and worker_pool_specs, which
        `check_worker_pools` should have checked in a task at the start of the run.

    Raises:
        SettingsError: When a label is none.
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
        model_function: str,
        hparams: dict,  # type: ignore[type-arg]
        epochs: int,
        per_replica_batch_size: int,
        learning_rate: float,
        seed: int,
        train_options: dict,  # type: ignore[type-arg]
    ) -> dsl.Model:
        """Trains on the machines of a parameter."""
        plan = plan_op(
            worker_pool_specs=worker_pool_specs,
            image=image,
            dataset=dataset,
            model_function=model_function,
            hparams=hparams,
            epochs=epochs,
            per_replica_batch_size=per_replica_batch_size,
            learning_rate=learning_rate,
            seed=seed,
            train_options=train_options,
        )
        # A plan that is cached names the model of an earlier run.
        plan.set_caching_options(False)
        restart = {"restart_job_on_worker_restart": plan.outputs["restart"]}
        job = CustomTrainingJobOp(
            display_name=settings.display_name or "train",
            worker_pool_specs=plan.outputs["worker_pool_specs"],
            labels=all_labels,
            **{**restart, **arguments},
        )
        if settings.num_retries:
            job.set_retry(settings.num_retries, backoff_duration=settings.backoff_duration)
        return plan.outputs["model"]

    return train_at_run_time
