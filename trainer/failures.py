"""Failures of a step: what a user's model, loss or data raise inside of Keras and TensorFlow, in one line."""

from __future__ import annotations

import re
import traceback

import tensorflow as tf

from shardline.trainer import crash, plugins
from shardline.trainer.errors import ModelError, RunError, SettingsError, ShardlineError
from shardline.trainer.keras_compilation import reason

# What goes wrong in an op because of its inputs; anything else is of the machine, or of ours.
_OF_INPUTS = (
    tf.errors.DataLossError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.OutOfRangeError,
    tf.errors.UnimplementedError,
    tf.errors.UnknownError,
)
_STEPS = ("train_step", "test_step", "predict_step")
_NODE = re.compile(r"Detected at node (?:while/)?(\S+) defined at")
_STACK = re.compile(r" {2,}|Graph execution error|Detected at node|<stack traces")
_AROUND = re.compile(
    r"\{\{.*?\}\}|\[\[.*?\]\]|\[Op:\w*\](?: name: ?)?|Error in user-defined function.*? with iterator: \S+ "
)
_SHOWN_LETTERS = 300


def explain(error: Exception) -> ShardlineError | None:
    """Returns what an exception says about the user's model or data; None where it is about neither."""
    if isinstance(error, OSError):
        return crash.of_system(error)
    if isinstance(error, tf.errors.ResourceExhaustedError):
        return RunError(f"out of memory: {_words(error)}; use smaller batches or a smaller model")
    if isinstance(error, _OF_INPUTS):
        text = str(error)
        if "IteratorGetNext" in text:
            return SettingsError(f"the data cannot be read: {_words(error)}")
        where = f" in {node[1]}" if (node := _NODE.search(text)) else ""
        return ModelError(
            f"a step of the model failed{where}: {_words(error)}; compare what the model returns with the "
            "data, and the loss with both"
        )
    frames = traceback.extract_tb(error.__traceback__)
    steps = [frame.name for frame in frames if frame.name in _STEPS]
    if not steps:
        return None
    return ModelError(f"{steps[0]} of the model failed: {describe(error)}")


def describe(error: BaseException) -> str:
    """Returns one line on what a user's model raised; Keras' own words without all arguments and colours."""
    of_keras = "Exception encountered: " in str(error) or "Arguments received by" in str(error)
    return reason(error) if of_keras else plugins.describe(error)


def _words(error: tf.errors.OpError) -> str:
    """Returns TensorFlow's words without stacks of calls and the names of ops around them."""
    text = _AROUND.sub("", str(error).partition("Traceback (most recent call last)")[0])
    said = [one.strip() for one in text.splitlines() if one.strip() and not _STACK.match(one)]
    return " ".join((said or ["?"])[0].split())[:_SHOWN_LETTERS]
