"""Keras internals of compiling and building: losses and metrics of a model, its errors and variables."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.trainers import compile_utils
from keras.src.utils.python_utils import is_default

from shardline.trainer.base import plugins
from shardline.trainer.base.errors import ModelError
from shardline.trainer.keras_compat.keras_internals import optimizers, patched


def compiled_losses(model: keras.Model) -> list[Any]:
    """Returns the losses passed to `compile`, and those in a model's attributes for its own `train_step`."""
    passed = getattr(model, "loss", None)
    passed = list(passed.values()) if isinstance(passed, dict) else passed
    passed = passed if isinstance(passed, list | tuple) else [passed]
    whole = compile_utils.CompileLoss
    held = [
        value
        for value in vars(model).values()
        if isinstance(value, keras.Loss) and not isinstance(value, whole)
    ]
    return list({id(loss): loss for loss in (*passed, *held) if loss is not None}.values())


def compiled_metrics(model: keras.Model) -> list[Any]:
    """Returns the metrics as they were passed to `compile`; `Model.metrics` has them built."""
    compiled = getattr(model, "_compile_metrics", None)
    nested = compiled and (compiled._user_metrics, compiled._user_weighted_metrics)
    return [metric for metric in keras.tree.flatten(nested) if metric is not None]


def passed_metrics(model: keras.Model) -> Any:
    """Returns the metrics in the structure passed to `compile`; None for none, or with weighted ones."""
    compiled = getattr(model, "_compile_metrics", None)
    return None if compiled is None or compiled._user_weighted_metrics else compiled._user_metrics


def compute_loss(loss: Any, y_true: Any, y_pred: Any) -> Any:
    """Computes a loss passed to `compile` (a name, function or object) as `Model.compute_loss` does."""
    return compile_utils.get_loss(loss, y_true, y_pred)(y_true, y_pred)


def wrapped_function(loss_or_metric: Any) -> Any:
    """Returns the function that a loss or metric wraps; any other one unchanged."""
    if isinstance(loss_or_metric, LossFunctionWrapper):
        return loss_or_metric.fn
    is_wrapper = isinstance(loss_or_metric, keras.metrics.MeanMetricWrapper)
    return loss_or_metric._fn if is_wrapper else loss_or_metric


def compiled_name(loss_or_metric: Any) -> str:
    """Returns the name of a loss or metric passed to `compile` as a name, function or object."""
    inner = wrapped_function(loss_or_metric)
    if isinstance(inner, str):
        return inner
    return str(getattr(inner, "__name__", type(inner).__name__))


def is_activated(outputs: Any) -> bool:
    """Whether outputs come from a softmax or sigmoid of Keras, which attaches the logits to them."""
    return hasattr(outputs, "_keras_logits")


def refuse_lambda(error: Exception, what: str, otherwise: str) -> None:
    """Raises ModelError for a Lambda layer, if loading a model in safe mode failed on one."""
    if "Lambda" in str(error):
        raise ModelError(
            f"{what} has a Lambda layer, whose code is not run from a file; make it a layer of its own, with "
            f"@keras.saving.register_keras_serializable(); {otherwise}"
        ) from error


def short_message(error: BaseException) -> str:
    """Returns an exception of Keras in one line, without colours, arguments and configurations."""
    text = re.sub(r"\x1b\[\d+m", "", str(error)).rpartition("Exception encountered: ")[2]
    for end in ("Arguments received by", "Full object config", "config={", "Make sure custom classes"):
        text = text.partition(end)[0]
    text = " ".join(text.split()).rstrip(". ")
    return re.sub(r"^'(.*)'$", r"\1", text) or type(error).__name__


def describe_model_error(error: BaseException) -> str:
    """Returns one line on an exception of a user's model; errors of Keras are shortened."""
    of_keras = "Exception encountered: " in str(error) or "Arguments received by" in str(error)
    return short_message(error) if of_keras else plugins.describe(error)


@contextlib.contextmanager
def saveable(model: keras.Model) -> Iterator[None]:
    """Saves the model without its compilation if that cannot be serialized (functools.partial)."""
    try:
        json.dumps(model.get_compile_config())
    except Exception:  # the user's code runs here and may raise anything
        model.get_compile_config = lambda: None
        try:
            yield
        finally:
            del model.get_compile_config
    else:
        yield


def weigh_output_losses(model: keras.Model) -> None:
    """Makes the loss metrics of each output of a built model exact means over the examples.

    Keras weighs them by the batch's static size, if known, or averages over batches
    (keras/src/trainers/compile_utils.py, `CompileLoss.call`; keras-team/keras#19363).
    """
    compiled = model._compile_loss
    if compiled is None or not compiled.metrics:
        return
    batch = threading.local()
    call = compiled.call

    def counted_call(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        batch.examples = tf.shape(tf.nest.flatten(y_pred)[0])[0]
        return call(y_true, y_pred, sample_weight)

    compiled.call = counted_call

    def weigh(update: Callable[..., Any]) -> Callable[..., Any]:
        return lambda value, sample_weight=None: update(
            value, sample_weight=batch.examples if sample_weight is None else sample_weight
        )

    for metric in compiled.metrics:
        if metric is not None:
            metric.update_state = weigh(metric.update_state)


@contextlib.contextmanager
def undo_patches(model: keras.Model) -> Iterator[None]:
    """Restores, at the end, the methods that training replaces on a model's optimizers and losses."""
    losses_ = model._compile_loss
    owners = [*optimizers(model), *([losses_, *losses_.metrics] if losses_ is not None else [])]
    before = [dict(vars(owner)) for owner in owners]
    try:
        yield
    finally:
        for owner, kept in zip(owners, before, strict=True):
            for name, value in list(vars(owner).items()):
                if isinstance(value, types.FunctionType) and kept.get(name) is not value:
                    object.__delattr__(owner, name)


@contextlib.contextmanager
def build_only(model: keras.Model) -> Iterator[None]:
    """Makes a step that runs or is traced in the context create its variables, and change none.

    Variables and other objects of a layer's `build` are created outside the traced function and replica.
    Optimizers are built, but neither exchange nor apply gradients.
    """
    initialize, build = keras.Variable._initialize_with_initializer, keras.layers.Layer._maybe_build

    def initialize_outside(self: keras.Variable, initializer: Callable[..., Any]) -> None:
        with tf.init_scope():
            initialize(self, initializer)

    def build_outside(self: keras.layers.Layer, call_spec: Any) -> None:
        with contextlib.nullcontext() if is_default(self.build) else tf.init_scope():
            build(self, call_spec)

    def build_optimizer(optimizer: keras.Optimizer, _: Any, variables: Any = None) -> None:
        if variables is not None and not optimizer.built:
            optimizer.build(list(variables))

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(keras.Variable, "_initialize_with_initializer", initialize_outside))
        stack.enter_context(patched(keras.layers.Layer, "_maybe_build", build_outside))
        if model.run_eagerly:
            stack.enter_context(patched(keras.Variable, "assign", lambda self, value: value))
        for optimizer in optimizers(model):
            optimizer.apply = functools.partial(build_optimizer, optimizer)
            stack.callback(object.__delattr__, optimizer, "apply")
        yield
