"""What is wrong inside shards, found while they are read: from TensorFlow's errors to ours."""

from __future__ import annotations

import re

import tensorflow as tf

from shardline.trainer.errors import DatasetError

_BAD_LABEL = re.compile(r"(the \w+ split has a label outside 0\.\.\d+:)\]? *\[?(-?\d+)")


def check_labels(labels: tf.Tensor, classes: int, split: str) -> tf.Tensor:
    """Returns labels, int64 (batch,), of which reading fails when one is not in 0..classes-1."""
    outside = tf.boolean_mask(labels, (labels < 0) | (labels >= classes))
    message = f"the {split} split has a label outside 0..{classes - 1}:"
    with tf.control_dependencies([tf.debugging.Assert(tf.equal(tf.size(outside), 0), [message, outside])]):
        return tf.identity(labels)


def explain(error: tf.errors.OpError) -> DatasetError | None:
    """Returns what an error of TensorFlow says about the dataset; None when it says nothing.

    Args:
        error: Raised by a step, which takes its examples from the pipeline, or by the pipeline itself.
    """
    text = " ".join(str(error).split())
    if bad_label := _BAD_LABEL.search(text):
        return DatasetError(f"{bad_label[1]} {bad_label[2]}; preprocess the data again")
    if isinstance(error, tf.errors.DataLossError):
        return DatasetError(f"a shard of the dataset is damaged: {text}; preprocess the data again")
    return None
