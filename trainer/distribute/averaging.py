"""Periodic averaging (local SGD): each replica takes steps of its own, and every few, weights are averaged.

An explicit choice: it is another algorithm than synchronous training (Stich, "Local SGD converges fast and
communicates little", 2019). Optimizers keep their own slots on each replica; a checkpoint averages them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from shardline.trainer.distribute.exchange import optimizers
from shardline.trainer.distribute.summation import Gradients, Summation, sum_by_tensorflow


def own_gradients(replicas: int) -> Summation:
    """Returns what takes the place of a sum where nothing is exchanged.

    Keras divides every replica's loss by the number of replicas; times that number, a replica's gradients are
    those of its own batch.
    """
    return lambda gradients: [_times(gradient, replicas) for gradient in gradients]


def _times(gradient: tf.Tensor | tf.IndexedSlices, factor: int) -> tf.Tensor | tf.IndexedSlices:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def make_average(
    strategy: tf.distribute.Strategy, model: keras.Model, summation: Summation
) -> Callable[[], None]:
    """Returns a function that gives every replica the mean of the trainable weights.

    A collective, to be called inside a replica.

    Args:
        strategy: The strategy of the run.
        model: Built in its scope.
        summation: Sums over the replicas.
    """
    return lambda: average(strategy, model.trainable_variables, summation)


def make_merge(
    strategy: tf.distribute.Strategy, model: keras.Model, merge: Callable[[], None]
) -> Callable[[], None]:
    """Returns a function that makes the replicas agree on all that each has for itself: before a checkpoint.

    A collective, to be called outside the replicas.

    Args:
        strategy: The strategy of the run.
        model: Built in its scope.
        merge: Does it for what synchronous replicas have for themselves.
    """

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def merge_weights() -> None:
        variables = [*model.trainable_variables, *_slots(model)]
        strategy.run(lambda: average(strategy, variables, sum_by_tensorflow))

    def merge_all() -> None:
        merge()
        merge_weights()

    return merge_all


def _slots(model: keras.Model) -> list[keras.Variable]:
    """Returns what optimizers remember of earlier steps, as far as it can be averaged."""
    found = [variable for optimizer in optimizers(model) for variable in optimizer.variables]
    return [one for one in found if keras.backend.is_float_dtype(one.dtype) and one.shape]


def average(
    strategy: tf.distribute.Strategy, variables: Sequence[keras.Variable], summation: Summation
) -> None:
    """Gives every replica the mean of variables that each has for itself; to be called inside a replica."""
    # identity: a variable's own read has no device in a graph, and the exchange asks for one.
    own: Gradients = [tf.identity(tf.convert_to_tensor(variable)) for variable in variables]
    means = [total / strategy.num_replicas_in_sync for total in summation(own)]

    def assign(strategy: tf.distribute.Strategy, *means: Any) -> None:
        for variable, mean in zip(variables, means, strict=True):
            strategy.extended.update(
                variable.value, lambda value, new: value.assign(new), args=(mean,), group=False
            )

    tf.__internal__.distribute.interim.maybe_merge_call(assign, strategy, *means)
