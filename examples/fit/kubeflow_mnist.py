"""The Keras example of Kubeflow's TFJob on MNIST, on any number of workers by one changed line.

    python examples/fit/kubeflow_mnist.py
    shardline launch 2 -- examples/fit/kubeflow_mnist.py

https://github.com/kubeflow/training-operator/tree/release-1.9/examples/tensorflow/distribution_strategy/keras-API
"""

import argparse
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import shardline


def make_datasets(path: str) -> tf.data.Dataset:
    """Returns the digits, float32 (28, 28, 1) from 0 to 1, and their classes, int64 ()."""
    if path:
        with np.load(path) as arrays:
            x, y = arrays["x_train"], arrays["y_train"]
    else:
        (x, y), _ = keras.datasets.mnist.load_data()

    def scale(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.cast(image, tf.float32) / 255, tf.cast(label, tf.int64)

    return tf.data.Dataset.from_tensor_slices((x[..., None], y)).map(scale).cache().shuffle(10_000, seed=1)


def build_and_compile_cnn_model() -> keras.Model:
    """Returns three convolutions, two of them behind a pooling, and two dense layers."""
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def decay(epoch: int) -> float:
    """Returns the learning rate of an epoch, from 0."""
    return 1e-3 if epoch < 3 else 1e-4 if epoch < 7 else 1e-5


class PrintLR(keras.callbacks.Callback):
    """Prints the learning rate at the end of an epoch."""

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Prints it."""
        rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        print(f"Learning rate for epoch {epoch + 1} is {rate:g}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", default="", help="mnist.npz; downloaded unless given")
    parser.add_argument("--steps", type=int, default=70, help="steps of each epoch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--model", default="mnist.keras", help="where the trained model is written")
    parser.add_argument("--logs", type=Path, default=Path("logs"), help="directory for TensorBoard")
    parser.add_argument("--checkpoints", help="directory from which a killed run goes on")
    given = parser.parse_args()
    callbacks = [
        keras.callbacks.TensorBoard(given.logs),
        keras.callbacks.ModelCheckpoint(given.model),
        keras.callbacks.LearningRateScheduler(decay),
        PrintLR(),
    ]
    arguments = {"epochs": given.epochs, "steps_per_epoch": given.steps, "callbacks": callbacks}
    ds_train = make_datasets(given.data).batch(128).repeat()
    # build_and_compile_cnn_model().fit(ds_train, **arguments)
    shardline.fit(build_and_compile_cnn_model, ds_train, checkpoint_dir=given.checkpoints, **arguments)
