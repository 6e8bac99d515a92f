"""The MNIST example of Ray Train with TensorFlow, on any number of workers by one changed line.

    python examples/fit/ray_mnist.py
    shardline launch 2 -- examples/fit/ray_mnist.py

Under Ray `train_func` is what a TensorflowTrainer gets, unchanged: Ray sets TF_CONFIG in each of its workers.
https://docs.ray.io/en/latest/train/examples/tf/tensorflow_mnist_example.html
"""

import argparse
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import shardline


def mnist_dataset(path: str, batch_size: int) -> tf.data.Dataset:
    """Returns batches of digits, float32 (batch, 28, 28) from 0 to 1, and of their classes, int64."""
    if path:
        with np.load(path) as arrays:
            x, y = arrays["x_train"], arrays["y_train"]
    else:
        (x, y), _ = keras.datasets.mnist.load_data()
    examples = tf.data.Dataset.from_tensor_slices((np.float32(x) / 255, np.int64(y)))
    return examples.shuffle(60_000, seed=1).repeat().batch(batch_size)


def train_func(config: dict[str, Any]) -> keras.callbacks.History:
    """Trains as one of the workers, with the same arguments as all others."""

    def build_model() -> keras.Model:
        model = keras.Sequential(
            [
                keras.Input((28, 28)),
                keras.layers.Flatten(),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=keras.optimizers.SGD(learning_rate=config["lr"]),
            metrics=["accuracy"],
        )
        return model

    dataset = mnist_dataset(config["data"], config["batch_size"])
    callbacks = [keras.callbacks.ModelCheckpoint(config["model"])]
    # build_model().fit(dataset, epochs=config["epochs"], steps_per_epoch=70, callbacks=callbacks)
    return shardline.fit(
        build_model,
        dataset,
        epochs=config["epochs"],
        steps_per_epoch=config["steps"],
        callbacks=callbacks,
        checkpoint_dir=config["checkpoints"],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", default="", help="mnist.npz; downloaded unless given")
    parser.add_argument("--steps", type=int, default=70, help="steps of each epoch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate")
    parser.add_argument("--batch-size", type=int, default=128, help="examples of all workers in a step")
    parser.add_argument("--model", default="mnist.keras", help="where the trained model is written")
    parser.add_argument("--checkpoints", help="directory from which a killed run goes on")
    train_func(vars(parser.parse_args()))
