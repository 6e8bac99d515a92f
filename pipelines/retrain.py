"""The retraining pipeline."""

from typing import Any

from kfp import dsl

from shardline.pipelines.settings import Settings
from shardline.pipelines.spec import RETRAIN
from shardline.pipelines.tasks import Tasks


def retrain_pipeline(settings: Settings) -> Any:
    """Returns the pipeline for one environment, as `dsl.pipeline` returns it.

    `task.NAME` adds a task of the component NAME, with the image, machine, retries and caching of the
    settings. There `preprocess` may be many tasks, and `register` come after an upload (tasks.py).
    """
    task = Tasks(settings, RETRAIN)

    # A pipeline of its own, so that a task can follow it, whether the model is blessed or not.
    @dsl.pipeline(name="publish")
    def publish(exported: dsl.Input[dsl.Model], blessed: bool, champion_uri: str) -> None:
        with dsl.If(blessed == True, name="blessed"):
            task.register(exported=exported, champion_uri=champion_uri)

    @dsl.pipeline(name=RETRAIN, description="From raw data to a registered model, if it is good enough.")
    def retrain(
        source: str = "digits",
        label: str = "",
        image_size: int = 0,
        data_options: dict[str, Any] = {},
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
        force: bool = False,
        continue_run: str = "",
    ) -> None:
        """Retrains a model.

        Args:
            source: digits, tfds:NAME, images:DIR, text:DIR, tfrecord:GLOB, table:PATH, bigquery:TABLE or
                QUERY, or pkg.module:Source. {date} becomes the day for which the run is scheduled,
                {date:%Y/%m} any part of it, and for table and tfrecord {last 28 days} the days up to it.
            label: Target of a table and the like, KIND:COLUMN[,COLUMN] with the kinds class, multilabel and
                regression; empty for the source's own, or a column label.
            image_size: Side of the stored square images in pixels, 4..4096; 0 for no resizing.
            data_options: How the source becomes shards, {"encoding": "jpeg", "split": {...}}.
            model: mnist_cnn, resnet50, keras:NAME, or pkg.module:function.
            hparams: Further keyword arguments of the model function.
            epochs: Epochs over the training split.
            per_replica_batch_size: Examples per replica and step; 0 for 16, or a worker's share of the
                training split where that is less.
            learning_rate: Argument of the model function; 0 for the model's own default.
            seed: Seed of the weights, the shuffling and the order of the examples, from 0; not of the split.
            train_options: Further options of the trainer, {"early_stopping": "val_loss"}.
            rules: Rules of the gate in addition to the default ones, or with a name in place of one,
                ["accuracy >= 0.9", "classes: off"].
            gate_options: Policies of the gate and formats of the export, {"first_run": "block"}.
            champion_uri: Directory or gs:// where a blessed model is published; empty publishes nothing.
            history_uri: Directory or gs:// with the history of runs; empty for none, and every run trains.
            force: Whether to train although nothing has changed.
            continue_run: Run whose checkpoints training continues from, or their directory.
        """
        data = {"label": label, "image_size": image_size}
        training = {"model_function": model, "hparams": hparams, "epochs": epochs, "seed": seed}
        training |= {"per_replica_batch_size": per_replica_batch_size, "learning_rate": learning_rate}
        gate = {"rules": rules, "champion_uri": champion_uri}
        checked = {**training, **gate, "train_options": train_options, "gate_options": gate_options}

        # Also after a failure: it explains that one, and notifies. Only a whole run is in the history.
        with dsl.ExitHandler(task.exit_handler(history_uri), name="run"):
            changes = task.detect_changes(
                source=source,
                data_options=data_options,
                force=force,
                history_uri=history_uri,
                **data,
                **checked,
            ).outputs
            # Also where training is forced, or there is no history.
            with dsl.If(changes["changed"] == True, name="changed"):
                dataset = task.preprocess(
                    source=changes["source"],
                    seed=seed,
                    options=data_options,
                    fingerprint=changes["fingerprint"],
                    **data,
                )
                # Training, export and gate on a few examples, before their machines cost money.
                rehearsed = task.rehearse(
                    dataset=dataset,
                    fingerprint=changes["fingerprint"],
                    continue_run=continue_run,
                    history_uri=history_uri,
                    **checked,
                )
                checkpoints = rehearsed.outputs["Output"]
                trained = task.train(
                    dataset=dataset, options=train_options, base_output_directory=checkpoints, **training
                )
                judged = task.export_validate(
                    dataset=dataset, model=trained.outputs["model"], options=gate_options, **gate
                ).outputs
                result = {"exported": judged["exported"], "champion_uri": champion_uri}
                published = publish(blessed=judged["Output"], **result)
                task.record_run(state=changes["state"], history_uri=history_uri, **result).after(published)

    return retrain
