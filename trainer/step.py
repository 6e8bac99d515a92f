"""The synchronous loop: the model's own `train_step` under a strategy, some steps at a time.

Keras 3's `fit` fails on several workers (keras-team/keras#20585), its inner `train_step` does not: this
loop calls it through `strategy.run`. Everything that reads a metric is a collective and therefore happens
on every replica, at the same step; only what is done with the numbers differs.

Like Keras' `fit` it lets AutoGraph convert nothing, which would take longer than tracing a small model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import tensorflow as tf

from shardline.trainer.cluster.collectives import Summation
from shardline.trainer.cluster.exchange import GradientExchange, make_average, own_gradients

Logs = dict[str, float]


@dataclass(frozen=True)
class Stretch:
    """What some steps in a row came to, on this process.

    Attributes:
        waited: Seconds that the steps waited for input.
        diverged: Index among these steps of the first whose loss was not finite; None where all were.
    """

    waited: float = 0.0
    diverged: int | None = None


class Engine(Protocol):
    """Runs steps of one model; what a strategy needs around them is its own affair."""

    def train(self, sizes: Sequence[int]) -> Stretch:
        """Trains one step for each of `sizes`, the examples of that step over all replicas."""

    def reset_metrics(self) -> None:
        """Begins to count anew; every replica must call it at the same step."""

    def read_metrics(self) -> Logs:
        """Returns the metrics since they were last reset; every replica must call it at the same step."""

    def retrace(self) -> None:
        """Takes notice of a model whose trainable weights have changed."""


class Loop:
    """Trains under any strategy whose replicas take each step together."""

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        batches: Iterator[Any],
        summation: Summation,
        *,
        averaging_steps: int = 0,
        jit_compile: bool = False,
        deterministic: bool = False,
    ):
        """Wraps the model.

        Args:
            model: Compiled and built inside the strategy's scope.
            strategy: The strategy.
            batches: Distributed batches as `model.train_step` takes them.
            summation: Sums the gradients of all replicas.
            averaging_steps: Steps that each replica takes by itself until weights are averaged; 0 sums the
                gradients of every step.
            jit_compile: Whether XLA compiles the step.
            deterministic: Whether TensorFlow has been asked for determinism; it then refuses to tell the
                time inside a function, and the wait for input is not known.
        """
        self._model = model
        self._metrics = Metrics(model)
        self._strategy = strategy
        self._batches = _keep(batches)
        self._jit_compile = jit_compile
        self._clock = (lambda: tf.constant(0.0, tf.float64)) if deterministic else tf.timestamp
        self._averaging_steps = averaging_steps
        self._average = make_average(strategy, model, summation)
        own = own_gradients(strategy.num_replicas_in_sync)
        self._exchange = GradientExchange(model, own if averaging_steps else summation)
        self._steps = self._trace()

    def retrace(self) -> None:
        """Takes notice of a model whose trainable weights have changed."""
        self._steps = self._trace()

    def train(self, sizes: Sequence[int]) -> Stretch:
        """Trains one step for each of `sizes`, the examples of that step over all replicas."""
        waited, diverged = self._steps(self._batches, tf.constant(sizes, tf.float32))
        first = int(diverged.numpy())
        return Stretch(float(waited.numpy()), first if first < len(sizes) else None)

    def reset_metrics(self) -> None:
        """Begins to count anew; every replica must call it at the same step."""
        self._metrics.reset()

    def read_metrics(self) -> Logs:
        """Returns the metrics since they were last reset; every replica must call it at the same step."""
        return self._metrics.read()

    def _trace(self) -> Callable[[Iterator[Any], tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
        strategy = self._strategy
        replicas = float(strategy.num_replicas_in_sync)
        train_step = (
            tf.function(self._model.train_step, jit_compile=True, autograph=False)
            if self._jit_compile
            else None
        )

        def step(data: Any, size: tf.Tensor) -> tf.Tensor:
            with self._exchange.weighted(_examples(data) * replicas / size):
                logs = (train_step or self._model.train_step)(data)
            # A running mean: once not finite, it stays so until the epoch ends.
            return tf.math.is_finite(tf.cast(logs.get("loss", 0.0), tf.float32))

        # Or the first call, of one step, and the next, of several, would each trace the whole step.
        signature = [tf.type_spec_from_value(self._batches), tf.TensorSpec([None], tf.float32)]

        @tf.function(input_signature=signature, autograph=False)  # type: ignore[untyped-decorator]
        def steps(batches: Iterator[Any], sizes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            def take(i: tf.Tensor, waited: tf.Tensor, diverged: tf.Tensor) -> tuple[tf.Tensor, ...]:
                asked = self._clock()
                with tf.control_dependencies([asked]):
                    data = next(batches)
                with tf.control_dependencies(_tensors(strategy, data)):
                    waited += self._clock() - asked
                finite = strategy.experimental_local_results(strategy.run(step, args=(data, sizes[i])))
                if self._averaging_steps:
                    due = self._model.optimizer.iterations % self._averaging_steps == 0
                    tf.cond(due, average, lambda: due)
                first = tf.where(tf.reduce_all(tf.stack(finite)), diverged, tf.minimum(diverged, i))
                return i + 1, waited, first

            def average() -> tf.Tensor:
                strategy.run(self._average)
                return tf.constant(True)

            count = tf.size(sizes)
            begin = (tf.constant(0), tf.constant(0.0, tf.float64), count)
            _, waited, diverged = tf.while_loop(lambda i, *_: i < count, take, begin)
            return waited, diverged

        traced: Callable[[Iterator[Any], tf.Tensor], tuple[tf.Tensor, tf.Tensor]] = steps
        return traced


class Evaluation:
    """Evaluates one split under a strategy whose replicas take each step together."""

    def __init__(
        self, model: keras.Model, strategy: tf.distribute.Strategy, batches: tf.data.Dataset, steps: int
    ):
        """Wraps the model.

        Args:
            model: Compiled and built inside the strategy's scope.
            strategy: The strategy.
            batches: Distributed dataset of the split, every example once, again and again: one iterator
                serves all evaluations, since making one costs more than a small split.
            steps: Elements in which every example occurs once.
        """
        self._metrics = Metrics(model)
        self._batches = batches
        self._iterator: Iterator[Any] | None = None
        self._steps = tf.constant(steps)

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def run(iterator: Iterator[Any], count: tf.Tensor) -> None:
            def take(i: tf.Tensor) -> tuple[tf.Tensor]:
                strategy.run(model.test_step, args=(next(iterator),))
                return (i + 1,)

            tf.while_loop(lambda i: i < count, take, (tf.constant(0),))

        self._run = run

    def __call__(self) -> Logs:
        """Returns the exact means over all examples; every replica must call it at the same point."""
        self._iterator = self._iterator or _keep(iter(self._batches))
        self._metrics.reset()
        self._run(self._iterator, self._steps)
        return self._metrics.read()


def _keep(batches: Iterator[Any]) -> Iterator[Any]:
    """Never lets go of an iterator that hands batches to devices, not even at the end of the process.

    Whoever does waits for the thread that tunes the handing, which sleeps for up to some 15 s.
    """
    if not isinstance(batches, tf.data.Iterator):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(batches))
    return batches


class Metrics:
    """A model's metrics over all replicas.

    Of a metric each replica keeps a part, and outside a function to read or reset any of its variables is an
    exchange, or a call of all replicas, that takes milliseconds: here they share one.
    """

    def __init__(self, model: keras.Model) -> None:
        """Wraps a model that is built."""
        self._result = tf.function(model.get_metrics_result, autograph=False)
        #: Begins to count anew; every replica must call it at the same point.
        self.reset: Callable[[], None] = tf.function(model.reset_metrics, autograph=False)

    def read(self) -> Logs:
        """Returns the metrics as they are now; every replica must call it at the same point."""
        return {name: float(value) for name, value in self._result().items()}


def _examples(data: Any) -> tf.Tensor:
    """Returns the number of examples of one replica's batch, as a float32 scalar."""
    return tf.cast(tf.shape(tf.nest.flatten(data)[0])[0], tf.float32)


def _tensors(strategy: tf.distribute.Strategy, data: Any) -> list[tf.Tensor]:
    """Returns the tensors of all local replicas in one distributed element."""
    return [
        tensor for value in tf.nest.flatten(data) for tensor in strategy.experimental_local_results(value)
    ]
