"""`python -m tests.helpers.parameter_server MODE DIRECTORY`: a process of a cluster with parameter servers.

A tiny model trains on records that are raw bytes. MODE names the function that the chief runs, and what it
finds it prints as lines of JSON.
"""

import json
import os
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.base import progress
from shardline.trainer.base.errors import RunError, SettingsError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.cluster import read_cluster
from shardline.trainer.distribute import strategy as strategies
from shardline.trainer.loop import run_server
from shardline.trainer.loop.parameter_server import CoordinatorEvaluation, CoordinatorLoop, Workers

RECORDS, BATCH, SIDE = 90, 8, 6
SIZES = [BATCH] * (RECORDS // BATCH) + [RECORDS % BATCH]


@keras.saving.register_keras_serializable("parameter_server")
class Sum(keras.metrics.Metric):
    """Sum of all labels: an example that is lost or counted twice shows."""

    def __init__(self, name="sum", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(tf.cast(y_true, tf.float32)))

    def result(self):
        return self.total


def make_model():
    """Everything that makes a step's bookkeeping hard: statistics, masks, added and regularized losses."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 1), dtype="uint8"),
            layers.Rescaling(1 / 255),
            layers.Conv2D(4, 3, use_bias=False, kernel_regularizer=keras.regularizers.L2(1e-2), name="conv"),
            layers.BatchNormalization(momentum=0.5),
            layers.ActivityRegularization(l2=1e-3),
            layers.Flatten(),
            layers.Dropout(0.25),
            layers.Dense(3, activation="softmax"),
        ]
    )
    schedule = keras.optimizers.schedules.ExponentialDecay(1e-2, 5, 0.9)
    model.compile(
        keras.optimizers.Adam(schedule, clipnorm=1.0),
        "sparse_categorical_crossentropy",
        metrics=["accuracy", Sum()],
    )
    model._symbolic_build(data_batch=(np.zeros((1, SIDE, SIDE, 1), np.uint8), np.zeros(1, np.int64)))
    return model


def raw_batches(passes=1, labels=3):
    rng = np.random.default_rng(0)
    y = np.arange(RECORDS) % labels
    x = rng.integers(0, 100, (RECORDS, SIDE * SIDE), np.uint8)
    for image, label in zip(x, y, strict=True):
        image[label * 12 : label * 12 + 12] += 120
    raw = {"example": [image.tobytes() for image in x], "label": y}
    return tf.data.Dataset.from_tensor_slices(raw).batch(BATCH).repeat(passes)


def decode(raw):
    pixels = tf.reshape(tf.io.decode_raw(raw["example"], tf.uint8), (-1, SIDE, SIDE, 1))
    in_range = tf.debugging.assert_less(raw["label"], tf.cast(3, tf.int64), message="label out of range")
    with tf.control_dependencies([in_range]):
        return pixels, tf.identity(raw["label"])


class Chief:
    def __init__(self, cluster, model_function=make_model, timeout=600.0):
        settings = TrainSettings(dataset="-", model="-", strategy="parameter_server")
        self.strategy = strategies.create_strategy(settings, cluster)
        with self.strategy.scope():
            self.model = model_function()
        self.workers = Workers(self.strategy, cluster, timeout)

    def loop(self, **options):
        return CoordinatorLoop(self.model, self.workers, raw_batches(**options), decode)

    def evaluation(self):
        return CoordinatorEvaluation(self.model, self.workers, raw_batches(), decode, len(SIZES))


def train_for_ever(loop):
    while True:
        loop.train(SIZES)


def say(kind, **values):
    print(json.dumps({"kind": kind, **values}), flush=True)


def train(chief, out):
    """Two epochs, and an evaluation."""
    loop, model = chief.loop(passes=4), chief.model
    for _ in range(2):
        model.reset_metrics()
        stretch = loop.train(SIZES[:4])
        loop.train(SIZES[4:])
        say("epoch", diverged=stretch.diverged, iterations=int(model.optimizer.iterations.numpy()))
        say("metrics", **loop.read_metrics())
    evaluation = chief.evaluation()
    evaluation.begin()
    evaluation.take_steps(evaluation.steps)
    say("evaluation", **evaluation.read_metrics())
    model.save(out / "model.keras")
    return loop


def train_on(chief, out):
    """`train`; then a step that diverges, and a label that the model does not have."""
    loop, model = train(chief, out), chief.model
    say("devices", devices=sorted({v.value.device for v in model.variables}))

    weights = model.get_weights()
    model.get_layer("conv").set_weights([model.get_layer("conv").get_weights()[0] * np.nan])
    say("broken", diverged=loop.train(SIZES[:2]).diverged)
    model.set_weights(weights)
    with pytest.raises(tf.errors.InvalidArgumentError, match="label out of range"):
        chief.loop(labels=4).train(SIZES)
    chief.model.optimizer.gradient_accumulation_steps = 2
    with pytest.raises(SettingsError, match="parameter_server cannot accumulate gradients"):
        chief.loop()


def survive(chief, out):
    """Trains while a worker is killed, until it is back; then until a parameter server is lost."""
    loop = chief.loop(passes=10_000)
    loop.train(SIZES)
    say("training")
    events = []
    with progress.sink(lambda event: events.append(event.text)):
        steps = len(SIZES)
        sys.stdin.readline()
        while not any("worker-1 is lost" in text for text in events):
            loop.train(SIZES)
            steps += len(SIZES)
        say("gone")
        while not any("worker-1 is back" in text for text in events):
            loop.train(SIZES)
            steps += len(SIZES)
        chief.model.reset_metrics()
        loop.train(SIZES)
        say("back", steps=steps, events=events, **loop.read_metrics())
    with pytest.raises(RunError) as caught:
        train_for_ever(loop)
    say("failed", message=str(caught.value))


def alone(chief, out):
    """Waits for a worker for as long as it is told, and no longer."""
    loop = chief.loop(passes=10_000)
    loop.train(SIZES)
    say("training")
    with pytest.raises(RunError) as caught:
        train_for_ever(loop)
    say("failed", message=str(caught.value))


def hang(chief, out):
    say("training")
    sys.stdin.readline()


def main(mode, out):
    cluster = read_cluster(os.environ)
    if cluster.role != "chief":
        with progress.exit_on_error("train"):
            run_server(cluster, "parameter_server", float(os.environ.get("STARTUP_TIMEOUT", "60")))
        return
    globals()[mode](Chief(cluster, timeout=2.0 if mode == "alone" else 600.0), Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
