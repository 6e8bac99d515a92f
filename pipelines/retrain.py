"""The retraining pipeline."""

from collections.abc import Callable
from typing import Any

from kfp import dsl

from components.export_validate.component import export_validate
from components.preprocess.component import preprocess
from components.register.component import register
from components.train.component import train
from components.train.worker_pools import custom_job
from pipelines.settings import Settings

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
    train_op = custom_job(component(train), settings.train)
    export_validate_op = component(export_validate)
    register_op = component(register)

    @dsl.pipeline(name=NAME, description="From raw data to a registered model, if it is good enough.")  # type: ignore[untyped-decorator]
    def retrain(
        source: str = "digits",
        data_dir: str = "",
        image_size: int = 0,
        model: str = "mnist_cnn",
        hparams: dict = {},  # type: ignore[type-arg]  # noqa: B006  # KFP reads type and default
        epochs: int = 20,
        per_replica_batch_size: int = 16,
        learning_rate: float = 0.0,
        seed: int = 0,
        min_accuracy: float = 0.95,
        champion_uri: str = "",
    ) -> None:
        """Retrains a model.

        1. Preprocess: the source becomes TFRecord shards with a manifest.
        2. Train: a CustomJob of one chief and its workers.
        3. Export and validate: the exported model is judged on the test split.
        4. Register, if blessed: the model becomes the champion.

        Args:
            source: digits, tfds:NAME, images:DIR, or pkg.module:Source.
            data_dir: Where tfds finds prepared datasets.
            image_size: Side of the stored square images in pixels; 0 keeps them as they are.
            model: mnist_cnn, resnet50, or pkg.module:function.
            hparams: Further keyword arguments of the model function, a JSON object.
            epochs: Passes over the training split.
            per_replica_batch_size: Examples per replica and step.
            learning_rate: 0 keeps the model's own.
            seed: Of the split, the weights and the shuffling.
            min_accuracy: The exported model is blessed from this test accuracy on, 0..1.
            champion_uri: Where a blessed model is published; empty publishes nothing.
        """
        # The same source string may hold other data tomorrow: a cached result would be stale.
        data = preprocess_op(
            source=source,
            data_dir=data_dir,
            image_size=image_size,
            readers=settings.train.replica_count,
            seed=seed,
        ).set_caching_options(False)
        trained = train_op(
            dataset=data.outputs["dataset"],
            model_function=model,
            hparams=hparams,
            epochs=epochs,
            per_replica_batch_size=per_replica_batch_size,
            learning_rate=learning_rate,
            seed=seed,
        )
        validated = export_validate_op(
            dataset=data.outputs["dataset"], model=trained.outputs["model"], min_accuracy=min_accuracy
        )
        with dsl.If(validated.outputs["blessed"] == True, name="blessed"):  # noqa: E712  # a KFP condition
            register_op(
                exported=validated.outputs["exported"],
                accuracy=validated.outputs["accuracy"],
                champion_uri=champion_uri,
            )

    return retrain
