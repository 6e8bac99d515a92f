"""`shardline.fit` on the workers of Ray Train: a lost worker costs the steps since the newest checkpoint.

    python examples/ray/preprocess.py digits /shared/digits --parts 8
    python examples/ray/train.py /shared/digits --checkpoints /shared/checkpoints --model /shared/digits.keras

All machines of the cluster see these paths. https://docs.ray.io/en/latest/train/distributed-tensorflow-keras.html
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import shardline


def train(config: dict[str, Any]) -> dict[str, list[float]] | str:
    """Trains as one of the workers, and returns the history, or the message of a mistake."""
    import keras  # only workers need TensorFlow

    def build_model() -> keras.Model:
        keras.utils.set_random_seed(1)
        layers = keras.layers
        model = keras.Sequential(
            [keras.Input((8, 8, 1)), layers.Flatten(), layers.Dropout(0.1), layers.Dense(10)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(config["learning_rate"]), loss, metrics=["accuracy"])
        return model

    try:
        history = shardline.fit(
            build_model,
            config["dataset"],
            batch_size=64,
            epochs=config["epochs"],
            validation_data=config["dataset"],
            callbacks=[keras.callbacks.ModelCheckpoint(config["model"])],
            checkpoint_dir=config["checkpoints"],
            checkpoint_steps=config["checkpoint_steps"],
            deterministic=True,
        )
    except shardline.ShardlineError as error:
        if error.exit_code != 2:
            raise  # such as a lost worker: Ray starts all of them again
        return str(error)  # a mistake would only be repeated
    results: dict[str, list[float]] = history.history
    return results


def main() -> None:
    """Entry point."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("dataset", help="directory written by preprocess.py")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--failures", type=int, default=3, help="times that Ray starts all workers again")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--checkpoints", required=True, help="directory from which workers go on")
    parser.add_argument("--checkpoint-steps", type=int, default=10)
    parser.add_argument("--model", required=True, help="where the trained model is written, as .keras")
    config = vars(parser.parse_args())
    trainer = TensorflowTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=config["workers"]),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=config["failures"])),
    )
    result = trainer.fit().return_value  # of the first worker
    if isinstance(result, str):
        print(f"error: {result}", file=sys.stderr)
        sys.exit(2)
    print(result)


if __name__ == "__main__":
    main()
