"""The retraining pipeline."""

from collections.abc import Callable, Mapping
from typing import Any

from kfp import dsl

from shardline.components.conclude.component import conclude
from shardline.components.configure.component import look_for_changes, record_run
from shardline.components.preprocess.component import finish_dataset, plan_shards, preprocess, write_shards
from shardline.components.train.component import check_worker_pools
from shardline.pipelines.settings import Settings
from shardline.pipelines.spec import RETRAIN
from shardline.pipelines.train_and_register import fitting_parameters, train_and_register_pipeline


def retrain_pipeline(settings: Settings) -> Any:
    """Builds the pipeline for one environment.

    Args:
        settings: Image and machines, which KFP fixes when it compiles.

    Returns:
        The pipeline, as `dsl.pipeline` gives it.
    """

    def component(function: Callable[..., Any]) -> Any:
        # The image has kfp: nothing is installed when a task starts.
        return dsl.component(base_image=settings.image, install_kfp_package=False)(function)

    look_for_changes_op = component(look_for_changes)
    preprocess_op = component(preprocess)
    plan_shards_op = component(plan_shards)
    write_shards_op = component(write_shards)
    finish_dataset_op = component(finish_dataset)
    check_worker_pools_op = component(check_worker_pools)
    train_and_register = train_and_register_pipeline(component, settings, RETRAIN)
    record_run_op = component(record_run)

    @dsl.pipeline(name=RETRAIN, description="From raw data to a registered model, if it is good enough.")  # type: ignore[untyped-decorator]
    @fitting_parameters(settings)
    def retrain(
        source: str = "digits",
        data_dir: str = "",
        labels: str = "",
        features: dict = {},  # type: ignore[type-arg]  # noqa: B006  # KFP reads type and default
        image_size: int = 0,
        resize_mode: str = "crop",
        encoding: str = "keep",
        split: dict = {},  # type: ignore[type-arg]  # noqa: B006
        key: str = "path",
        shards: int = 8,
        shard_size: int = 128,
        compression: str = "none",
        on_bad_record: str = "fail",
        max_bad_fraction: float = 0.01,
        preprocess_processes: int = 1,
        preprocess_tasks: int = 1,
        model: str = "mnist_cnn",
        hparams: dict = {},  # type: ignore[type-arg]  # noqa: B006
        epochs: int = 20,
        per_replica_batch_size: int = 0,
        learning_rate: float = 0.0,
        seed: int = 0,
        train_options: dict = {},  # type: ignore[type-arg]  # noqa: B006
        min_accuracy: float = 0.95,
        rules: list = [],  # type: ignore[type-arg]  # noqa: B006
        first_run: str = "bless",
        champion_uri: str = "",
        history_uri: str = "",
        force: bool = False,
        deep: bool = False,
        worker_pool_specs: list = [],  # type: ignore[type-arg]  # noqa: B006
    ) -> None:
        """Retrains a model.

        1. Look for changes: without any since the last run that is remembered, the run ends here.
        2. Preprocess: the source becomes TFRecord shards with a manifest, in one task or in many.
        3. Train: a CustomJob of one chief and its workers.
        4. Export and validate: the exported model is judged on the test split.
        5. Register, if blessed: the model becomes the champion.
        6. Record: the run is remembered.
        7. Conclude, whatever has happened: the run is explained, and whoever wants to know is told.

        Args:
            source: digits, tfds:NAME, images:DIR, tfrecord:GLOB, table:PATH, or pkg.module:Source; {date} in
                it becomes the day for which the run is scheduled, {date:%Y/%m} any part of it.
            data_dir: Where tfds finds prepared datasets.
            labels: For images:DIR, a CSV file with the columns path and label.
            features: For tfrecord and table, names of the source's features by ours.
            image_size: Side of the stored square images in pixels; 0 keeps them as they are.
            resize_mode: crop, pad or stretch.
            encoding: How images are stored: keep, jpeg, png or raw.
            split: Share of the examples by split; {} for 0.8 train, 0.1 validation, 0.1 test.
            key: path, or content to keep exact duplicates in one split.
            shards: About how many shards the training split gets; 0 follows from shard_size.
            shard_size: About how large a shard is, in MiB, where shards is 0.
            compression: none or gzip.
            on_bad_record: fail, or skip to leave bad examples out.
            max_bad_fraction: With skip, the share of bad examples above which the run fails.
            preprocess_processes: How many processes write the shards on one machine.
            preprocess_tasks: Over how many tasks, each with a machine of its own, the shards are spread.
            model: mnist_cnn, resnet50, keras:NAME, or pkg.module:function.
            hparams: Further keyword arguments of the model function, a JSON object.
            epochs: Passes over the training split.
            per_replica_batch_size: Examples per replica and step; 0 for 16, or what a worker has where that
                is less.
            learning_rate: 0 keeps the model's own.
            seed: Of the split, the weights and the shuffling.
            train_options: Any further option of the trainer by name, a JSON object:
                {"early_stopping": "val_loss", "checkpoint_steps": 500}.
            min_accuracy: The exported model is blessed from this test accuracy on, 0..1.
            rules: Further rules that it must pass: ["worst_slice(accuracy) >= 0.8",
                "accuracy >= champion - 0.005"].
            first_run: What becomes of rules about a champion that cannot be measured: bless or block.
            champion_uri: Where a blessed model is published; empty publishes nothing.
            history_uri: Where runs are remembered; empty remembers none, and every run trains.
            force: Whether to train although nothing has changed.
            deep: Whether files are compared by content, not by names, sizes and times.
            worker_pool_specs: Machines of the training job, as the CustomJob API has them.
        """
        # One by one, here and in the components: in a JSON object of parameters KFP would paste numbers as
        # text, and a quote in a value would break it.
        data = {
            "source": source,
            "data_dir": data_dir,
            "labels": labels,
            "features": features,
            "image_size": image_size,
            "resize_mode": resize_mode,
            "encoding": encoding,
            "split": split,
            "key": key,
            "seed": seed,
            "readers": 1 if settings.pools_at_run_time else settings.train.replica_count,
            "shards": shards,
            "shard_size": shard_size,
            "compression": compression,
            "processes": preprocess_processes,
            "on_bad_record": on_bad_record,
            "max_bad_fraction": max_bad_fraction,
        }
        training = {
            "model": model,
            "hparams": hparams,
            "epochs": epochs,
            "per_replica_batch_size": per_replica_batch_size,
            "learning_rate": learning_rate,
            "seed": seed,
            "train_options": train_options,
            "min_accuracy": min_accuracy,
            "rules": rules,
            "first_run": first_run,
            "champion_uri": champion_uri,
        }
        if settings.pools_at_run_time:
            training["worker_pool_specs"] = worker_pool_specs
        this_run = {"job_name": dsl.PIPELINE_JOB_NAME_PLACEHOLDER, "history_uri": history_uri}
        with dsl.ExitHandler(exit_task(component, settings, this_run), name="run"):
            changes = look_for_changes_op(
                scheduled=dsl.PIPELINE_JOB_SCHEDULE_TIME_UTC_PLACEHOLDER,
                created=dsl.PIPELINE_JOB_CREATE_TIME_UTC_PLACEHOLDER,
                force=force,
                deep=deep,
                **this_run,
                **{name: value for name, value in {**data, **training}.items() if name != "processes"},
            ).set_caching_options(False)
            data["source"] = changes.outputs["source"]

            def train_on(dataset: Any) -> None:
                judged = train_and_register(dataset=dataset, **training)
                record_run_op(
                    exported=judged.output,
                    state=changes.outputs["state"],
                    reason=changes.outputs["reason"],
                    champion_uri=champion_uri,
                    **this_run,
                ).set_caching_options(False)

            with dsl.If(changes.outputs["changed"] == True, name="changed"):  # noqa: E712  # a KFP condition
                if settings.pools_at_run_time:
                    checked = check_worker_pools_op(
                        worker_pool_specs=worker_pool_specs, strategy=settings.train.strategy
                    )
                    training["worker_pool_specs"] = checked.output
                with dsl.If(preprocess_tasks <= 1, name="one-task"):
                    preprocessed = preprocess_op(fingerprint=changes.outputs["fingerprint"], **data)
                    train_on(preprocessed.outputs["dataset"])
                with dsl.Else(name="many-tasks"):
                    # They share a directory, which another run may be filling: not cached.
                    planned = plan_shards_op(tasks=preprocess_tasks, **data).set_caching_options(False)
                    with dsl.ParallelFor(planned.outputs["Output"], name="shards") as task:
                        written = write_shards_op(
                            planned=planned.outputs["planned"], task=task, tasks=preprocess_tasks
                        ).set_caching_options(False)
                    finished = finish_dataset_op(planned=planned.outputs["planned"]).after(written)
                    finished.set_caching_options(False)
                    train_on(finished.outputs["dataset"])

    return retrain


def exit_task(component: Callable[..., Any], settings: Settings, this_run: Mapping[str, Any]) -> Any:
    """Adds what is done at the end of a run however it came out."""
    if settings.notify.emails:
        from google_cloud_pipeline_components.v1.vertex_notification_email import VertexNotificationEmailOp

        return VertexNotificationEmailOp(recipients=list(settings.notify.emails))
    concluded = component(conclude)(
        job_resource_name=dsl.PIPELINE_JOB_RESOURCE_NAME_PLACEHOLDER,
        project="{{$.pipeline_google_cloud_project_id}}",
        notify_when=settings.notify.when,
        webhook_secret=settings.notify.webhook_secret,
        **this_run,
    )
    return concluded.set_caching_options(False)
