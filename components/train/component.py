"""The training step: the same program on the chief and on every worker of a CustomJob.

The steps of a run that gets its worker pools as a parameter.
"""

from typing import NamedTuple

from kfp import dsl


def train(
    dataset: dsl.Input[dsl.Dataset],
    model: dsl.Output[dsl.Model],
    model_function: str,
    hparams: dict,  # type: ignore[type-arg]  # KFP reads the bare type as a JSON object
    epochs: int,
    per_replica_batch_size: int,
    learning_rate: float,
    seed: int,
    train_options: dict,  # type: ignore[type-arg]
) -> None:
    """Trains a compiled Keras model on the replicas of a CustomJob.

    Args:
        dataset: Dataset directory with its manifest.
        model: Receives model.keras, metrics.json, history.csv, settings.json, checkpoints/ and logs/.
        model_function: Built-in name (mnist_cnn, resnet50) or pkg.module:function.
        hparams: Further keyword arguments of the model function.
        epochs: Passes over the training split.
        per_replica_batch_size: Examples per replica and step; 0 for 16, or less where a worker has less.
        learning_rate: Given to the model function; 0 keeps the model's own.
        seed: Of weights, dropout and shuffling.
        train_options: Any further option of `python -m shardline.trainer.task` by name:
            {"early_stopping": "val_loss"}.
    """
    from shardline.components.train.replica import run

    run(
        dataset=dataset,
        model=model,
        model_function=model_function,
        hparams=hparams,
        epochs=epochs,
        per_replica_batch_size=per_replica_batch_size,
        learning_rate=learning_rate,
        seed=seed,
        options=train_options,
    )


def check_worker_pools(worker_pool_specs: list, strategy: str) -> list:  # type: ignore[type-arg]  # KFP's own form
    """Checks the worker pools of a training job, at the start of the run.

    Args:
        worker_pool_specs: In the form of the CustomJob API; see `shardline.components.vertex.pools`.
        strategy: Of the job: STANDARD, SPOT or FLEX_START.

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
    model_function: str,
    hparams: dict,  # type: ignore[type-arg]
    epochs: int,
    per_replica_batch_size: int,
    learning_rate: float,
    seed: int,
    train_options: dict,  # type: ignore[type-arg]
) -> NamedTuple("Outputs", [("worker_pool_specs", list), ("restart", bool)]):  # type: ignore[valid-type]
    """Completes worker pools by the program that every replica runs: the trainer, with these arguments.

    Args:
        worker_pool_specs: Machines.
        image: Container image of replicas that name none.
        dataset: Dataset directory with its manifest.
        model: Where the job will write the model.
        model_function: As for the training component, and so are all that follow.
        hparams: Further keyword arguments of the model function.
        epochs: Passes over the training split.
        per_replica_batch_size: Examples per replica and step.
        learning_rate: Given to the model function; 0 keeps the model's own.
        seed: Of weights, dropout and shuffling.
        train_options: Any further option of the trainer by name.

    Returns:
        The complete pools, and whether all replicas start again when one has.
    """
    from shardline.components.train.replica import program
    from shardline.components.vertex.pools import read_specs
    from shardline.trainer.progress import errors_end_the_process

    with errors_end_the_process("train"):
        cluster = read_specs(worker_pool_specs)
        specs = cluster.specs(
            program(
                image,
                dataset=dataset.path,
                model=model.path,
                model_function=model_function,
                hparams=hparams,
                epochs=epochs,
                per_replica_batch_size=per_replica_batch_size,
                learning_rate=learning_rate,
                seed=seed,
                options=train_options,
            )
        )
    return specs, cluster.is_synchronous
