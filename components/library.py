"""The components for pipelines of one's own: flat inputs, each with a default where there can be one.

`shardline.components` has them under their names. The pipelines of Shardline itself hand objects from task to
task (`shardline.components.parameters`); a pipeline cannot make such an object of its own parameters, so each
field is an input here. KFP embeds the source text of a function alone: they import inside.
"""

import functools
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

from kfp import dsl

from shardline.components.train.custom_job import custom_job
from shardline.components.vertex.job import CustomJobSettings
from shardline.components.vertex.pools import Cluster, WorkerPool


def preprocess(  # noqa: D417  # the fields are explained where they are defined
    dataset: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    card: dsl.Output[dsl.HTML],
    source: str = "digits",
    data_dir: str = "",
    labels: str = "",
    features: dict = {},  # type: ignore[type-arg]  # noqa: B006  # KFP reads type and default
    label: str = "",
    columns: dict = {},  # type: ignore[type-arg]  # noqa: B006
    image_size: int = 0,
    resize_mode: str = "crop",
    encoding: str = "keep",
    split: dict = {},  # type: ignore[type-arg]  # noqa: B006
    stratify: bool = False,
    key: str = "path",
    group: str = "",
    split_by_time: str = "",
    split_gap: str = "",
    split_salt: int = 0,
    seed: int = 0,
    readers: int = 1,
    shards: int = 8,
    shard_size: int = 128,
    compression: str = "none",
    processes: int = 0,
    on_bad_record: str = "fail",
    max_bad_fraction: float = 0.01,
    schema: str = "",
    on_anomaly: str = "fail",
    max_pixels: int = 100_000_000,
    check_images: str = "structure",
    fingerprint: str = "",
) -> None:
    """Turns a source of labelled examples into balanced TFRecord shards and a manifest.

    From `source` on, the inputs are the fields of
    `shardline.components.preprocess.settings.PreprocessSettings`, which explains them.

    Args:
        dataset: Dataset directory; its metadata gets the fingerprint, the kinds of the labels and
            the records of each split.
        metrics: Records of each split, rejected examples and duplicates.
        card: The dataset card, a page to look at.
        fingerprint: What the source's content is known by; not read. KFP's cache compares inputs, and the
            source string does not change when the data does.
    """
    data = dict(locals())
    for name in ("dataset", "metrics", "card", "fingerprint"):
        del data[name]
    from shardline.components.preprocess.artifact import preprocess_artifact

    preprocess_artifact(data, processes, dataset, metrics, card)


def rehearse(  # noqa: D417  # the fields are explained where they are defined
    dataset: dsl.Input[dsl.Dataset],
    job: dsl.Output[dsl.Artifact],
    model_function: str = "mnist_cnn",
    hparams: dict = {},  # type: ignore[type-arg]  # noqa: B006
    epochs: int = 20,
    per_replica_batch_size: int = 0,
    learning_rate: float = 0.0,
    seed: int = 0,
    train_options: dict = {},  # type: ignore[type-arg]  # noqa: B006
    min_accuracy: float = 0.0,
    rules: list = [],  # type: ignore[type-arg]  # noqa: B006
    first_run: str = "bless",
    champion_uri: str = "",
    formats: list = [],  # type: ignore[type-arg]  # noqa: B006
    readers: int = 1,
    parameter_servers: int = 0,
    job_directory: str = "",
    job_name: str = dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
) -> NamedTuple("Outputs", [("base_output_directory", str)]):  # type: ignore[valid-type]
    """Tries on a few examples what training and judgement will do, before a cluster is paid for.

    Args:
        dataset: Dataset directory.
        job: Nothing is written there; its place is that of this run.
        model_function: As for `train`, and so are the inputs up to `train_options`.
        min_accuracy: As for `export_validate`, and so are the inputs up to `formats`.
        readers: Replicas that will train.
        parameter_servers: Replicas that will hold the variables.
        job_directory: Where the training keeps its checkpoints; "" for a directory of the run.
        job_name: Name of the run.

    Returns:
        The directory of the checkpoints, the same in all attempts: for `train`.
    """
    given = dict(locals())
    from shardline.components.parameters import gate_of, training_of
    from shardline.trainer.progress import errors_end_the_process

    with errors_end_the_process("rehearse"):
        from shardline.components.rehearse.rehearsal import rehearse_run

        base = rehearse_run(
            dataset,
            job,
            training_of(given),
            gate_of(given),
            readers=readers,
            parameter_servers=parameter_servers,
            job_directory=job_directory,
            job_name=job_name,
        )
        return (base,)


def train(  # noqa: D417  # the fields are explained where they are defined
    dataset: dsl.Input[dsl.Dataset],
    model: dsl.Output[dsl.Model],
    model_function: str = "mnist_cnn",
    hparams: dict = {},  # type: ignore[type-arg]  # noqa: B006
    epochs: int = 20,
    per_replica_batch_size: int = 0,
    learning_rate: float = 0.0,
    seed: int = 0,
    train_options: dict = {},  # type: ignore[type-arg]  # noqa: B006
) -> None:
    """Trains a compiled Keras model: the same program on the chief and on every worker of a CustomJob.

    The inputs are the fields of `shardline.components.parameters.TrainingSettings`, which explains them.

    Args:
        dataset: Dataset directory with its manifest.
        model: Receives model.keras, metrics.json, history.csv and settings.json.
        model_function: The field `model`: mnist_cnn, resnet50, keras:NAME, or pkg.module:function.
    """
    given = dict(locals())
    from shardline.components.parameters import training_of
    from shardline.components.train.replica import run

    run(dataset=dataset, model=model, training=training_of(given))


def export_validate(  # noqa: D417  # the fields are explained where they are defined
    dataset: dsl.Input[dsl.Dataset],
    model: dsl.Input[dsl.Model],
    exported: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    confusion: dsl.Output[dsl.ClassificationMetrics],
    sliced: dsl.Output[dsl.SlicedClassificationMetrics],
    report: dsl.Output[dsl.HTML],
    min_accuracy: float = 0.0,
    rules: list = [],  # type: ignore[type-arg]  # noqa: B006
    first_run: str = "bless",
    champion_uri: str = "",
    formats: list = [],  # type: ignore[type-arg]  # noqa: B006
    job_name: str = dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
) -> NamedTuple("Outputs", [("blessed", bool), ("quality", str)]):  # type: ignore[valid-type]
    """Exports a model and judges the export on the test split.

    From `min_accuracy` on, the inputs are the fields of `shardline.components.parameters.GateSettings`, which
    explains them.

    Args:
        dataset: Dataset directory.
        model: Directory with model.keras.
        exported: SavedModel with its evaluation, report and verdict.
        metrics: Every metric and the number of examples.
        confusion: Confusion matrix, and of two classes the ROC curve.
        sliced: ROC curve of each class against the others, up to twelve classes.
        report: HTML page for a person.
        job_name: Name of the run.

    Returns:
        Whether the model is blessed, and how good it is on the test split: "accuracy 0.9812".
    """
    given = dict(locals())
    from shardline.components.parameters import gate_of
    from shardline.trainer.progress import errors_end_the_process

    with errors_end_the_process("validate"):
        from shardline.components.validate.validation import validate_artifacts

        outputs = {name: given[name] for name in ("metrics", "confusion", "sliced", "report")}
        return validate_artifacts(dataset, model, exported, gate_of(given), run=job_name, **outputs)


def register(
    exported: dsl.Input[dsl.Model],
    champion_uri: str = "",
    job_name: str = dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
) -> None:
    """Publishes a model as the champion if it is blessed, once in a run; of another it says that it is not.

    Args:
        exported: SavedModel with its evaluation, report and verdict, as `export_validate` gives it.
        champion_uri: Where it is published; "" publishes nothing.
        job_name: Name of the run.
    """
    from pathlib import Path

    from shardline.components.register.publish import register_model
    from shardline.trainer.progress import errors_end_the_process, say

    with errors_end_the_process("register"):
        if exported.metadata.get("blessed"):
            register_model(Path(exported.path), exported.metadata["quality"], champion_uri, job_name)
        else:
            say("register", "the model is not blessed: it is not published")


@dataclass(frozen=True)
class Components:
    """The components in one image, each to be called in a pipeline; `train` is the task of a CustomJob."""

    preprocess: Callable[..., dsl.PipelineTask]
    rehearse: Callable[..., dsl.PipelineTask]
    train: Callable[..., dsl.PipelineTask]
    export_validate: Callable[..., dsl.PipelineTask]
    register: Callable[..., dsl.PipelineTask]


#: Names of the components.
NAMES = tuple(field.name for field in fields(Components))


def with_image(image: str, job: CustomJobSettings | None = None) -> Components:
    """Returns the components in a container image, as 'shardline image build' makes it of the installed one.

    Args:
        image: Name of the image. A run on this machine needs none.
        job: Machines of the training, and how the platform runs it; one n1-standard-8 unless given.
    """
    component = functools.partial(dsl.component, base_image=image, install_kfp_package=False)
    job = job or CustomJobSettings(cluster=Cluster.of(WorkerPool(machine_type="n1-standard-8")))
    return Components(
        preprocess=component(preprocess),
        rehearse=component(rehearse),
        train=custom_job(component(train), job),
        export_validate=component(export_validate),
        register=component(register),
    )


@functools.cache
def default() -> Components:
    """Returns the components in the image that is called as settings/local.toml calls it."""
    try:
        version = importlib.metadata.version("shardline")
    except importlib.metadata.PackageNotFoundError:
        return with_image("shardline")
    return with_image(f"shardline:{version}")
