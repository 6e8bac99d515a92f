"""The tuning pipeline."""

from typing import Any

from kfp import dsl

from shardline.pipelines.settings import Settings
from shardline.pipelines.spec import TUNE
from shardline.pipelines.tasks import Tasks


def tune_pipeline(settings: Settings, study_file: str) -> Any:
    """Returns the pipeline for one environment; `study_file` (JSON) is the default of parameter `study`."""
    task = Tasks(settings, TUNE)

    @dsl.pipeline(
        name=TUNE,
        description="The best hyperparameters, and a registered model that was trained with them.",
    )
    def tune(
        source: str = "digits",
        label: str = "",
        image_size: int = 0,
        data_options: dict[str, Any] = {},
        # As text: KFP writes the keys of an object with more than one key in an order that changes.
        study: str = study_file,
        max_trial_count: int = 0,
        trial_epochs: int = 0,
        model: str = "mnist_cnn",
        hparams: dict[str, Any] = {},
        epochs: int = 20,
        per_replica_batch_size: int = 0,
        learning_rate: float = 0.0,
        seed: int = 0,
        train_options: dict[str, Any] = {},
        rules: list[str] = [],
        gate_options: dict[str, Any] = {},
        champion_uri: str = "",
        history_uri: str = "",
    ) -> None:
        """Finds hyperparameters for a model and trains it with the best.

        Parameters that are not explained here are those of the retraining pipeline.

        Args:
            study: Parameters, metric and search: a study file as JSON.
            max_trial_count: Number of trials; 0 for the study's own.
            trial_epochs: Epochs of each trial; 0 for those of the training.
            epochs: Epochs of the training at the end, where they are not tuned.
            seed: As for the retraining pipeline; in a local run, also of the search.
            history_uri: Directory or gs:// for the record of the run; empty for none.
        """
        data = {"label": label, "image_size": image_size}
        training = {"model_function": model, "hparams": hparams, "epochs": epochs, "seed": seed}
        training |= {"per_replica_batch_size": per_replica_batch_size, "learning_rate": learning_rate}
        gate = {"rules": rules, "champion_uri": champion_uri}
        checked = {**training, **gate, "train_options": train_options, "gate_options": gate_options}

        with dsl.ExitHandler(task.exit_handler(history_uri), name="run"):
            # Without a history, thus without a comparison with earlier runs.
            changes = task.detect_changes(source=source, data_options=data_options, **data, **checked)
            # The same source string may hold other data tomorrow: a cached result would be stale.
            source = changes.outputs["source"]
            dataset = task.preprocess(source=source, seed=seed, options=data_options, **data)
            rehearsed = task.rehearse(dataset=dataset, **checked)
            planned = task.plan_study(
                study=study,
                max_trial_count=max_trial_count,
                trial_epochs=trial_epochs,
                dataset=dataset,
                options=train_options,
                **training,
            ).after(rehearsed)
            best = task.best_trial(task.tuning_job(planned))
            trained = task.train(
                dataset=dataset,
                options=train_options,
                tuned=best.outputs["parameters"],
                base_output_directory=rehearsed.outputs["Output"],
                **training,
            )
            judged = task.export_validate(
                dataset=dataset, model=trained.outputs["model"], options=gate_options, **gate
            ).outputs
            with dsl.If(judged["Output"] == True, name="blessed"):
                task.register(exported=judged["exported"], champion_uri=champion_uri)

    return tune
