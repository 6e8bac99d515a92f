"""Keras' inside, of compiling and building: what a model was compiled with, and what its own step makes."""

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
    """Returns the losses given to `compile`, and those that a model holds for a `train_step` of its own."""
    given = getattr(model, "loss", None)
    given = list(given.values()) if isinstance(given, dict) else given
    given = given if isinstance(given, list | tuple) else [given]
    whole = compile_utils.CompileLoss
    held = [one for one in vars(model).values() if isinstance(one, keras.Loss) and not isinstance(one, whole)]
    return list({id(one): one for one in (*given, *held) if one is not None}.values())


def compiled_metrics(model: keras.Model) -> list[Any]:
    """Returns the metrics of a compiled model as they were given to `compile`: `metrics` has them built."""
    given = getattr(model, "_compile_metrics", None)
    nested = given and (given._user_metrics, given._user_weighted_metrics)
    return [one for one in keras.tree.flatten(nested) if one is not None]


def passed_metrics(model: keras.Model) -> Any:
    """Returns the metrics in the structure in which they were given to `compile`; None without any."""
    given = getattr(model, "_compile_metrics", None)
    return None if given is None or given._user_weighted_metrics else given._user_metrics


def compute_loss(loss: Any, y_true: Any, y_pred: Any) -> Any:
    """Computes a loss given to `compile`, a text, a function or an object, as `compute_loss` does."""
    return compile_utils.get_loss(loss, y_true, y_pred)(y_true, y_pred)


def wrapped_function(given: Any) -> Any:
    """Returns the function behind a loss or metric that only wraps one; anything else as it is."""
    if isinstance(given, LossFunctionWrapper):
        return given.fn
    return given._fn if isinstance(given, keras.metrics.MeanMetricWrapper) else given


def compiled_name(given: Any) -> str:
    """Returns the name of a loss or metric as it was given to `compile`: text, a function or an object."""
    inner = wrapped_function(given)
    if isinstance(inner, str):
        return inner
    return str(getattr(inner, "__name__", type(inner).__name__))


def is_activated(outputs: Any) -> bool:
    """Whether outputs come of a softmax or sigmoid of Keras, which remembers the logits behind them."""
    return hasattr(outputs, "_keras_logits")


def refuse_lambda(error: Exception, what: str, otherwise: str) -> None:
    """Refuses a Lambda layer, where an error of loading a model in safe mode tells of one."""
    if "Lambda" in str(error):
        raise ModelError(
            f"{what} has a Lambda layer, whose code is not run from a file; make it a layer of its own, with "
            f"@keras.saving.register_keras_serializable(); {otherwise}"
        ) from error


def short_message(error: BaseException) -> str:
    """Returns what an exception of Keras says, in a line: without colours, arguments and configurations."""
    text = re.sub(r"\x1b\[\d+m", "", str(error)).rpartition("Exception encountered: ")[2]
    for end in ("Arguments received by", "Full object config", "config={", "Make sure custom classes"):
        text = text.partition(end)[0]
    text = " ".join(text.split()).rstrip(". ")
    return re.sub(r"^'(.*)'$", r"\1", text) or type(error).__name__


def describe_model_error(error: BaseException) -> str:
    """Returns one line on what a user's model raised; Keras' own words without all arguments and colours."""
    of_keras = "Exception encountered: " in str(error) or "Arguments received by" in str(error)
    return short_message(error) if of_keras else plugins.describe(error)


@contextlib.contextmanager
def saveable(model: keras.Model) -> Iterator[None]:
    """Lets a model be saved without its compilation where that has no form in a file (functools.partial)."""
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
    """Makes the metrics of each output's loss, of a built model, exact means over the examples.

    Keras weighs them by the static size of the batch, where that is known, or averages over batches
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
    """Takes back, in the end, the methods that training replaces on a model's optimizers and losses."""
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
    """Makes a step that is taken or traced meanwhile create its variables, and change none.

    They, and what a layer's `build` makes beside them, are created outside of the function and the replica
    that are traced. Optimizers are built, and neither exchange nor apply.
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
