"""The steps before and after a tuning job. KFP embeds the source text of a function alone."""

from typing import NamedTuple

from kfp import dsl


def plan_study(
    study: str,
    max_trial_count: int,
    trial_epochs: int,
    worker_pool_specs: list,  # type: ignore[type-arg]
    image: str,
    job_labels: dict,  # type: ignore[type-arg]
    dataset: dsl.Input[dsl.Dataset],
    trials: dsl.Output[dsl.Artifact],
    model_function: str,
    hparams: dict,  # type: ignore[type-arg]  # KFP reads the bare type as a JSON object
    epochs: int,
    per_replica_batch_size: int,
    learning_rate: float,
    seed: int,
    train_options: dict,  # type: ignore[type-arg]
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
    """Says what a tuning job searches and what the replicas of its trials run.

    Args:
        study: Metric, goal, parameters and search as JSON; see `shardline.components.tune.study`.
        max_trial_count: In the place of the study's own unless 0.
        trial_epochs: Passes over the training split in each trial; 0 for as many as epochs.
        worker_pool_specs: Machines of one trial, without their program.
        image: Container image of replicas that name none.
        job_labels: Labels of the tuning job, to which the seed is added.
        dataset: Dataset directory with its manifest.
        trials: Gets a directory for each trial.
        model_function: As for the training component, and so are all that follow.
        hparams: Further keyword arguments of the model function.
        epochs: Passes over the training split.
        per_replica_batch_size: Examples per replica and step.
        learning_rate: Given to the model function; 0 keeps the model's own.
        seed: Of weights, dropout and shuffling.
        train_options: Any further option of the trainer by name.

    Returns:
        The tuning job's fields, whatever is no number as text: JSON that no step on the way can change.
    """
    from shardline.components.tune.plan import plan
    from shardline.trainer.progress import errors_end_the_process

    with errors_end_the_process("tune"):
        return plan(
            study,
            worker_pool_specs,
            image,
            base_output_directory=trials.uri,
            labels=job_labels,
            max_trial_count=max_trial_count,
            dataset=dataset.path,
            model_function=model_function,
            hparams=hparams,
            epochs=trial_epochs or epochs,
            per_replica_batch_size=per_replica_batch_size,
            learning_rate=learning_rate,
            seed=seed,
            options=train_options,
        )


def best_trial(
    gcp_resources: str,
    trials: dsl.Output[dsl.Artifact],
    report: dsl.Output[dsl.HTML],
    hparams: dict,  # type: ignore[type-arg]
    epochs: int,
    per_replica_batch_size: int,
    learning_rate: float,
    seed: int,
    train_options: dict,  # type: ignore[type-arg]
) -> NamedTuple(  # type: ignore[valid-type]
    "Outputs",
    [
        ("trial", str),
        ("value", float),
        ("hparams", dict),
        ("epochs", int),
        ("per_replica_batch_size", int),
        ("learning_rate", float),
        ("seed", int),
        ("train_options", dict),
    ],
):
    """Finds the best trial of a tuning job that has succeeded.

    Args:
        gcp_resources: Of the job's task; names the job.
        trials: Gets trials.json, the job and its trials as the API has them, and trials.html.
        report: Gets a table of the trials.
        hparams: What the trials did not tune, and so are all that follow.
        epochs: Passes over the training split in the training that follows.
        per_replica_batch_size: Examples per replica and step.
        learning_rate: Given to the model function; 0 keeps the model's own.
        seed: Of weights, dropout and shuffling.
        train_options: Any further option of the trainer by name.

    Returns:
        The best trial and its metric, and the arguments of the training with its parameters in them.
    """
    from pathlib import Path

    from shardline.components.tune.best_trial import finish
    from shardline.trainer.progress import errors_end_the_process

    with errors_end_the_process("tune"):
        return finish(
            gcp_resources,
            Path(trials.path),
            Path(report.path),
            hparams=hparams,
            epochs=epochs,
            per_replica_batch_size=per_replica_batch_size,
            learning_rate=learning_rate,
            seed=seed,
            options=train_options,
        )
