"""Losses over replicas: the same losses and metrics as in one process with the whole batch."""

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
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.losses import loss as losses

from shardline.trainer.base.errors import SettingsError
from shardline.trainer.keras_compat.keras_internals import patched
from shardline.trainer.keras_compat.tensorflow_internals import has_several_workers, own_replica

_replica = threading.local()

# Examples in each half of a batch on which a loss is probed, and tolerances for rounding.
HALF_BATCH = 4
TOLERANCE, HALF_PRECISION_TOLERANCE = 1e-3, 3e-2


@contextlib.contextmanager
def unscaled_losses() -> Iterator[None]:
    """Makes losses traced in the context those of one process, not divided by the number of replicas.

    Keras divides only those that it averages itself (keras/src/losses/loss.py).
    """
    with (
        patched(losses, "scale_loss_for_distribution", lambda value: value),
        patched(losses, "unscale_loss_for_distribution", lambda value: value),
    ):
        yield


@contextlib.contextmanager
def exact_losses(single: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Makes losses traced in the context, outside the replicas, equal those of the whole batch.

    They are not divided by the number of replicas, and count by their replica's share of the examples. A loss
    that divides by the sum of its weights (a mask, the reduction mean_with_sample_weight), or adds up (sum,
    none), is scaled by a factor from an exchange, and one for each example that a layer adds by the replica's
    share. `single` is called for a loss that is already one number.
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
        # The sum of weights, where Keras divides by it instead of the number of values.
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
        # Without a reduction the values are one for each example, and only their gradients add up.
        return exact if reduction not in ("none", None) else exact + tf.stop_gradient(loss - exact)

    with (
        unscaled_losses(),
        patched(losses, "reduce_weighted_values", reduce_over_all),
        patched(
            TensorFlowTrainer,
            "_aggregate_additional_loss",
            _over_all(TensorFlowTrainer._aggregate_additional_loss),
        ),
        patched(keras.metrics.Mean, "update_state", _by_share(keras.metrics.Mean.update_state)),
    ):
        yield


def _over_all(aggregate: Callable[[keras.Model, tf.Tensor], tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Scales a loss for each example that a layer adds, so that it counts by the replica's share."""

    def aggregate_over_all(model: keras.Model, loss: tf.Tensor) -> tf.Tensor:
        total, share, examples = aggregate(model, loss), own_share(), getattr(_replica, "examples", None)
        if share is None or examples is None or not loss.shape.rank:
            return total
        one_each = tf.equal(tf.cast(tf.shape(loss)[0], tf.float32), examples)
        replicas = float(tf.distribute.get_replica_context().num_replicas_in_sync)
        factor = tf.where(one_each, replicas * tf.math.reciprocal_no_nan(share()), 1.0)
        return total * tf.cast(factor, total.dtype)

    return aggregate_over_all


def _by_share(add: Callable[..., Any]) -> Callable[..., Any]:
    """Weighs a single number in a mean by the replica's share."""

    def add_by_share(self: keras.metrics.Mean, values: Any, sample_weight: Any = None) -> Any:
        share = own_share()
        if share is not None and sample_weight is None and tf.convert_to_tensor(values).shape.rank == 0:
            sample_weight = share()
        return add(self, values, sample_weight=sample_weight)

    return add_by_share


@contextlib.contextmanager
def replica_share(share: Callable[[], tf.Tensor] | None, examples: tf.Tensor | None = None) -> Iterator[None]:
    """Sets, inside a replica, its share of the batch, the weight of a scalar in a `keras.metrics.Mean`.

    It is 1 for an equal share; `examples` is the number of examples of the replica, as float32.
    """
    before = own_share(), getattr(_replica, "examples", None)
    _replica.share, _replica.examples = share, examples
    try:
        yield
    finally:
        _replica.share, _replica.examples = before


def own_share() -> Callable[[], tf.Tensor] | None:
    """Returns what `replica_share` has set; None outside of a replica's step."""
    share: Callable[[], tf.Tensor] | None = getattr(_replica, "share", None)
    return share


def loss_couples_examples(model: keras.Model, batch: Any) -> bool | None:
    """Whether a batch's loss differs from the mean of the losses of its halves, as on two replicas.

    None means unknown: the model cannot be called on them, or draws random numbers.
    """
    tolerance = TOLERANCE if model.compute_dtype == "float32" else HALF_PRECISION_TOLERANCE
    try:
        half = min(int(tf.nest.flatten(batch)[0].shape[0]) // 2, HALF_BATCH)
        parts = slice(2 * half), slice(half), slice(half, 2 * half)
        whole, *halves = (_losses(model, batch, part) for part in parts)
        if np.allclose(whole, np.mean(halves, axis=0), rtol=tolerance, atol=1e-6):
            return False
        again = _losses(model, batch, slice(2 * half))
    except Exception:  # the user's code runs here and may raise anything
        return None
    return True if np.array_equal(whole, again) else None


def _losses(model: keras.Model, batch: Any, examples: slice) -> np.ndarray[Any, Any]:
    """Returns the loss of a slice of a batch, reduced by plain means, and the losses that layers add."""
    part = tf.nest.map_structure(lambda values: values[examples], batch)
    x, y, weight = keras.utils.unpack_x_y_sample_weight(part)
    # Regularizers read the variable in the StatelessScope, which needs its value.
    state = [(each, each.value) for each in model.trainable_variables if each.regularizer]
    with (
        own_replica(model.distribute_strategy),
        unscaled_losses(),
        patched(losses, "reduce_weighted_values", lambda values, *_, **__: tf.reduce_mean(values)),
        patched(TensorFlowTrainer, "_aggregate_additional_loss", lambda _, loss: tf.reduce_mean(loss)),
        patched(keras.random.SeedGenerator, "next", None),  # a random draw fails
        keras.StatelessScope(state, collect_losses=True, initialize_variables=False),
    ):
        outputs = model(x, training=False)
        loss = model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weight, training=False)
        return np.array([np.mean(value) for value in (loss, *model.losses)])


_COMPUTING = ("evaluate", "predict", "predict_on_batch", "test_on_batch")
_TRAINING = ("fit", "train_on_batch")


def patch_keras_methods() -> None:
    """Makes Keras' evaluation methods work under a multi-worker strategy as in one process.

    There `evaluate` and `test_on_batch` fail (keras-team/keras#20585), and `predict` exchanges every batch
    (keras/src/backend/tensorflow/trainer.py, `_multi_worker_concat`). Methods that train raise SettingsError.
    """
    for name in (*_COMPUTING, *_TRAINING):
        setattr(keras.Model, name, _on_own_replica(getattr(keras.Model, name)))


def _on_own_replica(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of Keras for models of a multi-worker strategy."""

    @functools.wraps(method)
    def call(model: keras.Model, *args: Any, **options: Any) -> Any:
        # A model built outside a strategy has no `_distribute_strategy`.
        if not has_several_workers(getattr(model, "_distribute_strategy", None)):
            return method(model, *args, **options)
        if method.__name__ in _TRAINING:
            raise SettingsError(
                f"{method.__name__} of Keras would train {model.name!r} on each process alone; train it with "
                "shardline.fit, which takes the same arguments"
            )
        return _call_alone(method, model, *args, **options)

    return call


def _call_alone(method: Callable[..., Any], model: keras.Model, *args: Any, **options: Any) -> Any:
    strategy = model.distribute_strategy
    replica = own_replica(strategy)

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        """Leaves the replica, inside which no variables can be created."""
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
