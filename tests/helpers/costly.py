"""Layers that cost much and change nothing."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable("tests")
class Slow(keras.layers.Layer):
    """Takes a while."""

    def call(self, inputs: Any) -> Any:
        matrix = tf.random.uniform((700, 700))
        for _ in range(8):
            matrix = tf.matmul(matrix, matrix) / 1e4
        return inputs + 0.0 * tf.reduce_sum(tf.clip_by_value(matrix, 0.0, 1.0))


@keras.saving.register_keras_serializable("tests")
class Large(keras.layers.Layer):
    """Has 1.2 MB of weights."""

    def build(self, shape: Any) -> None:
        self.ballast = self.add_weight(shape=(300, 1000), initializer="zeros")

    def call(self, inputs: Any) -> Any:
        return inputs + self.ballast[0, 0]
