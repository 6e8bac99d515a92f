"""The tuning pipeline."""

from collections.abc import Callable
from typing import Any

from kfp import dsl

from shardline.components.preprocess.component import preprocess
from shardline.components.tune.component import best_trial, plan_study
from shardline.components.tune.job import hyperparameter_tuning_job
from shardline.components.vertex.forms import check_labels, check_pasted_text
from shardline.pipelines.retrain import exit_task
from shardline.pipelines.settings import Settings
from shardline.pipelines.spec import TUNE
from shardline.pipelines.train_and_register import train_and_register_pipeline
from shardline.trainer.errors import SettingsError


def tune_pipeline(settings: Settings, study_file: str) -> Any:
    """Builds the pipeline for one environment.

    Args:
        settings: Image and machines: each trial has those of the training step.
        study_file: Content of a study file as JSON, the default of the parameter `study`.

    Returns:
        The pipeline, as `dsl.pipeline` gives it.

    Raises:
        SettingsError: When the machines are a parameter of each run, which the trials' are not.
    """
    if settings.pools_at_run_time:
        raise SettingsError(
            "the tuning pipeline takes its machines from [train]: leave out pools_at_run_time"
        )

    def component(function: Callable[..., Any]) -> Any:
        # The image has kfp: nothing is installed when a task starts.
        return dsl.component(base_image=settings.image, install_kfp_package=False)(function)

    preprocess_op, plan_study_op = component(preprocess), component(plan_study)
    best_trial_op = component(best_trial)
    train_and_register = train_and_register_pipeline(component, settings, TUNE)
    job = job_arguments(settings)
    pools = settings.train.cluster.specs({"image_uri": settings.image})

    @dsl.pipeline(  # type: ignore[untyped-decorator]
        name=TUNE, description="The best hyperparameters, and a registered model that was trained with them."
    )
    def tune(
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
        # As text: KFP writes the keys of an object with more than one key in an order that changes.
        study: str = study_file,
        max_trial_count: int = 0,
        trial_epochs: int = 0,
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
    ) -> None:
        """Finds hyperparameters for a model and trains it with the best.

        1. Preprocess: the source becomes TFRecord shards with a manifest.
        2. Tune: a HyperparameterTuningJob, each of whose trials is a training on the whole cluster.
        3. Find the best trial.
        4. Train with its parameters, validate and register as the retraining pipeline does.
        5. Conclude, whatever has happened: the run is explained, and whoever wants to know is told.

        Args:
            source: As for the retraining pipeline, and so is everything that is not explained here.
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
            preprocess_processes: How many processes write the shards.
            study: What is searched, how, and for which metric: a study file as JSON.
            max_trial_count: In the place of the study's own; 0 leaves it.
            trial_epochs: Passes over the training split in each trial; 0 for as many as epochs.
            model: mnist_cnn, resnet50, keras:NAME, or pkg.module:function.
            hparams: Keyword arguments of the model function that are not tuned.
            epochs: Passes over the training split in the training at the end.
            per_replica_batch_size: Where it is not tuned; 0 for 16, or what a worker has where that is less.
            learning_rate: Where it is not tuned; 0 keeps the model's own.
            seed: Of the split, the weights and the shuffling; on one's own machine also of the search.
            train_options: Any further option of the trainer by name, a JSON object.
            min_accuracy: The exported model is blessed from this test accuracy on, 0..1.
            rules: Further rules that it must pass.
            first_run: What becomes of rules about a champion that cannot be measured: bless or block.
            champion_uri: Where a blessed model is published; empty publishes nothing.
            history_uri: Where the run is recorded; empty records nothing.
        """
        this_run = {"job_name": dsl.PIPELINE_JOB_NAME_PLACEHOLDER, "history_uri": history_uri}
        with dsl.ExitHandler(exit_task(component, settings, this_run), name="run"):
            preprocessed = preprocess_op(
                source=source,
                data_dir=data_dir,
                labels=labels,
                features=features,
                image_size=image_size,
                resize_mode=resize_mode,
                encoding=encoding,
                split=split,
                key=key,
                seed=seed,
                readers=settings.train.replica_count,
                shards=shards,
                shard_size=shard_size,
                compression=compression,
                processes=preprocess_processes,
                on_bad_record=on_bad_record,
                max_bad_fraction=max_bad_fraction,
            )
            # The same source string may hold other data tomorrow: a cached result would be stale.
            dataset = preprocessed.set_caching_options(False).outputs["dataset"]
            training = {
                "hparams": hparams,
                "per_replica_batch_size": per_replica_batch_size,
                "learning_rate": learning_rate,
                "seed": seed,
                "train_options": train_options,
            }
            planned = plan_study_op(
                study=study,
                max_trial_count=max_trial_count,
                trial_epochs=trial_epochs,
                epochs=epochs,
                worker_pool_specs=pools,
                image=settings.image,
                job_labels={"component": "tune", "pipeline": TUNE, **settings.train.labels},
                dataset=dataset,
                model_function=model,
                **training,
            )
            # A plan that is cached names the directory of an earlier run.
            planned.set_caching_options(False)
            fields = {name: planned.outputs[name] for name in planned.outputs if name != "trials"}
            tuned = hyperparameter_tuning_job(**fields, **job)
            best = best_trial_op(gcp_resources=tuned.outputs["gcp_resources"], epochs=epochs, **training)
            names = ("epochs", *training)
            train_and_register(
                dataset=dataset,
                model=model,
                **{name: best.outputs[name] for name in names},
                min_accuracy=min_accuracy,
                rules=rules,
                first_run=first_run,
                champion_uri=champion_uri,
            )

    return tune


def job_arguments(settings: Settings) -> dict[str, Any]:
    """Returns what is fixed of the tuning job when the pipeline is compiled.

    Raises:
        SettingsError: When a label is none, or the name would break the launcher's payload.
    """
    arguments = settings.train.arguments
    del arguments["base_output_directory"]  # the run's own, below the pipeline's root
    if settings.train.strategy != "FLEX_START":
        arguments["max_wait_duration"] = ""  # which the API takes with no other strategy
    display_name = settings.train.display_name or TUNE
    check_pasted_text("display_name", display_name)
    check_labels(settings.train.labels)
    return {"display_name": display_name, **arguments}
