"""Metrics over replicas: the same values as in one process with the whole batch.

TensorFlow adds the states of the replicas when a metric is read. The sum is right for totals and counts. Any
other metric, such as a maximum, a moving mean or a correlation over the batch, is updated on every replica
with the examples of all.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.trainers import compile_utils

from shardline.trainer.keras_compat.keras_internals import patched
from shardline.trainer.keras_compat.replica_losses import (
    HALF_BATCH,
    HALF_PRECISION_TOLERANCE,
    TOLERANCE,
    exact_losses,
    own_share,
    replica_share,
)
from shardline.trainer.keras_compat.tensorflow_internals import has_several_workers, read_first_replica

# Only pass on what they get.
_LISTS = (compile_utils.MetricsList, compile_utils.CompileMetrics)
# TensorFlow gathers these; others are converted.
_GATHERED = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)

# Numbers of an example from which on the halves of a batch have one example.
_LARGE = 1 << 18

# A metric, the arguments of an update, and whether it is in the call of a layer.
_Call = tuple[keras.metrics.Metric, Any, bool]


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
        draw = functools.partial(_draw, random, examples, 1 if large else HALF_BATCH)
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

        tolerance = HALF_PRECISION_TOLERANCE if is_half else TOLERANCE
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
