"""Step: the inner loop of synchronous training, and the evaluation of a split.

Keras 3's `fit` fails on several workers (keras-team/keras#20585), its inner `train_step` does not: this loop
calls it through `strategy.run`, some steps at a time. Everything that reads a metric is a collective. As in
`fit`, AutoGraph converts nothing: that takes longer than tracing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shardline.trainer.base.errors import ModelError
from shardline.trainer.checkpoint import finite_variables
from shardline.trainer.distribute import GradientExchange, Summation
from shardline.trainer.keras_compat import keras_internals
from shardline.trainer.keras_compat.replicas import exact_losses, replica_share, takes_whole_batches
from shardline.trainer.keras_compat.tensorflow_internals import iterate, seed_per_process

#: Metrics by name, as passed to callbacks: floats, or arrays (F1Score).
Logs = dict[str, Any]
#: Shapes of metrics by name; () for a number.
Shapes = dict[str, tuple[int, ...]]

# Runs steps of some sizes; returns the wait, the first step that is not finite, and the metrics.
_Steps = Callable[[Iterator[Any], tf.Tensor], tuple[tf.Tensor, tf.Tensor, Any]]


@dataclass(frozen=True)
class StepsResult:
    """Seconds that some steps waited for input, and the index of the first whose loss was not finite."""

    waited: float = 0.0
    diverged: int | None = None


class StepMetrics:
    """A model's metrics over all replicas, or the last values that a custom step returns in their place.

    Attributes:
        replaced: Whether the step returns other names than the metrics, which are then not shown.
        result: Returns the metrics as tensors, also within a function.
        reset: Resets the metrics.
    """

    def __init__(
        self,
        model: keras.Model,
        step: Callable[[Any], Any],
        strategy: tf.distribute.Strategy,
        batches: Iterator[Any],
        *,
        sized: bool = False,
    ):
        """Traces a custom `train_step` or `test_step`, for names, types and shapes of what it returns.

        A step that runs eagerly might not be traceable: only its metrics are shown.
        """
        self.replaced = False
        self._model = model
        self._shapes: Shapes = {}
        self._kept: dict[str, tf.Variable] = {}
        self._metrics: dict[str, keras.metrics.Metric] = {}
        eager = model.run_eagerly
        if keras_internals.returns_custom_metrics(step) and not eager:
            self._trace(step, strategy, batches, sized)
        read = self._read if self.replaced else model.get_metrics_result
        # Metrics of an eager model may be Python code, which a traced function would run only once.
        self.result: Callable[[], Any] = read if eager else tf.function(read, autograph=False)
        self.reset: Callable[[], None] = (
            model.reset_metrics if eager else tf.function(model.reset_metrics, autograph=False)
        )

    def _trace(
        self,
        step: Callable[[Any], Any],
        strategy: tf.distribute.Strategy,
        batches: Iterator[Any],
        sized: bool,
    ) -> None:
        returned: dict[str, tf.Tensor] = {}

        def once(batches: Iterator[Any]) -> None:
            def take(data: Any) -> None:
                returned.update(reported_metrics(step, step(data[0] if sized else data)))

            with keras_internals.random_per_replica():
                strategy.run(take, args=(next(batches),))

        with keras_internals.record_results(self._model) as results:
            tf.function(once, autograph=False).get_concrete_function(batches)
        self.replaced = returned.keys() != keras_internals.flat_logs(self._model.get_metrics_result()).keys()
        if not self.replaced:
            return
        self._shapes = {name: tuple(value.shape) for name, value in returned.items()}
        self._metrics = {name: results[id(value)] for name, value in returned.items() if id(value) in results}
        with strategy.scope():
            for name, shape in self._shapes.items():
                if name not in self._metrics:  # a value for each replica, read as their mean
                    self._kept[name] = tf.Variable(
                        tf.zeros(shape),
                        trainable=False,
                        synchronization=tf.VariableSynchronization.ON_READ,
                        aggregation=tf.VariableAggregation.MEAN,
                    )

    def keep(self, logs: Mapping[str, Any], weight: tf.Tensor) -> None:
        """Keeps a replica's values, in its context, with its weight (1 for an equal share of the batch)."""
        if self.replaced:
            flat = keras_internals.flat_logs(logs)
            for name, variable in self._kept.items():
                variable.assign(tf.cast(flat[name], tf.float32) * weight)

    def _read(self) -> dict[str, tf.Tensor]:
        """Returns the means over all replicas, and the results of metrics."""
        kept = {name: tf.convert_to_tensor(variable) for name, variable in self._kept.items()}
        return {**kept, **{name: metric.result() for name, metric in self._metrics.items()}}

    @property
    def shapes(self) -> Shapes:
        """Names and shapes of what is shown. A collective."""
        return self._shapes or metric_shapes(self._model)


def reported_metrics(step: Callable[[Any], Any], logs: Any) -> dict[str, tf.Tensor]:
    """Returns the numbers that a step has returned, by name, if their shapes are known in the trace."""
    if not isinstance(logs, Mapping):
        raise ModelError(
            f"{getattr(step, '__name__', 'step')} of the model returned {type(logs).__name__}, not a "
            'dict; return numbers by name such as {"loss": loss}, as in Keras'
        )
    values = {name: tf.convert_to_tensor(value) for name, value in keras_internals.flat_logs(logs).items()}
    return {
        name: value
        for name, value in values.items()
        if value.shape.is_fully_defined() and (value.dtype.is_floating or value.dtype.is_integer)
    }


class StepLoop:
    """Training loop of synchronous strategies; every process calls the same methods.

    `evaluation` is that of the validation split; None without a validation split.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        batches: Iterable[Any],
        summation: Summation,
        *,
        sized: bool = False,
        jit_compile: bool = False,
        deterministic: bool = False,
        single_loss: Callable[[], None] = lambda: None,
    ):
        """Prepares the step of a model that is compiled and built in the strategy's scope.

        `batches` are those of `model.train_step`, distributed; if `sized`, pairs of these and the examples of
        all replicas. Gradients are added by `summation`. `single_loss` is called if a loss is one number for
        a batch. With deterministic ops TensorFlow has no clock in a function.
        """
        self.evaluation: EvaluationLoop | None = None
        #: Called with the graph of a traced step, before it runs.
        self.traced: Callable[[tf.Graph], None] = lambda graph: None
        self._model = model
        self._strategy = strategy
        self._batches = iterate(batches)
        self._sized = sized
        self._losses = functools.partial(exact_losses, single_loss)
        self._jit_compile = jit_compile
        self._single = strategy.num_replicas_in_sync > 1 and takes_whole_batches(model)
        self._clock = (lambda: tf.constant(0.0, tf.float64)) if deterministic else tf.timestamp
        self._summation = summation
        self._exchange = GradientExchange(model, summation)
        if strategy.num_replicas_in_sync == 1 and not (jit_compile or model.run_eagerly):
            for optimizer in keras_internals.optimizers(model):
                keras_internals.update_after_gradients(optimizer)
        self._metrics = StepMetrics(model, model.train_step, strategy, self._batches, sized=sized)
        self.reset_metrics = self._metrics.reset
        self._steps: _Steps | None = None

    @property
    def shapes(self) -> Shapes:
        """Names and shapes of the metrics, or of what the step returns in their place. A collective."""
        return self._metrics.shapes

    def read_metrics(self) -> Logs:
        """Returns the metrics as they were after the last step."""
        return keras_internals.flat_logs(self._read)

    def train(self, sizes: Sequence[int]) -> StepsResult:
        """Trains one step for each of `sizes`, the examples of that step over all replicas."""
        steps = self._steps = self._steps or self._trace()
        count = 1 if self._single or self._summation.single_steps else len(sizes)
        waited, first = 0.0, len(sizes)
        for done in range(0, len(sizes), count):
            call = tf.constant(sizes[done : done + count], tf.float32)
            seconds, diverged, self._read = steps(self._batches, call)
            if (step := int(diverged.numpy())) < count:
                first = min(first, done + step)
            waited += float(seconds.numpy())
        return StepsResult(waited, first if first < len(sizes) else None)

    def _trace(self) -> _Steps:
        strategy, model = self._strategy, self._model
        replicas = float(strategy.num_replicas_in_sync)
        train_step = model.train_step
        weights = finite_variables(model.trainable_variables)
        if self._jit_compile:
            train_step = tf.function(train_step, jit_compile=True, autograph=False)

        def step(data: Any, size: tf.Tensor) -> tf.Tensor:
            data, size = data if self._sized else (data, size)
            share = _examples(data) / size if replicas > 1 else tf.constant(1.0)
            with self._exchange.weighted(share), replica_share(lambda: share * replicas, _examples(data)):
                logs = train_step(data)
            self._metrics.keep(logs, share * replicas)
            return is_finite(logs, weights)

        def take(
            batches: Iterator[Any], i: tf.Tensor, size: tf.Tensor, waited: tf.Tensor, diverged: tf.Tensor
        ) -> tuple[tf.Tensor, ...]:
            requested = self._clock()
            with tf.control_dependencies([requested]):
                data = next(batches)
            local = strategy.experimental_local_results
            with tf.control_dependencies([part for value in tf.nest.flatten(data) for part in local(value)]):
                waited += self._clock() - requested
            seed_per_process(strategy)
            with keras_internals.random_per_replica(), self._losses():
                finite = strategy.experimental_local_results(strategy.run(step, args=(data, size)))
            if not model.run_eagerly:
                self.traced(tf.compat.v1.get_default_graph())
            return i + 1, waited, tf.where(tf.reduce_all(tf.stack(finite)), diverged, tf.minimum(diverged, i))

        def steps(batches: Iterator[Any], sizes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, Any]:
            count = tf.size(sizes)
            begin = (tf.constant(0), tf.constant(0.0, tf.float64), count)
            _, waited, diverged = tf.while_loop(
                lambda i, *_: i < count, lambda i, *rest: take(batches, i, sizes[i], *rest), begin
            )
            # Reading them in a call of its own would take as long as some small steps.
            return waited, diverged, self._metrics.result()

        return steps if model.run_eagerly else self._compiled(steps)

    def _compiled(self, steps: _Steps) -> _Steps:
        # With a signature: else a call of one step and a call of several would each trace the step.
        signature = [tf.type_spec_from_value(self._batches), tf.TensorSpec([None], tf.float32)]
        # The concrete function: looking it up among the traced ones takes longer than the call itself.
        concrete: _Steps = tf.function(steps, signature, autograph=False).get_concrete_function()
        return concrete


class EvaluationLoop:
    """Evaluation of one split: `begin`, then `take` until all `steps` are taken, then `read`."""

    def __init__(
        self, model: keras.Model, strategy: tf.distribute.Strategy, batches: tf.data.Dataset, steps: int
    ):
        """Takes distributed batches, repeated, in whose `steps` elements every example is once."""
        self.steps = steps
        self._model = model
        self._strategy = strategy
        self._batches = batches
        self._iterator: Iterator[Any] | None = None

    @property
    def shapes(self) -> Shapes:
        """Names and shapes of the metrics, or of what the step returns in their place. A collective."""
        if not keras_internals.returns_custom_metrics(self._model.test_step):
            return metric_shapes(self._model)
        self._prepare()
        return self._metrics.shapes

    def begin(self) -> None:
        """Resets the metrics."""
        self._prepare()
        self._metrics.reset()

    def _prepare(self) -> None:
        if self._iterator is None:
            self._iterator = iterate(self._batches)
            self._metrics = StepMetrics(self._model, self._model.test_step, self._strategy, self._iterator)
            self._run = self._trace()

    def take_steps(self, count: int) -> None:
        """Takes some steps."""
        single = self._strategy.num_replicas_in_sync > 1 and takes_whole_batches(self._model)
        for each in [1] * count if single else [count]:  # the last batch may be smaller
            self._run(self._iterator, tf.constant(each))

    def read_metrics(self) -> Logs:
        """Returns the exact means over the examples taken."""
        return keras_internals.flat_logs(self._metrics.result())

    def __call__(self) -> Logs:
        """Returns the exact means over all examples."""
        self.begin()
        self.take_steps(self.steps)
        return self.read_metrics()

    def _trace(self) -> Callable[[Any, tf.Tensor], None]:
        def step(data: Any) -> None:
            share = functools.cache(lambda: _share_of_all(data))
            with replica_share(share, _examples(data)):
                logs = self._model.test_step(data)
            self._metrics.keep(logs, share() if self._metrics.replaced else tf.constant(1.0))

        def run(iterator: Any, count: tf.Tensor) -> None:
            def take(i: tf.Tensor) -> tuple[tf.Tensor]:
                with keras_internals.random_per_replica(), exact_losses():
                    self._strategy.run(step, args=(next(iterator),))
                return (i + 1,)

            tf.while_loop(lambda i: i < count, take, (tf.constant(0),))

        return run if self._model.run_eagerly else tf.function(run, autograph=False)


def metric_shapes(model: keras.Model) -> Shapes:
    """Returns names and shapes of a model's metrics. A collective."""
    return {
        name: np.shape(value) for name, value in keras_internals.flat_logs(model.get_metrics_result()).items()
    }


def is_finite(logs: Mapping[str, Any], weights: Sequence[keras.Variable]) -> tf.Tensor:
    """Returns whether a step's losses are finite; without a loss, whether the weights are.

    Keras' own loss is a running mean: once not finite, it stays so until the epoch ends.
    """
    flat = keras_internals.flat_logs(logs)
    losses = [flat["loss"]] if "loss" in flat else [v for name, v in flat.items() if name.endswith("loss")]
    watched = losses or [tf.convert_to_tensor(variable) for variable in weights]
    checks = [tf.reduce_all(tf.math.is_finite(tf.cast(value, tf.float32))) for value in watched]
    return tf.reduce_all(tf.stack(checks)) if checks else tf.constant(True)


def _examples(data: Any) -> tf.Tensor:
    """Returns the number of examples of one replica's batch, as a float32 scalar."""
    return tf.cast(tf.shape(tf.nest.flatten(data)[0])[0], tf.float32)


def _share_of_all(data: Any) -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return tf.constant(1.0)
    own = _examples(data)
    total = context.all_reduce(tf.distribute.ReduceOp.SUM, own)
    return tf.math.divide_no_nan(own * context.num_replicas_in_sync, total)
