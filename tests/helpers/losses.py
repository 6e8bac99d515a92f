"""Models whose losses do not all pass through Keras' own division by the replicas, and their training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import shardline

Build = Callable[[], keras.Model]


class Own(keras.Model):
    """A model with a metric of its own, and what a test makes of its step."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)
        self.seen, self.error = keras.metrics.Mean("seen"), keras.losses.MeanSquaredError()

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))

    @property
    def metrics(self) -> list[Any]:
        return [self.seen]

    def find_loss(self, x: Any, y: Any) -> Any:
        raise NotImplementedError

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.find_loss(x, y)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.seen.update_state(loss)
        return {"seen": self.seen.result(), "last": loss}


class ByHand(Own):
    """The loss is a number that Keras has never seen."""

    def find_loss(self, x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.square(y - self(x, training=True)))


class ByCompile(Own):
    """As Keras' guide has it: `compute_loss`, and a metric of the loss."""

    def find_loss(self, x: Any, y: Any) -> Any:
        return self.compute_loss(x=x, y=y, y_pred=self(x, training=True))


class Mixed(Own):
    """A loss of Keras and a number."""

    def find_loss(self, x: Any, y: Any) -> Any:
        given = self(x, training=True)
        return self.error(y, given) + 0.1 * keras.ops.mean(keras.ops.abs(given))


class Computing(Own):
    """Keras' own step, with a `compute_loss` by hand."""

    train_step = keras.Model.train_step

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True) -> Any:  # type: ignore[no-untyped-def]
        loss = keras.ops.mean(keras.ops.square(y - y_pred)) + 0.1 * keras.ops.sum(self.hidden.kernel**2)
        self.seen.update_state(loss)
        return loss


def mean_square(y: Any, given: Any) -> Any:
    """One number for a batch."""
    return keras.ops.mean(keras.ops.square(y - given))


class Contrastive(keras.losses.Loss):
    """Compares the examples of a batch with each other, in place of Keras' own mean over them."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return keras.ops.mean(keras.ops.square(y_pred - keras.ops.transpose(y_pred)))


class Together(keras.regularizers.Regularizer):
    """Takes the outputs of all examples together, as PointNet's orthogonal one does."""

    def __call__(self, x: Any) -> Any:
        return 0.01 * keras.ops.sum(keras.ops.square(keras.ops.tensordot(x, x, axes=(1, 1))))


class Interacting(keras.Model):
    """Adds the same to each example, of all of them, as the recommender of Keras' site does."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.out(x) + keras.ops.tensordot(x, x, 2)


class Noisy(keras.Model):
    """Draws numbers, as a variational autoencoder does, that differ from one batch to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.seeds = keras.layers.Dense(1), keras.random.SeedGenerator(1)

    def call(self, x: Any) -> Any:
        return self.out(x + keras.random.normal(keras.ops.shape(x), seed=self.seeds))


def plain(loss: Any, rate: float = 0.05, **options: Any) -> Build:
    def build() -> keras.Model:
        keras.utils.set_random_seed(3)
        layers = [keras.Input((6,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(rate), loss, **options)
        return model

    return build


def regularized(**options: Any) -> Build:
    def build() -> keras.Model:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, **options), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    return build


def subclassed(kind: Callable[[], keras.Model]) -> Build:
    def build() -> keras.Model:
        keras.utils.set_random_seed(3)
        model = kind()
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    return build


def with_statistics_of_all() -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.Input((6,)), keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


CASES: dict[str, Build] = {
    "function": plain(mean_square, metrics=[mean_square]),
    "sum": plain(keras.losses.Huber(reduction="sum"), rate=0.005),
    "unreduced": plain(keras.losses.MeanSquaredError(reduction=None), rate=0.005),
    "statistics_of_all": with_statistics_of_all,
    **{kind.__name__: subclassed(kind) for kind in (ByHand, ByCompile, Mixed, Computing)},
}


def train_all(names: Iterable[str]) -> dict[str, Any]:
    """Trains models of CASES on batches of which the last has 7 examples, an odd number."""
    random = np.random.default_rng(0)
    x = random.normal(size=(103, 6)).astype("float32")
    y = (x[:, :1] * 2 - x[:, 1:2] + random.normal(0, 0.1, (103, 1))).astype("float32")
    found: dict[str, Any] = {}
    for name in names:
        history = shardline.fit(CASES[name], (x, y), batch_size=16, epochs=2, verbose=0)
        weights = [weight.ravel().tolist() for weight in history.model.get_weights()]
        evaluated = shardline.evaluate(history.model, (x, y), batch_size=16, verbose=0)
        found[name] = {"weights": weights, "history": history.history, "evaluate": evaluated}
    shardline.fit(plain(Contrastive()), (x, y), verbose=0)  # another on two processes, which a line says
    return found
