"""Losses over replicas: each loss and its metrics as one process with the whole batch would have them."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.losses import loss as losses

from shardline.trainer.base.errors import SettingsError
from shardline.trainer.keras_compat.keras_internals import patched
from shardline.trainer.keras_compat.tensorflow_internals import has_several_workers, own_replica

_replica = threading.local()

# Examples of each half of a batch on which a loss is tried, and how far rounding alone takes halves apart.
_HALF_BATCH = 4
_TOLERANCE, _HALF_PRECISION_TOLERANCE = 1e-3, 3e-2


@contextlib.contextmanager
def unscaled_losses() -> Iterator[None]:
    """Makes losses that are traced meanwhile what they are in one process, not divided by the replicas.

    Keras divides those alone that it has averaged itself (keras/src/losses/loss.py).
    """
    with (
        patched(losses, "scale_loss_for_distribution", lambda value: value),
        patched(losses, "unscale_loss_for_distribution", lambda value: value),
    ):
        yield


@contextlib.contextmanager
def exact_losses(single: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Makes losses that are traced meanwhile, from outside the replicas, those of the batch of all of them.

    They are undivided, and count by their replica's part of the examples. One that divides by the sum of its
    weights (a mask, the reduction mean_with_sample_weight), or adds up (sum, none), is made larger or smaller
    by what an exchange of its own finds. `single` is told of a loss that is one number already.
    """
    reduce = losses.reduce_weighted_values

    def reduce_over_all(
        values: Any, sample_weight: Any = None, mask: Any = None, **options: Any
    ) -> tf.Tensor:
        loss, context = reduce(values, sample_weight, mask, **options), tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return loss
        reduction = options.get("reduction", "sum_over_batch_size")
        if not values.shape.rank:
            single()
            return loss
        # The sum of weights by which Keras divides, where it does not take the number of values.
        weight = mask if reduction in ("mean", "sum_over_batch_size") else None
        if reduction == "mean_with_sample_weight":
            weight = losses.apply_mask(sample_weight, mask, dtype="float32", reduction=reduction)
        divisor = None if weight is None else tf.reduce_sum(tf.cast(weight, tf.float32))
        adds_up = reduction in ("sum", "none", None)
        if divisor is None and not adds_up:
            return loss
        own = tf.stack([divisor if divisor is not None else 1.0, tf.cast(tf.shape(values)[0], tf.float32)])
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, own)
        if adds_up:
            factor = tf.math.divide_no_nan(total[1], own[1])
        else:
            factor = tf.math.divide_no_nan(own[0] * total[1], own[1] * total[0])
        exact = loss * tf.cast(tf.stop_gradient(factor), loss.dtype)
        # Where nothing is reduced, the values are each example's, and only their gradients add up.
        return exact if reduction not in ("none", None) else exact + tf.stop_gradient(loss - exact)

    add = keras.metrics.Mean.update_state

    def add_by_share(self: keras.metrics.Mean, values: Any, sample_weight: Any = None) -> Any:
        share = getattr(_replica, "share", None)
        if share is not None and sample_weight is None and tf.convert_to_tensor(values).shape.rank == 0:
            sample_weight = share()
        return add(self, values, sample_weight=sample_weight)

    with (
        unscaled_losses(),
        patched(losses, "reduce_weighted_values", reduce_over_all),
        patched(keras.metrics.Mean, "update_state", add_by_share),
    ):
        yield


@contextlib.contextmanager
def replica_share(share: Callable[[], tf.Tensor]) -> Iterator[None]:
    """Says inside a replica what its part of the batch is, by which a `Mean` of one number for it counts."""
    _replica.share = share
    try:
        yield
    finally:
        _replica.share = None


def loss_couples_examples(model: keras.Model, batch: Any) -> bool | None:
    """Whether a loss of a batch is another than the mean of its halves', on which two replicas would train.

    None says that it cannot be known: the model is not computed so, or draws random numbers.
    """
    tolerance = _TOLERANCE if model.compute_dtype == "float32" else _HALF_PRECISION_TOLERANCE
    try:
        rows = min(int(tf.nest.flatten(batch)[0].shape[0]) // 2, _HALF_BATCH)
        parts = slice(2 * rows), slice(rows), slice(rows, 2 * rows)
        whole, *halves = (_losses(model, batch, part) for part in parts)
        if np.allclose(whole, np.mean(halves, axis=0), rtol=tolerance, atol=1e-6):
            return False
        again = _losses(model, batch, slice(2 * rows))
    except Exception:  # the user's code runs here and may raise anything
        return None
    return True if np.array_equal(whole, again) else None


def _losses(model: keras.Model, batch: Any, rows: slice) -> np.ndarray[Any, Any]:
    """Returns the loss of some rows of a batch, reduced by plain means, and those that layers have added."""
    part = tf.nest.map_structure(lambda one: one[rows], batch)
    x, y, weight = keras.utils.unpack_x_y_sample_weight(part)
    # It has no value of its own of a variable, for which regularizers of weights ask it.
    state = [(one, one.value) for one in model.trainable_variables if one.regularizer]
    with (
        own_replica(model.distribute_strategy),
        unscaled_losses(),
        patched(losses, "reduce_weighted_values", lambda values, *_, **__: tf.reduce_mean(values)),
        patched(keras.random.SeedGenerator, "next", None),  # whoever draws fails
        keras.StatelessScope(state, collect_losses=True, initialize_variables=False),
    ):
        given = model(x, training=False)
        loss = model.compute_loss(x=x, y=y, y_pred=given, sample_weight=weight, training=False)
        return np.array([float(one) for one in (loss, *model.losses)])


_COMPUTING = ("evaluate", "predict", "predict_on_batch", "test_on_batch")
_TRAINING = ("fit", "train_on_batch")


def patch_keras_methods() -> None:
    """Makes Keras' own methods do under a strategy of several workers what they do in one process.

    There `evaluate` and `test_on_batch` fail (keras-team/keras#20585), and `predict` meets the others for
    each batch (keras/src/backend/tensorflow/trainer.py, `_multi_worker_concat`). What trains is refused.
    """
    for name in (*_COMPUTING, *_TRAINING):
        setattr(keras.Model, name, _on_own_replica(getattr(keras.Model, name)))


def _on_own_replica(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of Keras as it is where several workers have the model."""

    @functools.wraps(method)
    def call(model: keras.Model, *args: Any, **options: Any) -> Any:
        # None of a model that was built outside of a strategy.
        if not has_several_workers(getattr(model, "_distribute_strategy", None)):
            return method(model, *args, **options)
        if method.__name__ in _TRAINING:
            raise SettingsError(
                f"{method.__name__} of Keras would train {model.name!r} on each process by itself, apart "
                "from the others; train it with shardline.fit, which takes the same arguments"
            )
        return _call_alone(method, model, *args, **options)

    return call


def _call_alone(method: Callable[..., Any], model: keras.Model, *args: Any, **options: Any) -> Any:
    strategy = model.distribute_strategy
    replica = own_replica(strategy)

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        """Lets variables be made, which may not be inside a replica."""
        replica.__exit__(None, None, None)
        try:
            with strategy.scope():
                yield
        finally:
            replica.__enter__()

    alone = types.SimpleNamespace(
        run=lambda step, args: step(*args), experimental_distribute_dataset=lambda data: data, scope=scope
    )
    with replica, unscaled_losses(), patched(model, "_distribute_strategy", alone):
        return method(model, *args, **options)
