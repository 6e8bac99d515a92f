"""The training step: the same program on the chief and on every worker of a CustomJob."""

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
        train_options: Any further option of `python -m shardline.trainer.task` by name: {"early_stopping": "val_loss"}.
    """
    from shardline.components.train.run import run

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
