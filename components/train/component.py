"""The training component, and the steps of a run whose worker pools are a parameter.

KFP embeds the source text of each function alone, so they import inside.
"""

from typing import NamedTuple

from kfp import dsl


def train(dataset: dsl.Input[dsl.Dataset], model: dsl.Output[dsl.Model], training: dict) -> None:  # type: ignore[type-arg]  # KFP reads the bare type as a JSON object
    """Trains a compiled Keras model: the same program on the chief and on every worker of a CustomJob.

    Args:
        dataset: Dataset directory with its manifest.
        model: Receives model.keras, metrics.json, history.csv and settings.json.
        training: What is trained, and how: the fields of `components.train.settings.TrainingSettings`.
    """
    from shardline.components.train.replica import run

    run(dataset=dataset, model=model, training=training)


def check_worker_pools(worker_pool_specs: list, strategy: str) -> list:  # type: ignore[type-arg]  # KFP's own form
    """Checks the worker pools of a training job, at the start of the run.

    Args:
        worker_pool_specs: In the form of the CustomJob API; see `shardline.components.vertex.pools`.
        strategy: Scheduling strategy of the job: STANDARD, SPOT or FLEX_START.

    Returns:
        The same.
    """
    from shardline.components.vertex.job import CustomJobSettings
    from shardline.components.vertex.pools import read_specs
    from shardline.trainer.progress import errors_end_the_process

    with errors_end_the_process("train"):
        CustomJobSettings(cluster=read_specs(worker_pool_specs), strategy=strategy)
    return worker_pool_specs


def plan_training(
    worker_pool_specs: list,  # type: ignore[type-arg]
    image: str,
    dataset: dsl.Input[dsl.Dataset],
    model: dsl.Output[dsl.Model],
    training: dict,  # type: ignore[type-arg]
) -> NamedTuple("Outputs", [("worker_pool_specs", list), ("restart", bool)]):  # type: ignore[valid-type]
    """Completes worker pools by the program that every replica runs: the trainer, with these arguments.

    Args:
        worker_pool_specs: Machines, in the form of the CustomJob API.
        image: Container image of replicas that name none.
        dataset: Dataset directory with its manifest.
        model: Where the job will write the model.
        training: What is trained, and how, as for `train`.

    Returns:
        The complete pools, and whether all replicas start again when one has.
    """
    from shardline.components.train.replica import program
    from shardline.components.vertex.pools import read_specs
    from shardline.trainer.progress import errors_end_the_process

    with errors_end_the_process("train"):
        cluster = read_specs(worker_pool_specs)
        model.metadata.update(framework="keras", model_function=training["model"])
        container = program(image, dataset=dataset.path, model=model.path, training=training)
    return cluster.specs(container), cluster.is_synchronous
