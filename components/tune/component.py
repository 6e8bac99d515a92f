"""Components of tuning: the study's plan, the tuning job, and the best trial.

KFP embeds the source text of a Python component alone, so these import inside.
"""

import json
from typing import Any, NamedTuple

from google_cloud_pipeline_components.v1.custom_job import CustomTrainingJobOp
from kfp import dsl

from shardline.components.custom_job import CustomJobSettings

_LAUNCHER = "google_cloud_pipeline_components.container.v1.hyperparameter_tuning_job.launcher"
#: GCPC's own image, of the version that is installed.
_IMAGE = str(CustomTrainingJobOp.component_spec.implementation.container.image)
_SCHEDULING = ("timeout", "restart_job_on_worker_restart", "strategy")


def plan_study(
    study: str,
    max_trial_count: int,
    trial_epochs: int,
    worker_pool_specs: list[Any],
    job_labels: dict[str, str],
    dataset: dsl.Input[dsl.Dataset],
    trials: dsl.Output[dsl.Artifact],
    model_function: str,
    hparams: dict[str, Any] = {},
    epochs: int = 20,
    per_replica_batch_size: int = 0,
    learning_rate: float = 0.0,
    seed: int = 0,
    options: dict[str, Any] = {},
) -> NamedTuple(  # type: ignore[valid-type]
    "Outputs",
    [
        ("study_spec", str),
        ("worker_pool_specs", str),
        ("max_trial_count", int),
        ("parallel_trial_count", int),
        ("max_failed_trial_count", int),
        ("base_output_directory", str),
        ("labels", str),
    ],
):
    """Plans a tuning job: its study, and the worker pools of its trials.

    The parameters from `model_function` on are those of `train`.

    Args:
        study: Metric, goal, parameters and search as JSON; see `shardline.components.tune.study`.
        max_trial_count: Number of trials; 0 for the study's own.
        trial_epochs: Epochs of each trial; 0 for those of the training.
        worker_pool_specs: Worker pools of one trial, without their program.
        job_labels: Labels of the tuning job, to which the seed is added.
        dataset: Dataset directory with its manifest.
        trials: Receives a directory for each trial.

    Returns:
        The tuning job's fields: numbers, and texts with JSON, which no step on the way can change.
    """
    arguments = dict(locals())
    from shardline.components.tune.study import plan_tuning_job
    from shardline.trainer.base.progress import exit_on_error

    with exit_on_error("tune"):
        return plan_tuning_job(**arguments)


def best_trial(
    gcp_resources: str,
    trials: dsl.Output[dsl.Artifact],
    report: dsl.Output[dsl.HTML],
) -> NamedTuple(  # type: ignore[valid-type]
    "Outputs", [("trial", str), ("value", float), ("parameters", dict[str, Any])]
):
    """Finds the best trial of a tuning job that has succeeded.

    Args:
        gcp_resources: Output of the job's task that names the job.
        trials: Receives trials.json, the job and its trials in the API's JSON, and trials.html.
        report: Receives a table of the trials.

    Returns:
        The best trial, its metric, and its parameters, which `train` takes as `tuned`.
    """
    from pathlib import Path

    from shardline.components.html import page_path
    from shardline.components.tune.best_trial import select_best_trial
    from shardline.trainer.base.progress import exit_on_error

    with exit_on_error("tune"):
        return select_best_trial(gcp_resources, Path(trials.path), page_path(report))


def tuning_job(name: str, settings: CustomJobSettings) -> Any:
    """Returns a component like GCPC's HyperparameterTuningJobRunOp, with the same launcher and more fields.

    That one has no field for early stopping, restarts after a lost worker, timeout, scheduling strategy,
    TensorBoard, persistent resource and labels; and importing it imports google.cloud.aiplatform, which takes
    seconds whenever a pipeline is compiled.

    Args:
        name: Display name of the job.
        settings: The job of each trial; its base_output_directory is an input instead, as are its pools.
    """
    trial, extra = settings.arguments, settings.extra
    del trial["base_output_directory"]
    key = {"kms_key_name": trial.pop("encryption_spec_key_name")}
    job = {"display_name": name, "encryption_spec": key}
    scheduling = {field: trial.pop(field) for field in _SCHEDULING}
    trial |= {**extra, "scheduling": {**scheduling, **extra.get("scheduling", {})}}

    @dsl.container_component  # type: ignore[untyped-decorator]
    def hyperparameter_tuning_job(
        gcp_resources: dsl.OutputPath(str),  # type: ignore[valid-type]
        study_spec: str,
        max_trial_count: int,
        parallel_trial_count: int,
        max_failed_trial_count: int,
        worker_pool_specs: str,
        base_output_directory: str,
        labels: str,
        project: str = "{{$.pipeline_google_cloud_project_id}}",
        location: str = "{{$.pipeline_google_cloud_location}}",
    ) -> dsl.ContainerSpec:
        payload = [
            *(json.dumps(job)[:-1], ', "study_spec": ', study_spec),
            *(', "max_trial_count": ', max_trial_count),
            *(', "parallel_trial_count": ', parallel_trial_count),
            *(', "max_failed_trial_count": ', max_failed_trial_count),
            *(', "labels": ', labels),
            *(', "trial_job_spec": ', json.dumps(trial)[:-1], ', "worker_pool_specs": ', worker_pool_specs),
            *(', "base_output_directory": {"output_uri_prefix": "', base_output_directory, '"}}}'),
        ]
        options = ("--project", project, "--location", location, "--gcp_resources", gcp_resources)
        return dsl.ContainerSpec(
            image=_IMAGE,
            command=["python3", "-u", "-m", _LAUNCHER],
            args=["--type", "HyperparameterTuningJob", "--payload", dsl.ConcatPlaceholder(payload), *options],
        )

    return hyperparameter_tuning_job
