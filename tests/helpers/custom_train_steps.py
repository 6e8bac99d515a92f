"""Programs whose models have a training step of their own, in the forms that Keras' site has them, small.

None of them builds a model or an optimizer by itself. What is random in them is drawn from a seed of the
model's, or where `steady`, made of the examples, so that N processes draw what one does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

SIZE, LATENT, CLASSES = 6, 3, 4
#: One step takes a batch of pairs, the two axes of which are in front of the examples.
ANCHORS = 5


def examples(count: int = 40) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=(count, SIZE)).astype("float32")


def dense(*units: int, last: str | None = None, drop: float = 0.0) -> keras.Sequential:
    """Returns layers that are built when they are first called."""
    hidden = [layers.Dense(each, activation="tanh") for each in units[:-1]]
    dropped = [layers.Dropout(drop, seed=3)] if drop else []
    return keras.Sequential([*hidden, *dropped, layers.Dense(units[-1], activation=last)])


class Drawing(keras.Model):
    """A model that draws numbers, and shows means of its losses."""

    def __init__(self, steady: bool, *shown: str) -> None:
        super().__init__()
        self.steady = steady
        self.seed_generator = keras.random.SeedGenerator(11)
        self.shown = {name: keras.metrics.Mean(name=name) for name in shown}

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return list(self.shown.values())

    def draw(self, x: Any, width: int) -> Any:
        if self.steady:
            total = ops.sum(ops.reshape(x, (ops.shape(x)[0], -1)), axis=1, keepdims=True)
            return ops.sin(9.0 * total * ops.arange(1, width + 1, dtype="float32"))
        return keras.random.normal((ops.shape(x)[0], width), seed=self.seed_generator)

    def show(self, **losses: Any) -> dict[str, Any]:
        for name, loss in losses.items():
            self.shown[name].update_state(loss)
        return {name: metric.result() for name, metric in self.shown.items()}


def update(optimizer: Any, tape: tf.GradientTape, loss: Any, weights: Any) -> None:
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


def squares(x: Any, y: Any) -> Any:
    return ops.mean(ops.square(x - y))


class Autoencoder(Drawing):
    """A variational autoencoder: no `call`, three losses."""

    def __init__(self, steady: bool) -> None:
        super().__init__(steady, "loss", "reconstruction_loss", "kl_loss")
        self.encoder, self.decoder = dense(8, 2 * LATENT), dense(8, SIZE)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            mean, log_var = ops.split(self.encoder(data), 2, axis=1)
            z = mean + ops.exp(0.5 * log_var) * self.draw(data, LATENT)
            rebuilt = squares(self.decoder(z), data)
            kl = -0.5 * ops.mean(1 + log_var - ops.square(mean) - ops.exp(log_var))
            total = rebuilt + kl
        update(self.optimizer, tape, total, self.trainable_weights)
        return self.show(loss=total, reconstruction_loss=rebuilt, kl_loss=kl)


def autoencoder(steady: bool = False) -> keras.Model:
    model = Autoencoder(steady)
    model.compile(optimizer=keras.optimizers.Adam(0.01))
    return model


class Wasserstein(Drawing):
    """A GAN with a penalty on the critic's gradient, whose critic takes two updates in each step.

    An own `compile` takes its two optimizers.
    """

    def __init__(self, steady: bool, generator: keras.Model, discriminator: keras.Model) -> None:
        super().__init__(steady)
        self.generator, self.discriminator = generator, discriminator

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def train_step(self, data: Any) -> dict[str, Any]:
        for turn in (1.0, 2.0):
            with tf.GradientTape() as tape:
                made = self.generator(self.draw(turn * data, LATENT))
                wide = self.discriminator(made) - self.discriminator(data)
                d_loss = ops.mean(wide) + 10.0 * self.penalty(data, made)
            update(self.d_optimizer, tape, d_loss, self.discriminator.trainable_variables)
        with tf.GradientTape() as tape:
            g_loss = -ops.mean(self.discriminator(self.generator(self.draw(3.0 * data, LATENT))))
        update(self.g_optimizer, tape, g_loss, self.generator.trainable_variables)
        return {"d_loss": d_loss, "g_loss": g_loss}

    def penalty(self, real: Any, made: Any) -> Any:
        between = real + self.draw(real, 1) * (made - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            judged = self.discriminator(between, training=True)
        norm = ops.sqrt(ops.sum(ops.square(tape.gradient(judged, between)), axis=1) + 1e-12)
        return ops.mean(ops.square(norm - 1.0))


def wasserstein(steady: bool = False) -> keras.Model:
    model = Wasserstein(steady, dense(8, SIZE), dense(8, 1))
    # Of Adam the smallest difference of a gradient is a whole step.
    model.compile(keras.optimizers.SGD(0.01), keras.optimizers.SGD(0.01, momentum=0.5))
    return model


class Metric(keras.Model):
    """A functional model whose batch is none of its inputs: (2, anchors, ...), each to find its like."""

    def train_step(self, data: Any) -> dict[str, Any]:
        anchors, positives = data[0], data[1]
        labels = ops.arange(ANCHORS)
        with tf.GradientTape() as tape:
            alike = ops.einsum("ae,pe->ap", self(anchors, training=True), self(positives, training=True))
            loss = self.compute_loss(y=labels, y_pred=alike / 0.2)
        update(self.optimizer, tape, loss, self.trainable_variables)
        for metric in self.metrics:
            metric.update_state(*([loss] if metric.name == "loss" else [labels, alike]))
        return {metric.name: metric.result() for metric in self.metrics}


def metric(steady: bool = False) -> keras.Model:
    inputs = keras.Input((SIZE,))
    found = layers.UnitNormalization()(layers.Dense(LATENT)(layers.Dense(8, activation="tanh")(inputs)))
    model = Metric(inputs, found)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["sparse_categorical_accuracy"])
    return model


class Diffusion(Drawing):
    """A denoising model, with a network beside it that is its moving average, and a validation of its own."""

    def __init__(self, steady: bool) -> None:
        super().__init__(steady, "n_loss", "i_loss")
        self.normalizer = layers.Normalization()
        self.network, self.average = dense(8, SIZE), dense(8, SIZE)

    def denoise(self, network: keras.Model, data: Any) -> tuple[Any, Any]:
        x = self.normalizer(data)
        noise, rate = self.draw(x, SIZE), ops.sigmoid(self.draw(2.0 * x, 1))
        said = network(ops.concatenate([x * rate + noise * (1.0 - rate), rate], axis=1))
        return squares(said, noise), squares(x * rate + noise * (1.0 - rate) - said, x)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            noise_loss, image_loss = self.denoise(self.network, data)
        update(self.optimizer, tape, noise_loss, self.network.trainable_weights)
        self.denoise(self.average, data)
        for weight, mean in zip(self.network.weights, self.average.weights, strict=True):
            mean.assign(0.9 * mean + 0.1 * weight)
        return self.show(n_loss=noise_loss, i_loss=image_loss)

    def test_step(self, data: Any) -> dict[str, Any]:
        noise_loss, image_loss = self.denoise(self.average, data)
        return self.show(n_loss=noise_loss, i_loss=image_loss)


def diffusion(steady: bool = False) -> keras.Model:
    model = Diffusion(steady)
    model.normalizer.adapt(examples())
    model.compile(optimizer=keras.optimizers.AdamW(0.01, weight_decay=1e-3))
    return model


class Distiller(keras.Model):
    """A student that learns from labels and from a teacher, whose losses an own `compile` takes."""

    def __init__(self, student: keras.Model, teacher: keras.Model) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher

    def compile(self, student_loss_fn: Any, distillation_loss_fn: Any, alpha: float, **options: Any) -> None:
        super().compile(**options)
        self.student_loss_fn, self.distillation_loss_fn = student_loss_fn, distillation_loss_fn
        self.alpha = alpha

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        taught = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            said = self.student(x, training=True)
            own = self.student_loss_fn(y, said)
            soft = self.distillation_loss_fn(ops.softmax(taught / 3), ops.softmax(said / 3))
            loss = self.alpha * own + (1 - self.alpha) * soft
        update(self.optimizer, tape, loss, self.student.trainable_variables)
        logs = self.compute_metrics(x, y, said, None)
        return {**logs, "student_loss": own, "distillation_loss": soft}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        return self.compute_metrics(x, y, self.student(x, training=False), None)


def distiller(steady: bool = False) -> keras.Model:
    teacher = dense(12, CLASSES)
    teacher.trainable = False
    model = Distiller(dense(5, CLASSES, drop=0.0 if steady else 0.2), teacher)
    model.compile(
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        keras.losses.KLDivergence(),
        0.3,
        optimizer=keras.optimizers.RMSprop(0.01),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    return model


def pairs() -> tf.data.Dataset:
    x = examples(4 * ANCHORS).reshape(4, 1, ANCHORS, SIZE)
    return tf.data.Dataset.from_tensor_slices(np.concatenate([x, x + 0.1], axis=1))


@dataclass(frozen=True)
class Program:
    """A model, its data, and whether there is a validation, of the same data."""

    model: Callable[..., keras.Model]
    data: Callable[[], Any]
    validated: bool = False

    def make(self, steady: bool = False) -> keras.Model:
        """Returns the compiled model, with the same weights each time."""
        keras.utils.set_random_seed(1)
        return self.model(steady)


PROGRAMS = {
    "vae": Program(autoencoder, examples),
    "wgan_gp": Program(wasserstein, lambda: batched(examples())),
    "metric_learning": Program(metric, pairs),
    "diffusion": Program(diffusion, examples, validated=True),
    "distillation": Program(
        distiller, lambda: batched((examples(), np.arange(40) % CLASSES)), validated=True
    ),
}


def batched(arrays: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays).batch(16)
