"""Losses and metrics over replicas: the same values as in one process with the whole batch.

TensorFlow adds the states of the replicas when a metric is read. The sum is right for totals and counts. Any
other metric, such as a maximum, a moving mean or a correlation over the batch, is updated on every replica
with the examples of all.
"""

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
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.losses import loss as losses
from keras.src.trainers import compile_utils

from shardline.trainer.base.errors import SettingsError
from shardline.trainer.keras_compat.tensorflow_internals import (
    has_several_workers,
    own_replica,
    patched,
    read_first_replica,
)

_replica = threading.local()

# Examples in each half of a batch on which a loss is probed, and tolerances for rounding.
_HALF_BATCH = 4
_TOLERANCE, _HALF_PRECISION_TOLERANCE = 1e-3, 3e-2

# Only pass on what they get.
_LISTS = (compile_utils.MetricsList, compile_utils.CompileMetrics)
# TensorFlow gathers these; others are converted.
_GATHERED = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)

# Numbers of an example from which on the halves of a batch have one example.
_LARGE = 1 << 18

# A metric, the arguments of an update, and whether it is in the call of a layer.
_Call = tuple[keras.metrics.Metric, Any, bool]


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
    tolerance = _TOLERANCE if model.compute_dtype == "float32" else _HALF_PRECISION_TOLERANCE
    try:
        half = min(int(tf.nest.flatten(batch)[0].shape[0]) // 2, _HALF_BATCH)
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


@contextlib.contextmanager
def whole_batch_metrics(model: keras.Model, examples: int) -> Iterator[None]:
    """Tries the metrics that are updated in the context, by steps on batches of so many examples.

    A metric whose state after a batch is not the sum of the states after its halves gets whole batches.
    `inexact_metrics` are those for which that is not possible.
    """
    strategy = model.distribute_strategy
    served = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    if strategy.num_replicas_in_sync == 1 and not served:
        yield
        return
    calls: list[_Call] = []
    with _recorded(calls):
        yield
    inexact = vars(model).setdefault("_inexact_metrics", {})  # names in their order
    updates: dict[int, list[_Call]] = {}
    for call in calls:
        updates.setdefault(id(call[0]), []).append(call)
    for own in updates.values():
        metric = own[0][0]
        if all(adds_up(each, arguments, examples) for each, arguments, _ in own):
            continue
        parts = [part for _, arguments, _ in own for part in keras.tree.flatten(arguments)]
        # Replicas of one process are threads that take turns at an exchange: within a layer's call each would
        # see what the layer keeps for another, such as its added losses.
        mixed = len(strategy.extended.worker_devices) > 1 and any(in_layer for *_, in_layer in own)
        if served or mixed or not all(_has_examples(part, examples) for part in parts):
            inexact[metric.name] = None
        else:
            _take_whole_batches(metric)


def inexact_metrics(model: keras.Model) -> list[str]:
    """Returns the names of metrics that do not add up over replicas, and cannot get whole batches."""
    return list(vars(model).get("_inexact_metrics", ()))


def takes_whole_batches(model: keras.Model) -> bool:
    """Whether a metric gets whole batches, for which replicas exchange tensors of a batch's size."""
    metrics = [each for metric in model.metrics for each in (metric, *getattr(metric, "metrics", ()))]
    updates = [getattr(metric, "update_state", None) for metric in metrics]
    return any(hasattr(update, "takes_whole_batches") for update in updates)


@contextlib.contextmanager
def _recorded(calls: list[_Call]) -> Iterator[None]:
    """Records each metric that is updated in the context, with its arguments, tensors as specifications."""
    within = threading.local()

    def recorder(update: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(update)
        def record(self: keras.metrics.Metric, *args: Any, **options: Any) -> Any:
            if getattr(within, "metric", None) is not None:  # its base class, or a metric inside it
                return update(self, *args, **options)
            within.metric = self
            try:
                in_layer = global_state.get_global_attribute("current_call_ctx") is not None
                calls.append((self, keras.tree.map_structure(_specification, [args, options]), in_layer))
                return update(self, *args, **options)
            finally:
                within.metric = None

        return record

    with contextlib.ExitStack() as stack:
        for kind in _subclasses(keras.metrics.Metric):
            if "update_state" in vars(kind) and kind not in _LISTS:
                stack.enter_context(patched(kind, "update_state", recorder(kind.update_state)))
        yield


def _subclasses(kind: Any) -> set[Any]:
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def _specification(value: Any) -> Any:
    if isinstance(value, tf.SparseTensor | tf.RaggedTensor):
        return tf.type_spec_from_value(value)
    is_array = tf.is_tensor(value) or isinstance(value, np.ndarray | keras.Variable)
    return tf.TensorSpec(value.shape, value.dtype) if is_array else value


def _has_examples(part: Any, examples: int) -> bool:
    """Whether an argument can be put together of all replicas' parts."""
    if not isinstance(part, tf.TypeSpec):
        return True
    if not isinstance(part, tf.TensorSpec) or part.dtype == tf.string or part.shape.rank is None:
        return False
    return part.shape.rank == 0 or part.shape[0] is None or part.shape[0] % examples == 0


def adds_up(metric: keras.metrics.Metric, arguments: Any, examples: int) -> bool:
    """Whether a metric's state after a batch is the sum of those after its halves; tried on random numbers.

    `arguments` are those of `update_state`, tensors as specifications with the number of examples.
    """
    parts = [part for part in keras.tree.flatten(arguments) if isinstance(part, tf.TypeSpec)]
    if all(part.shape.rank == 0 for part in parts):
        return isinstance(metric, keras.metrics.Mean)  # weighed by the replica's share
    if _is_trusted(metric):
        return True
    is_half = any(part.dtype.size == 2 for part in parts)
    random = np.random.default_rng(0)
    try:
        large = any((part.shape[1:].num_elements() or 0) > _LARGE for part in parts)
        draw = functools.partial(_draw, random, examples, 1 if large else _HALF_BATCH)
        batch = keras.tree.map_structure(
            lambda part: draw(part) if isinstance(part, tf.TypeSpec) else part, arguments
        )
        before = _numbers(metric.stateless_reset_state())

        def increase(half: int | None) -> Any:
            args, options = keras.tree.map_structure(lambda part: _half(part, half), batch)
            with exact_losses(), replica_share(lambda: tf.constant(1.0 if half is None else 0.5)):
                state = metric.stateless_reset_state()
                increased = _numbers(metric.stateless_update_state(state, *args, **options))
            return increased - before

        tolerance = _HALF_PRECISION_TOLERANCE if is_half else _TOLERANCE
        whole, halves = increase(None), increase(0) + increase(1)
        return bool(whole.size) and np.allclose(whole, halves, rtol=tolerance, atol=1e-6)
    except Exception:  # the user's code runs here and may raise anything
        return False


def _is_trusted(metric: keras.metrics.Metric) -> bool:
    """Whether a metric is one of Keras' own, all of which add up but some that wrap a function."""
    is_of_keras = type(metric).__module__.startswith("keras.")
    return is_of_keras and not isinstance(metric, keras.metrics.MeanMetricWrapper)


def _draw(random: np.random.Generator, examples: int, half: int, part: tf.TensorSpec) -> tf.Tensor:
    """Returns random numbers in the shape of an argument, for two halves of a batch."""
    rows = (part.shape[0] or examples) // examples if part.shape.rank else 1
    shape = [2 * half * rows, *(size or 3 for size in part.shape[1:])] if part.shape.rank else []
    values = random.random(shape, "float32") if part.dtype.is_floating else random.integers(0, 2, shape)
    return tf.cast(values, part.dtype)


def _half(part: Any, half: int | None) -> Any:
    if half is None or not tf.is_tensor(part) or not part.shape.rank:
        return part
    return tf.split(part, 2)[half]


def _numbers(state: list[Any]) -> np.ndarray[Any, Any]:
    values: list[np.ndarray[Any, Any]] = [np.zeros(0), *(np.ravel(value) for value in state)]
    return np.concatenate(values)


def _take_whole_batches(metric: keras.metrics.Metric) -> None:
    """Updates a metric with the arguments of all replicas, on each, so that any of them has its state."""
    update = metric.update_state

    @functools.wraps(update)
    def update_with_all(*args: Any, **options: Any) -> Any:
        context, share = tf.distribute.get_replica_context(), own_share()
        if context is None or context.num_replicas_in_sync == 1:
            return update(*args, **options)
        if share is None and has_several_workers(
            context.strategy
        ):  # Keras' own methods, on each worker alone
            return update(*args, **options)
        args, options = keras.tree.map_structure(
            lambda part: _gather(part, share) if tf.is_tensor(part) else part, (args, options)
        )
        with replica_share(None):
            return update(*args, **options)

    vars(update_with_all)["takes_whole_batches"] = True
    metric.update_state = update_with_all
    for variable in metric.variables:
        read_first_replica(variable.value)


def _gather(part: tf.Tensor, share: Callable[[], tf.Tensor] | None) -> tf.Tensor:
    """Returns a tensor of all replicas' examples; of single numbers the mean, of counts the sum."""
    context, operations = tf.distribute.get_replica_context(), tf.distribute.ReduceOp
    part = tf.convert_to_tensor(part)
    mask = keras.src.backend.get_keras_mask(part)
    if not part.shape.rank:
        if part.dtype.is_integer:
            return context.all_reduce(operations.SUM, part)
        weight = tf.cast(share() if share else 1.0, part.dtype)
        return context.all_reduce(operations.MEAN, part * weight)
    wire = part.dtype if part.dtype in _GATHERED else tf.float32 if part.dtype.is_floating else tf.int32
    # identity: the exchange needs tensors with a device.
    whole = tf.cast(context.all_gather(tf.identity(tf.cast(part, wire)), axis=0), part.dtype)
    whole = tf.ensure_shape(whole, [None, *part.shape[1:]])
    if mask is not None:
        keras.src.backend.set_keras_mask(whole, _gather(mask, share))
    return whole
