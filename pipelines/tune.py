"""The tuning pipeline."""

from collections.abc import Callable
from typing import Any

from kfp import dsl

from shardline.components.tune.component import best_trial, plan_study, tuning_job
from shardline.pipelines.settings import Settings
from shardline.pipelines.spec import TUNE
from shardline.pipelines.steps import (
    configure_task,
    exit_task,
    make_pipeline,
    on_machine,
    preprocess_tasks,
    rehearse_task,
    run_arguments,
)


def tune_pipeline(settings: Settings, study_file: str) -> Any:
    """Returns the pipeline for one environment; `study_file` (JSON) is the default of parameter `study`."""
    description = "The best hyperparameters, and a registered model that was trained with them."
    return make_pipeline(TUNE, description, tune, settings, defaults={"study": study_file})


def tune(  # noqa: D417  # the fields are explained in their dataclasses
    settings: Settings,
    train_and_register: Callable[..., dsl.PipelineTask],
    *,
    source: str = "digits",
    preprocess_processes: int = 0,
    # As text: KFP writes the keys of an object with more than one key in an order that changes.
    study: str,
    max_trial_count: int = 0,
    trial_epochs: int = 0,
    model: str = "mnist_cnn",
    history_uri: str = "",
    **flat: Any,
) -> None:
    """Finds hyperparameters for a model and trains it with the best.

    1. Configure: the parameters become three objects, data, training and gate.
    2. Preprocess: the source becomes TFRecord shards with a manifest.
    3. Rehearse: all later steps run on a few examples, before their machines cost money.
    4. Tune: a HyperparameterTuningJob, each of whose trials is a training on the whole cluster.
    5. Find the best trial.
    6. Train with its parameters, validate and register as the retraining pipeline does.
    7. Conclude, always: the outcome is recorded, a failure explained, and a notification sent.

    Args:
        preprocess_processes: Number of processes that write the shards; 0 for one per core.
        study: Parameters, metric and search: a study file as JSON.
        max_trial_count: Number of trials; 0 for the study's own.
        trial_epochs: Epochs of each trial; 0 for those of the training.
        epochs: Epochs of the training at the end, where they are not tuned.
        seed: Seed of the weights, the shuffling and the order of the examples, from 0, not of the split; in a
            local run, also of the search.
        history_uri: Directory or gs:// for the record of the run; empty for none.
    """
    component = on_machine(settings, settings.register.uncached())
    with dsl.ExitHandler(exit_task(settings, history_uri), name="run"):
        # Without a comparison with earlier runs.
        once = {"history_uri": "", "force": False}
        configured = configure_task(settings, source=source, model=model, **once, **flat).outputs
        # The same source string may hold other data tomorrow: a cached result would be stale.
        dataset = preprocess_tasks(settings, configured["data"], preprocess_processes)
        rehearsed = rehearse_task(
            settings,
            dataset=dataset,
            training=configured["training"],
            gate=configured["gate"],
            **run_arguments(""),
        )
        planned = component(plan_study)(
            study=study,
            max_trial_count=max_trial_count,
            trial_epochs=trial_epochs,
            worker_pool_specs=settings.train.cluster.specs({"image_uri": settings.image}),
            job_labels={"component": "tune", "pipeline": TUNE, **settings.train.tags},
            dataset=dataset,
            training=configured["training"],
        ).after(rehearsed)
        fields = {name: planned.outputs[name] for name in planned.outputs if name != "trials"}
        tuned = tuning_job(job_arguments(settings))(**fields)
        best = component(best_trial)(
            gcp_resources=tuned.outputs["gcp_resources"], training=configured["training"]
        )
        train_and_register(
            dataset=dataset,
            training=best.outputs["training"],
            gate=configured["gate"],
            base_output_directory=rehearsed.outputs["Output"],
        )


def job_arguments(settings: Settings) -> dict[str, Any]:
    """Returns the fields of the tuning job that are fixed when the pipeline is compiled."""
    arguments = settings.train.arguments
    del arguments["base_output_directory"]  # the run's own, below the pipeline's root
    return {"display_name": TUNE, "extra": settings.train.extra, **arguments}
