"""TensorFlow's tutorial "Multi-worker training with Keras", on any number of workers by one changed line.

    python examples/fit/tensorflow_tutorial.py
    shardline launch 2 -- examples/fit/tensorflow_tutorial.py

https://www.tensorflow.org/tutorials/distribute/multi_worker_with_keras
"""

import argparse

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


def build_and_compile_cnn_model() -> keras.Model:
    """Returns the tutorial's network."""
    model = keras.Sequential(
        [
            keras.Input((28, 28)),
            keras.layers.Reshape((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(learning_rate=0.01),
        metrics=["accuracy"],
    )
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", default="", help="mnist.npz; downloaded unless given")
    parser.add_argument("--steps", type=int, default=70, help="steps of each of three epochs")
    parser.add_argument("--model", default="mnist.keras", help="where the trained model is written")
    parser.add_argument("--checkpoints", help="directory from which a killed run goes on")
    given = parser.parse_args()
    arguments = {
        "epochs": 3,
        "steps_per_epoch": given.steps,
        "callbacks": [keras.callbacks.ModelCheckpoint(given.model)],
    }
    dataset = mnist_dataset(given.data, batch_size=128)
    # build_and_compile_cnn_model().fit(dataset, **arguments)
    shardline.fit(build_and_compile_cnn_model, dataset, checkpoint_dir=given.checkpoints, **arguments)
