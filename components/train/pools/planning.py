"""The steps of a run that gets its worker pools as a parameter."""

from typing import NamedTuple

from kfp import dsl


def check_worker_pools(worker_pool_specs: list, strategy: str) -> list:  # type: ignore[type-arg]  # KFP's own form
    """Checks the worker pools of a training job, at the start of the run.

    Args:
        worker_pool_specs: In the form of the CustomJob API; see `shardline.components.train.pools.parse`.
        strategy: Of the job: STANDARD, SPOT or FLEX_START.

    Returns:
        The same.
    """
    from shardline.components.train.pools.job import CustomJobSettings
    from shardline.components.train.pools.parse import read_specs
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
    from shardline.components.train.pools.parse import read_specs
    from shardline.components.train.pools.program import program
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
