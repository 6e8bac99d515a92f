"""The retraining pipeline."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from kfp import dsl

from components.export_validate.component import export_validate
from components.preprocess.component import preprocess
from components.preprocess.fan_out import finish_dataset, plan_shards, write_shards
from components.register.component import register, registry_evaluation, serving_model
from components.register.model_registry import upload_task
from components.train.component import train
from components.train.pools.expand import custom_job
from components.train.pools.planning import check_worker_pools
from components.train.pools.run_time import custom_job_at_run_time
from pipelines.settings import Settings

_F = TypeVar("_F", bound=Callable[..., None])

#: Name of the pipeline, in the compiled YAML too.
NAME = "retrain"


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

    preprocess_op = component(preprocess)
    plan_shards_op = component(plan_shards)
    write_shards_op = component(write_shards)
    finish_dataset_op = component(finish_dataset)
    check_worker_pools_op = component(check_worker_pools)
    train_and_register = _train_and_register(component, settings)

    @dsl.pipeline(name=NAME, description="From raw data to a registered model, if it is good enough.")  # type: ignore[untyped-decorator]
    @_parameters(settings)
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
        worker_pool_specs: list = [],  # type: ignore[type-arg]  # noqa: B006
    ) -> None:
        """Retrains a model.

        1. Preprocess: the source becomes TFRecord shards with a manifest, in one task or in many.
        2. Train: a CustomJob of one chief and its workers.
        3. Export and validate: the exported model is judged on the test split.
        4. Register, if blessed: the model becomes the champion.

        Args:
            source: digits, tfds:NAME, images:DIR, tfrecord:GLOB, table:PATH, or pkg.module:Source.
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
            checked = check_worker_pools_op(
                worker_pool_specs=worker_pool_specs, strategy=settings.train.strategy
            )
            training["worker_pool_specs"] = checked.output
        # The same source string may hold other data tomorrow: a cached result would be stale.
        with dsl.If(preprocess_tasks <= 1, name="one-task"):
            preprocessed = preprocess_op(**data).set_caching_options(False)
            train_and_register(dataset=preprocessed.outputs["dataset"], **training)
        with dsl.Else(name="many-tasks"):
            planned = plan_shards_op(tasks=preprocess_tasks, **data).set_caching_options(False)
            with dsl.ParallelFor(planned.outputs["Output"], name="shards") as task:
                written = write_shards_op(
                    planned=planned.outputs["planned"], task=task, tasks=preprocess_tasks
                ).set_caching_options(False)
            finished = finish_dataset_op(planned=planned.outputs["planned"]).after(written)
            finished.set_caching_options(False)
            train_and_register(dataset=finished.outputs["dataset"], **training)

    return retrain


def _train_and_register(component: Callable[..., Any], settings: Settings) -> Any:
    """Builds the part of the pipeline that begins with a dataset."""
    train_model = _train(component, settings)
    export_validate_op = component(export_validate)
    register_op = component(register)
    serving_model_op = component(serving_model)
    registry_evaluation_op = component(registry_evaluation)

    @dsl.pipeline(name="train-and-register")  # type: ignore[untyped-decorator]
    @_parameters(settings)
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
    ) -> None:
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
        with dsl.If(validated.outputs["blessed"] == True, name="blessed"):  # noqa: E712  # a KFP condition
            registered = register_op(
                exported=validated.outputs["exported"],
                accuracy=validated.outputs["accuracy"],
                champion_uri=champion_uri,
            )
            if settings.model_upload:
                ready = serving_model_op(
                    exported=validated.outputs["exported"],
                    accuracy=validated.outputs["accuracy"],
                    image_uri=settings.model_upload.serving_image_uri,
                ).after(registered)
                uploaded = upload_task(settings.model_upload, ready, labels={"pipeline": NAME})
                registry_evaluation_op(
                    exported=validated.outputs["exported"], model=uploaded.outputs["model"]
                )

    return train_and_register


def _train(component: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    """Returns what makes the training task and gives its model."""
    labels = {"pipeline": NAME}
    if settings.pools_at_run_time:
        pipeline = custom_job_at_run_time(component, settings.image, settings.train, labels)
        return lambda **inputs: pipeline(**inputs).output
    job = custom_job(component(train), settings.train, labels)

    def train_model(worker_pool_specs: Any, **inputs: Any) -> Any:
        return job(**inputs).outputs["model"]

    return train_model


def _parameters(settings: Settings) -> Callable[[_F], _F]:
    """Hides worker_pool_specs where pools are fixed: KFP makes a parameter of all that it sees."""

    def decorate(function: _F) -> _F:
        signature = inspect.signature(function)
        shown = [p for p in signature.parameters.values() if p.name != "worker_pool_specs"]
        if not settings.pools_at_run_time:
            function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        return function

    return decorate
