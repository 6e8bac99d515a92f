"""`python -m tests.helpers.replica_state OUT [DEVICES]`: trains models with states that do not just add up.

Each process writes metrics and weights by case to OUT/NAME.json, NAME being its task.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import shardline
from tests.helpers.fit_programs import NAME


class Largest(keras.metrics.Metric):
    """Keeps the largest error."""

    def __init__(self, name: str = "largest") -> None:
        super().__init__(name=name)
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y: Any, given: Any, sample_weight: Any = None) -> None:
        error = keras.ops.abs(keras.ops.cast(y, given.dtype) - given)
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(error)))

    def result(self) -> Any:
        return self.value


class Smoothed(Largest):
    """A moving mean that begins at 1, beside a metric of its own."""

    def __init__(self) -> None:
        super().__init__("smoothed")
        self.inner = keras.metrics.Mean()

    def update_state(self, y: Any, given: Any, sample_weight: Any = None) -> None:
        error = keras.ops.mean(keras.ops.abs(y - given))
        self.inner.update_state(error)
        self.value.assign(0.9 * self.value + 0.1 * error)

    def reset_state(self) -> None:
        self.inner.reset_state()
        self.value.assign(keras.ops.ones(()))

    def result(self) -> Any:
        return self.value + self.inner.result()


class Latest(keras.metrics.Metric):
    """Keeps the last number of a batch, as a step gives it."""

    def __init__(self) -> None:
        super().__init__(name="latest")
        self.value = self.add_weight(name="value", initializer="zeros")
        self.examples = self.add_weight(name="examples", initializer="zeros")

    def update_state(self, value: Any, sample_weight: Any = None) -> None:
        self.value.assign(value)
        self.examples.assign(self.examples + keras.ops.cast(sample_weight, "float32"))

    def result(self) -> Any:
        return self.value + self.examples


class OwnStep(keras.Model):
    """Updates metrics in a step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(1)
        self.latest, self.largest, self.seen = Latest(), Largest(), keras.metrics.Mean("seen")

    @property
    def metrics(self) -> list[Any]:
        return [self.latest, self.largest, self.seen]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            given = self.out(x)
            loss = keras.ops.mean(keras.ops.square(y - given))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.latest.update_state(loss, sample_weight=tf.shape(x)[0])
        self.largest.update_state(y, given)
        self.seen.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}


def correlation(y: Any, given: Any) -> Any:
    """One number of a batch that is no mean over its examples."""
    return keras.ops.mean(y * given) / (1e-3 + keras.ops.std(given))


def compiled() -> keras.Model:
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    )
    own = [Largest(), Smoothed(), correlation, keras.metrics.PearsonCorrelation(axis=0)]
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[*own, "mae", keras.metrics.R2Score()])
    return model


def with_own_step() -> keras.Model:
    model = OwnStep()
    model.compile(keras.optimizers.SGD(0.05))
    return model


class Adding(keras.layers.Layer):
    """Adds a loss for each example, as a CTC layer does, and one for each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        out = self.dense(x)
        self.add_loss(0.01 * keras.ops.square(out))
        self.add_loss(0.1 * keras.ops.square(self.dense.kernel[:5, 0]))
        return out


def with_added_losses() -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), Adding()])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


class Counting(keras.layers.Layer):
    """Keeps sums of its batches, as Keras' guide to layers has it, and what is alike on all replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.add_weight(name="total", shape=(), initializer="zeros", trainable=False)
        self.rows = self.add_weight(
            name="rows", shape=(), initializer="zeros", dtype="int32", trainable=False
        )
        self.calls = self.add_weight(
            name="calls", shape=(), initializer="zeros", dtype="int32", trainable=False
        )

    def call(self, x: Any) -> Any:
        self.total.assign(self.total + keras.ops.sum(x))
        self.rows.assign(self.rows + keras.ops.cast(keras.ops.sum(x[:, 0] > 0), "int32"))
        self.calls.assign(self.calls + 1)
        return x


def counting() -> keras.Model:
    normalization = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((6,)), normalization, Counting(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def quantized() -> keras.Model:
    """Weights in int8, trained by an adapter."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.quantize("int8")
    model.layers[0].enable_lora(2)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


class Texts(keras.Model):
    """Predicts texts and numbers."""

    def call(self, x: Any) -> Any:
        signs = tf.where(x[:, :2] > 0, tf.strings.as_string(tf.round(x[:, :2])), "")
        return {"signs": signs, "sums": tf.reduce_sum(x, axis=1)}


def refusals() -> list[list[Any]]:
    """Returns what fit says to sparse and ragged data."""
    x = numbers()[0]
    ragged = tf.RaggedTensor.from_row_lengths(x.ravel(), [6] * len(x))
    found = []
    for data in (tf.sparse.from_dense(x), ragged):
        try:
            shardline.fit(quantized, tf.data.Dataset.from_tensor_slices((data, x[:, :1])).batch(8), verbose=0)
        except shardline.ShardlineError as error:
            found.append([error.exit_code, "make it dense" in str(error)])
    return found


#: Models that N replicas train as one.
EXACT: dict[str, Callable[[], keras.Model]] = {
    "compiled": compiled,
    "own_step": with_own_step,
    "added_losses": with_added_losses,
    "quantized": quantized,
}


def numbers() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    x = random.normal(size=(103, 6)).astype("float32")
    return x, (x[:, :1] * 2 - x[:, 1:2] + random.normal(0, 0.1, (103, 1))).astype("float32")


def main(out: str, devices: str = "0") -> None:
    shardline.strategy(cpu_devices=int(devices))
    found: dict[str, Any] = {}
    for name, build in EXACT.items():
        keras.utils.set_random_seed(3)
        valid = {"validation_data": numbers()} if name == "compiled" else {}
        history = shardline.fit(build, numbers(), batch_size=16, epochs=2, verbose=0, **valid)
        weights = [weight.ravel().tolist() for weight in history.model.get_weights()]
        found[name] = {"history": history.history, "weights": weights}
    predicted = shardline.predict(Texts, numbers()[0], batch_size=16, verbose=0)
    found["texts"] = json.dumps([predicted["signs"].astype("U").tolist(), predicted["signs"].dtype.name])
    found["refusals"] = refusals()
    shardline.fit(counting, numbers(), batch_size=16, epochs=2, verbose=0)  # which a line says
    (Path(out) / f"{NAME}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
