"""Metrics whose states add up over parts of a batch are told from those that do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.keras_compat import replicas
from shardline.trainer.keras_compat.replicas import adds_up, inexact_metrics, whole_batch_metrics
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
        # Numbers of a step: a mean is weighed by the replica's share, all else gets the batch's number.
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


class Texts(Largest):
    """A metric of texts."""

    def update_state(self, y: Any, given: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.cast(tf.strings.length(y[0]), "float32"))


class Watching(keras.layers.Layer):
    """A layer that updates a metric in its call."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metric = metric

    def call(self, x: Any) -> Any:
        self.metric.update_state(x, x)
        return x


@pytest.mark.parametrize(
    ("metric", "labels", "in_layer", "devices", "named"),
    [
        (Largest(), np.ones((4, 1)), False, 2, []),
        (Largest(), np.ones((4, 1)), True, 1, []),
        # Threads of one process would exchange within the call, and see each other's added losses.
        (Largest(), np.ones((4, 1)), True, 2, ["largest"]),
        (Texts(), np.full(4, "text"), False, 1, ["largest"]),
    ],
)
def test_a_metric_that_cannot_be_put_together_is_named_once(
    metric: Any, labels: Any, in_layer: bool, devices: int, named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = SimpleNamespace(
        num_replicas_in_sync=2, extended=SimpleNamespace(worker_devices=("CPU",) * devices)
    )
    monkeypatch.setattr(keras.Model, "distribute_strategy", strategy)
    model = keras.Sequential()
    for _ in ("train_step", "test_step"):
        with whole_batch_metrics(model, 4):
            if in_layer:
                Watching(metric)(tf.ones((4, 1)))
            else:
                metric.update_state(tf.constant(labels), tf.ones((4, 1)))
    assert inexact_metrics(model) == named


def test_the_examples_of_a_replica_are_known_after_a_metric_of_all() -> None:
    with replicas.replica_share(lambda: tf.constant(1.0), tf.constant(3.0)):
        with replicas.replica_share(None):
            assert replicas.own_share() is None
        assert replicas._replica.examples == 3
