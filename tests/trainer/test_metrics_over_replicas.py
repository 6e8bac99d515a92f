"""Metrics whose states add up over parts of a batch are told from those that do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.keras_compat import replicas
from shardline.trainer.keras_compat.replicas import adds_up, inexact_metrics, metrics_on_trial
from tests.helpers.replica_state import Largest, Latest, Smoothed, correlation

m = keras.metrics


def arguments(width: int = 3, *, sparse: bool = False) -> Any:
    true = tf.TensorSpec([8], tf.int64) if sparse else tf.TensorSpec([8, width])
    return [[true, tf.TensorSpec([8, width])], {"sample_weight": None}]


@pytest.mark.parametrize(
    ("metric", "arguments", "adds"),
    [
        (Largest(), arguments(), False),
        (Smoothed(), arguments(), False),
        (m.MeanMetricWrapper(correlation), arguments(), False),
        (m.MeanMetricWrapper(lambda y, given: keras.ops.mean(keras.ops.abs(y - given))), arguments(), True),
        (m.MeanMetricWrapper(lambda y, given: keras.ops.abs(y - given)), arguments(), True),
        (m.PearsonCorrelation(axis=0), arguments(), False),
        (m.PearsonCorrelation(), arguments(), True),
        (m.SparseCategoricalAccuracy(), arguments(sparse=True), True),
        # Numbers of a step: a mean is weighed by the replica's share.
        (m.Mean(), [[tf.TensorSpec([])], {}], True),
        (m.Sum(), [[tf.TensorSpec([])], {}], False),
        (Latest(), [[tf.TensorSpec([])], {"sample_weight": tf.TensorSpec([], tf.int32)}], False),
    ],
)
def test_metrics_that_do_not_add_up_are_detected(metric: Any, arguments: Any, adds: bool) -> None:
    assert adds_up(metric, arguments, 8) is adds
    for variable in metric.variables:  # and nothing is changed
        np.testing.assert_array_equal(variable.numpy(), 0)


OF_KERAS = [
    m.AUC(), m.BinaryIoU(), m.F1Score(), m.FBetaScore(), m.FalseNegatives(),
    m.Precision(), m.PrecisionAtRecall(0.5), m.R2Score(), m.Recall(), m.RootMeanSquaredError(),
    m.CosineSimilarity(),
]  # fmt: skip


@pytest.mark.parametrize("metric", OF_KERAS, ids=lambda metric: metric.name)
def test_keras_own_metrics_add_up_which_is_not_tried(metric: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert adds_up(metric, arguments(), 8)
    metric.update_state(np.ones((8, 3)), np.ones((8, 3)))  # builds it
    monkeypatch.setattr(replicas, "_is_trusted", lambda _: False)
    assert adds_up(metric, arguments(), 8)


def test_a_metric_that_does_not_add_up_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.Model, "distribute_strategy", SimpleNamespace(num_replicas_in_sync=2))
    model, mean = keras.Sequential(), m.MeanAbsoluteError()
    for metric in (Largest(), mean) * 2:
        with metrics_on_trial(model, 4):
            metric.update_state(tf.ones((4, 1)), tf.ones((4, 1)))
    assert inexact_metrics(model) == ["largest"]
