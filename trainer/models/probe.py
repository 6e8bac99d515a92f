"""A batch of two made-up examples, as a dataset's examples look: what a model is built and tried with."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from shardline.trainer.data.decode import Inputs
from shardline.trainer.data.manifest import DatasetInfo, Feature


def probe_inputs(dataset: DatasetInfo) -> Inputs:
    """Returns two examples: a black and a white image, or rows of 0, "" and of 1, "1"."""
    if not dataset.is_table:
        black_and_white = np.array([0, 255], np.uint8).reshape(2, 1, 1, 1)
        return tf.constant(np.broadcast_to(black_and_white, (2, *dataset.input_shape)))
    return {name: _column(column) for name, column in dataset.inputs.items()}


def describe_inputs(dataset: DatasetInfo) -> str:
    """Returns what the examples look like in words: "images, uint8 (28, 28, 1)"."""
    if not dataset.is_table:
        return f"images, uint8 {dataset.input_shape}"
    columns = (f"{name} {column.dtype}" for name, column in dataset.inputs.items())
    return f"columns, {', '.join(columns)}"


def _column(column: Feature) -> tf.Tensor:
    return tf.constant(["", "1"]) if column.dtype == "string" else tf.constant([0, 1], column.dtype)
