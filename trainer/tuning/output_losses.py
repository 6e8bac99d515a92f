"""The loss of each output of a model as an exact mean over the examples."""

from __future__ import annotations

import threading
from typing import Any

import keras
import tensorflow as tf


def weigh_output_losses(model: keras.Model) -> None:
    """Makes the metrics of each output's loss count batches by their examples.

    Keras weighs them by the static size of the batch, which is not known where the last batch of a split may
    be smaller, and then averages over batches (keras/src/trainers/compile_utils.py, `CompileLoss.call`).
    Only these objects are changed, neither their class nor what is saved.

    Args:
        model: Compiled and built.
    """
    losses = model._compile_loss
    if losses is None or not losses.metrics:
        return
    batch = threading.local()
    call = losses.call

    def counted_call(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        batch.examples = tf.shape(tf.nest.flatten(y_pred)[0])[0]
        return call(y_true, y_pred, sample_weight)

    losses.call = counted_call
    for metric in losses.metrics:
        if metric is not None:
            _weigh(metric, batch)


def _weigh(metric: keras.metrics.Metric, batch: threading.local) -> None:
    update = metric.update_state

    def update_state(value: Any, sample_weight: Any = None) -> Any:
        return update(value, sample_weight=batch.examples if sample_weight is None else sample_weight)

    metric.update_state = update_state
