"""Step: the inner loop of synchronous training, and the evaluation of a split.

Keras 3's `fit` fails on several workers (keras-team/keras#20585), its inner `train_step` does not: this loop
calls it through `strategy.run`, some steps at a time. Everything that reads a metric is a collective, at the
same step on every replica. As in `fit`, AutoGraph converts nothing: that takes longer than tracing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from shardline.trainer.cluster.collectives import Summation
from shardline.trainer.cluster.exchange import GradientExchange, average, own_gradients
from shardline.trainer.keras_internals import exact_means, random_by_replica
from shardline.trainer.tensorflow_internals import keep_iterator, seed_by_process

Logs = dict[str, float]


@dataclass(frozen=True)
class Stretch:
    """Seconds that some steps waited for input here, and the first of them whose loss was not finite."""

    waited: float = 0.0
    diverged: int | None = None


class Loop:
    """Trains under any strategy whose replicas take each step together.

    Every replica must call the same methods at the same step. `evaluate` returns the metrics of the
    validation split, none where there is no such split.
    """

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
        """Traces the step of a model compiled and built inside the strategy's scope.

        `batches` are distributed, as `model.train_step` takes them. After `averaging_steps` by itself each
        replica averages its weights with the others'; 0 sums the gradients of every step. TensorFlow, asked
        to be `deterministic`, refuses to tell the time in a function: the wait for input is not known then.
        """
        self.evaluate: Callable[[], Logs] = dict
        self._model = model
        self._strategy = strategy
        self._batches = keep_iterator(batches)
        self._summation = summation
        self._averaging_steps = averaging_steps
        # Replicas that take steps by themselves do not meet in them.
        self._losses = contextlib.nullcontext if averaging_steps else exact_means
        self._jit_compile = jit_compile
        self._clock = (lambda: tf.constant(0.0, tf.float64)) if deterministic else tf.timestamp
        own = own_gradients(strategy.num_replicas_in_sync)
        self._exchange = GradientExchange(model, own if averaging_steps else summation)
        metrics = Metrics(model)
        self.reset_metrics, self.read_metrics = metrics.reset, metrics.read
        self.retrace()

    def retrace(self) -> None:
        """Traces the step again: the set of trainable weights has changed."""
        self._steps = self._trace()

    def train(self, sizes: Sequence[int]) -> Stretch:
        """Trains one step for each of `sizes`, the examples of that step over all replicas."""
        waited, diverged = self._steps(self._batches, tf.constant(sizes, tf.float32))
        first = int(diverged.numpy())
        return Stretch(float(waited.numpy()), first if first < len(sizes) else None)

    def _trace(self) -> Callable[[Iterator[Any], tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
        strategy, model = self._strategy, self._model
        replicas = float(strategy.num_replicas_in_sync)
        train_step = model.train_step
        if self._jit_compile:
            train_step = tf.function(train_step, jit_compile=True, autograph=False)

        def step(data: Any, size: tf.Tensor) -> tf.Tensor:
            with self._exchange.weighted(_examples(data) * replicas / size):
                logs = train_step(data)
            # A running mean: once not finite, it stays so until the epoch ends.
            return tf.math.is_finite(tf.cast(logs.get("loss", 0.0), tf.float32))

        def take(
            batches: Iterator[Any], i: tf.Tensor, size: tf.Tensor, waited: tf.Tensor, diverged: tf.Tensor
        ) -> tuple[tf.Tensor, ...]:
            asked = self._clock()
            with tf.control_dependencies([asked]):
                data = next(batches)
            with tf.control_dependencies(_tensors(strategy, data)):
                waited += self._clock() - asked
            seed_by_process(strategy)
            with random_by_replica(), self._losses():
                finite = strategy.experimental_local_results(strategy.run(step, args=(data, size)))
            if self._averaging_steps:
                due = model.optimizer.iterations % self._averaging_steps == 0
                tf.cond(due, self._average, lambda: due)
            return i + 1, waited, tf.where(tf.reduce_all(tf.stack(finite)), diverged, tf.minimum(diverged, i))

        # Or the first call, of one step, and the next, of several, would each trace the whole step.
        signature = [tf.type_spec_from_value(self._batches), tf.TensorSpec([None], tf.float32)]

        @tf.function(input_signature=signature, autograph=False)  # type: ignore[untyped-decorator]
        def steps(batches: Iterator[Any], sizes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            count = tf.size(sizes)
            begin = (tf.constant(0), tf.constant(0.0, tf.float64), count)
            _, waited, diverged = tf.while_loop(
                lambda i, *_: i < count, lambda i, *rest: take(batches, i, sizes[i], *rest), begin
            )
            return waited, diverged

        traced: Callable[[Iterator[Any], tf.Tensor], tuple[tf.Tensor, tf.Tensor]] = steps
        return traced

    def _average(self) -> tf.Tensor:
        variables = self._model.trainable_variables
        self._strategy.run(lambda: average(self._strategy, variables, self._summation))
        return tf.constant(True)


class Evaluation:
    """Evaluates one split under a strategy whose replicas take each step together."""

    def __init__(
        self, model: keras.Model, strategy: tf.distribute.Strategy, batches: tf.data.Dataset, steps: int
    ):
        """Takes batches, distributed, that have every example once in `steps` elements, again and again.

        One iterator serves all evaluations, since making one costs more than a small split.
        """
        self._metrics = Metrics(model)
        self._batches = batches
        self._iterator: Iterator[Any] | None = None
        self._steps = tf.constant(steps)

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def run(iterator: Iterator[Any], count: tf.Tensor) -> None:
            def take(i: tf.Tensor) -> tuple[tf.Tensor]:
                with random_by_replica(), exact_means():
                    strategy.run(model.test_step, args=(next(iterator),))
                return (i + 1,)

            tf.while_loop(lambda i: i < count, take, (tf.constant(0),))

        self._run = run

    def __call__(self) -> Logs:
        """Returns the exact means over all examples; every replica must call it at the same point."""
        self._iterator = self._iterator or keep_iterator(iter(self._batches))
        self._metrics.reset()
        self._run(self._iterator, self._steps)
        return self._metrics.read()


class Metrics:
    """A model's metrics over all replicas; every replica must call the same methods at the same point.

    Outside a function to read or reset any variable of a metric is an exchange of milliseconds: here they
    share one.
    """

    def __init__(self, model: keras.Model) -> None:
        self._result = tf.function(model.get_metrics_result, autograph=False)
        #: Sets the metrics back to nothing.
        self.reset: Callable[[], None] = tf.function(model.reset_metrics, autograph=False)

    def read(self) -> Logs:
        """Returns the metrics as they are now."""
        return {name: float(value) for name, value in self._result().items()}


def _examples(data: Any) -> tf.Tensor:
    """Returns the number of examples of one replica's batch, as a float32 scalar."""
    return tf.cast(tf.shape(tf.nest.flatten(data)[0])[0], tf.float32)


def _tensors(strategy: tf.distribute.Strategy, data: Any) -> list[tf.Tensor]:
    """Returns the tensors of all local replicas in one distributed element."""
    local = strategy.experimental_local_results
    return [tensor for value in tf.nest.flatten(data) for tensor in local(value)]
