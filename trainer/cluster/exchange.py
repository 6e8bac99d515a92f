"""Gradient exchange: N replicas of a synchronous strategy train as one replica with N batches.

Keras 3 clips the gradients of each replica before it sums them, accumulates them where TensorFlow forbids an
exchange, asks only the first replica whether they are finite, and counts a smaller last batch as much as a
full one. Here the sum comes first, exact and once for each update; what follows works on the same numbers
everywhere (`keras_internals` replaces the optimizers' methods).

Periodic averaging (local SGD: Stich, "Local SGD converges fast and communicates little", 2019) is another
algorithm, to be chosen explicitly: each replica takes steps of its own, and every few, weights are averaged.
Optimizers keep their own slots on each replica; a checkpoint averages them too.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from shardline.trainer import keras_internals
from shardline.trainer.cluster.collectives import Summation, TensorFlowSummation
from shardline.trainer.keras_internals import Gradients, Variables
from shardline.trainer.tensorflow_internals import assign_in_replica


class GradientExchange:
    """Makes every optimizer of a model exchange gradients exactly. With one replica it does nothing."""

    def __init__(self, model: keras.Model, summation: Callable[[Gradients], Gradients]) -> None:
        """Prepares the optimizers of a model built in its strategy's scope; float8 weights are refused."""
        self._local = threading.local()
        self._sum = summation
        self._replicas: int = model.distribute_strategy.num_replicas_in_sync
        if self._replicas > 1:
            keras_internals.refuse_float8(model)
        for optimizer in keras_internals.optimizers(model):
            keras_internals.before_apply(optimizer, functools.partial(self._prepare, optimizer))
            keras_internals.before_gradient(optimizer, self._weigh)
            if optimizer.built:
                self._adopt(optimizer)

    @contextlib.contextmanager
    def weighted(self, share: tf.Tensor) -> Iterator[None]:
        """Multiplies this replica's gradients by its share while the context lasts, around its `train_step`.

        With the float32 scalar `local examples / examples of all replicas` a batch divided into 5 and 4
        examples gives the gradients of the whole batch of 9, for losses that are means over a replica's batch
        (`replica_losses.exact_losses`). With 0, of no examples, gradients count nothing even when NaN.
        """
        self._local.share, self._local.weighed = share, set()
        try:
            yield
        finally:
            self._local.share = None

    def _weigh(self, optimizer: keras.Optimizer, loss: tf.Tensor) -> tf.Tensor:
        """Multiplies the loss in place of its gradients: it is one number, and they are many."""
        share = getattr(self._local, "share", None)
        if share is None or self._replicas == 1:
            return loss
        self._local.weighed.add(id(optimizer))
        return loss * tf.cast(share, loss.dtype)

    def _prepare(
        self, optimizer: keras.Optimizer, gradients: Gradients, variables: Variables | None
    ) -> Gradients:
        if not optimizer.built and variables is not None:
            self._build(optimizer, list(variables))
        share = getattr(self._local, "share", None)
        if share is None or self._replicas == 1:
            return gradients
        weighed = id(optimizer) in self._local.weighed
        return _weighted(gradients, tf.sign(share) if weighed else share)

    def _build(self, optimizer: keras.Optimizer, variables: Variables) -> None:
        """Creates variables where they may be, outside the replicas, of one only train_step knows."""

        def across(strategy: tf.distribute.Strategy) -> None:
            with tf.init_scope(), strategy.scope():
                optimizer.build(variables)
            self._adopt(optimizer)

        tf.distribute.get_replica_context().merge_call(across)

    def _adopt(self, optimizer: keras.Optimizer) -> None:
        if self._replicas > 1:
            for inner in keras_internals.inner_optimizers(optimizer):
                keras_internals.exchange_before_clipping(inner, self._sum)
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                keras_internals.agree_on_finite(optimizer, self._replicas)


def _weighted(gradients: Gradients, weight: tf.Tensor) -> Gradients:
    """Multiplies gradients by a weight; one of 1 costs nothing."""
    own = [gradient for gradient in gradients if gradient is not None]

    def times(values: tf.Tensor) -> tf.Tensor:
        return tf.math.multiply_no_nan(values, tf.cast(weight, values.dtype))

    same, changed = (lambda: list(map(tf.identity, own))), (lambda: [_on_values(times, one) for one in own])
    done = iter(tf.cond(tf.equal(weight, 1.0), same, changed))
    return [None if gradient is None else next(done) for gradient in gradients]


def _on_values(
    function: Callable[[tf.Tensor], tf.Tensor], gradient: tf.Tensor | tf.IndexedSlices
) -> tf.Tensor | tf.IndexedSlices:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def own_gradients(replicas: int) -> Callable[[Gradients], Gradients]:
    """Returns, in place of a sum, a replica's own gradients: they are weighted by its share of a step."""
    return lambda gradients: [_on_values(lambda values: values * replicas, one) for one in gradients]


def average(strategy: tf.distribute.Strategy, variables: Variables, summation: Summation) -> None:
    """Gives every replica the mean of variables that each has for itself; to be called inside a replica."""
    means = summation.mean(_values(variables))
    assign_in_replica(strategy, [variable.value for variable in variables], means)


def replica_merger(
    strategy: tf.distribute.Strategy, model: keras.Model, *, weights: bool = False
) -> Callable[[], None]:
    """Returns a collective that gives every replica the mean of what each keeps for itself.

    Keras 3 updates BatchNormalization's moving statistics on every replica alone and would save those of the
    first; gradients that are being accumulated are each replica's own, too; and with `weights` (periodic
    averaging) the weights and the optimizers' slots.
    """
    if strategy.num_replicas_in_sync == 1:
        return lambda: None

    exact = TensorFlowSummation()

    def merge() -> None:
        kept = _floats([*model.non_trainable_weights, *keras_internals.accumulators(model)])
        if kept:
            for variable, mean in zip(kept, exact.mean(_values(kept)), strict=True):
                variable.assign(mean)
        if weights:
            states = [one for each in keras_internals.optimizers(model) for one in each.variables]
            slots = [one for one in _floats(states) if one.shape]
            average(strategy, [*model.trainable_variables, *slots], exact)

    merge_all: Callable[[], None] = tf.function(lambda: strategy.run(merge), autograph=False)
    return merge_all


def _floats(variables: Variables) -> list[keras.Variable]:
    return [variable for variable in variables if keras.backend.is_float_dtype(variable.dtype)]


def _values(variables: Variables) -> Gradients:
    # identity: a variable's own read has no device in a graph, and the exchange asks for one.
    return [tf.identity(tf.convert_to_tensor(variable)) for variable in variables]
