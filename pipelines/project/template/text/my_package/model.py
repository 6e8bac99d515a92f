"""The model: any function that returns a compiled Keras 3 model."""

from __future__ import annotations

import keras
import tensorflow as tf
from shardline import DatasetInfo, encode_columns, make_output

#: Columns of text; all others are words or numbers.
TEXTS = ("text",)


@keras.saving.register_keras_serializable("my_package")
class Trigrams(keras.layers.Layer):
    """How often each three characters in a row occur, hashed into buckets: no vocabulary is needed.

    It is part of the model, so that the exported model takes text as it is: a batch of strings becomes
    float32 (batch, buckets) of shares.
    """

    def __init__(self, buckets: int, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.buckets = buckets
        self.supports_jit = False  # XLA knows no strings

    def call(self, texts: tf.Tensor) -> tf.Tensor:
        """Counts the trigrams of each text."""
        characters = tf.strings.unicode_split(tf.strings.lower(texts, "utf-8"), "UTF-8")
        trigrams = tf.strings.ngrams(characters, 3, separator="")
        hashed = tf.strings.to_hash_bucket_fast(trigrams, self.buckets)
        # Rows of different lengths: each bucket is added to its row's sum.
        rows = hashed.value_rowids() * self.buckets + hashed.values
        counts = tf.math.unsorted_segment_sum(
            tf.ones_like(rows, tf.float32), rows, hashed.nrows() * self.buckets
        )
        counts = tf.reshape(counts, (-1, self.buckets))
        return counts / tf.maximum(tf.reduce_sum(counts, axis=1, keepdims=True), 1.0)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Returns (batch, buckets)."""
        return (*input_shape, self.buckets)

    def get_config(self) -> dict[str, object]:
        """Returns the arguments with which the layer is loaded again."""
        return {**super().get_config(), "buckets": self.buckets}


def build_model(dataset: DatasetInfo, learning_rate: float = 3e-2, buckets: int = 2048) -> keras.Model:
    """Returns a linear model of the trigrams of texts, and of all other columns.

    Args:
        dataset: What is known about the data: inputs, label, features, records.
        learning_rate: Learning rate of Adam.
        buckets: Buckets into which trigrams are hashed; a run's parameter hparams sets such arguments.
    """
    columns, encoded = encode_columns(dataset, skipped=TEXTS)
    features = keras.layers.concatenate([*(Trigrams(buckets)(columns[name]) for name in TEXTS), *encoded])
    output, loss, metric = make_output(dataset, features)
    model = keras.Model(columns, output)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate), loss=loss, metrics=[metric])
    return model
