"""Programs of public tutorials on texts of varying length, small, and datasets with a smaller last batch.

What is random in them is left out where `steady`, so that N processes train as one does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from shardline import DatasetInfo, make_output
from shardline.trainer.models.zoo import make_input

WORDS = [f"word{number}" for number in range(30)]
VOCABULARY, LONGEST, BATCH = len(WORDS) + 2, 14, 8  # and padding, and unknown words
LOSS = "sparse_categorical_crossentropy"


def sentences(count: int = 46) -> list[np.ndarray[Any, Any]]:
    """Returns sentences as numbers of words, of which batches differ in the longest, up to LONGEST."""
    random = np.random.default_rng(0)
    lengths = [random.integers(2, 5 + number // BATCH * 7 % 11) for number in range(count)]
    return [random.integers(2, VOCABULARY, length) for length in lengths]


def answered(answer: Callable[[Any], Any], shape: list[int | None]) -> tf.data.Dataset:
    """Returns sentences, each with an answer."""

    def pairs() -> Iterator[Any]:
        return ((words, answer(words)) for words in sentences())

    of_numbers = (tf.TensorSpec([None], tf.int64), tf.TensorSpec(shape, tf.int64))
    return tf.data.Dataset.from_generator(pairs, output_signature=of_numbers)


def counted(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Returns batches of known number: Keras' Adam counts a step too many at the end of others."""
    return batches.apply(tf.data.experimental.assert_cardinality(sum(1 for _ in batches)))


def padded(examples: tf.data.Dataset) -> tf.data.Dataset:
    return counted(examples.padded_batch(BATCH))


def judged() -> tf.data.Dataset:
    return answered(lambda words: words[0] % 2, [])


def bucketed() -> tf.data.Dataset:
    """Returns batches of sentences of like lengths, of more or fewer examples."""
    sizes = {"bucket_boundaries": [5, 9], "bucket_batch_sizes": [8, 8, 6]}
    return counted(judged().bucket_by_sequence_length(lambda words, _: tf.size(words), **sizes))


def lines() -> tf.data.Dataset:
    """Returns texts, looked up by a TextVectorization with its defaults."""
    lookup = layers.TextVectorization(vocabulary=WORDS)
    texts = [" ".join(WORDS[number - 2] for number in words) for words in sentences()]
    labels = [int(words[0] % 2) for words in sentences()]
    return tf.data.Dataset.from_tensor_slices((texts, labels)).batch(BATCH).map(lambda x, y: (lookup(x), y))


def finish(inputs: Any, outputs: Any, optimizer: Any = "adam", **options: Any) -> keras.Model:
    model = keras.Model(inputs, outputs)
    model.compile(optimizer, LOSS, **{"metrics": ["accuracy"], **options})
    return model


def dropped(x: Any, steady: bool) -> Any:
    return x if steady else layers.Dropout(0.2)(x)


def classification(steady: bool) -> keras.Model:
    """Text classification from scratch."""
    inputs = keras.Input((None,), dtype="int64")
    x = dropped(layers.Embedding(VOCABULARY, 6)(inputs), steady)
    x = layers.Conv1D(8, 3, padding="same", activation="relu")(x)
    x = layers.Dense(8, activation="relu")(layers.GlobalMaxPooling1D()(x))
    return finish(inputs, layers.Dense(2, "softmax")(dropped(x, steady)))


def bidirectional(steady: bool) -> keras.Model:
    """Bidirectional LSTM on padded sequences, with clipped gradients."""
    inputs = keras.Input((None,), dtype="int64")
    x = layers.Embedding(VOCABULARY, 6, mask_zero=True)(inputs)
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(dropped(x, steady))
    x = layers.Bidirectional(layers.LSTM(4))(x)
    return finish(inputs, layers.Dense(2, "softmax")(x), keras.optimizers.RMSprop(0.01, clipnorm=0.1))


class WordsAndPositions(layers.Layer):
    """Sum of the embedded words and their embedded positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = layers.Embedding(VOCABULARY, 6)
        self.positions = layers.Embedding(LONGEST, 6)

    def call(self, inputs: Any) -> Any:
        return self.words(inputs) + self.positions(ops.arange(ops.shape(inputs)[1]))


def transformer(steady: bool) -> keras.Model:
    """Text classification with a transformer block, and embedded positions."""
    inputs = keras.Input((None,), dtype="int64")
    x = WordsAndPositions()(inputs)
    attended = dropped(layers.MultiHeadAttention(2, 3)(x, x), steady)
    x = layers.LayerNormalization()(x + attended)
    x = layers.LayerNormalization()(x + layers.Dense(6, "relu")(x))
    x = layers.Dense(2, "softmax")(layers.GlobalAveragePooling1D()(x))
    optimizer = keras.optimizers.AdamW(1e-3, weight_decay=0.01, use_ema=True, global_clipnorm=1.0)
    return finish(inputs, x, optimizer)


def tagging(steady: bool) -> keras.Model:
    """A tag for each word (named entities), and none for the padding."""
    inputs = keras.Input((None,), dtype="int64")
    x = layers.Embedding(VOCABULARY, 6, mask_zero=True)(inputs)
    x = layers.GRU(6, return_sequences=True)(dropped(x, steady))
    x = layers.Dense(3, "softmax")(x)
    return finish(inputs, x, keras.optimizers.SGD(0.1, momentum=0.9))


def translation(steady: bool) -> keras.Model:
    """Sequence to sequence, here backwards: an encoder's state begins a decoder."""
    inputs = {name: keras.Input((None,), dtype="int64", name=name) for name in ("source", "begun")}
    embedded = layers.Embedding(VOCABULARY, 6, mask_zero=True)  # of both
    state = layers.GRU(6)(dropped(embedded(inputs["source"]), steady))
    x = layers.GRU(6, return_sequences=True)(embedded(inputs["begun"]), initial_state=state)
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    return finish(inputs, layers.Dense(VOCABULARY, "softmax")(x), optimizer)


def translations() -> tf.data.Dataset:
    def shift(words: Any, turned: Any) -> Any:
        begun = tf.pad(turned[:, :-1], [[0, 0], [1, 0]], constant_values=1)
        return {"source": words, "begun": begun * tf.cast(turned > 0, begun.dtype)}, turned

    return padded(answered(lambda words: words[::-1], [None])).map(shift)


def short(steady: bool) -> keras.Model:
    """Mean of the embedded words of a sentence of fixed length."""
    inputs = keras.Input((LONGEST,), dtype="int64")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(VOCABULARY, 6)(inputs))
    return finish(inputs, layers.Dense(2, "softmax")(x), keras.optimizers.Adagrad(0.1))


def equally_long() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    x = keras.utils.pad_sequences(sentences(), LONGEST)
    return x.astype("int64"), x[:, -1] % 2


class Pages(keras.utils.PyDataset):
    """Batches, of which the last is smaller."""

    def __len__(self) -> int:
        return -(-len(equally_long()[0]) // BATCH)

    def __getitem__(self, index: int) -> Any:
        return tuple(array[BATCH * index :][:BATCH] for array in equally_long())


def rows() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(equally_long())


def zipped() -> tf.data.Dataset:
    return tf.data.Dataset.zip(rows().map(lambda x, _: x), rows().map(lambda _, y: y)).batch(BATCH)


@dataclass(frozen=True)
class Program:
    """A model and its data."""

    model: Callable[[bool], keras.Model]
    data: Callable[[], Any]

    def make(self, steady: bool = False) -> keras.Model:
        """Returns the compiled model, with the same weights each time."""
        keras.utils.set_random_seed(1)
        return self.model(steady)


TUTORIALS = {
    "classification": Program(classification, lines),
    "bidirectional": Program(bidirectional, bucketed),
    "transformer": Program(transformer, lambda: padded(judged())),
    "tagging": Program(tagging, lambda: padded(answered(lambda words: words % 3, [None]))),
    "translation": Program(translation, translations),
}
_SHORT = Program(short, Pages)
#: Programs whose last batch is smaller, as their number of examples is unknown before.
LAST_BATCHES = {
    "pydataset": _SHORT,
    "zip": replace(_SHORT, data=lambda: tf.data.Dataset.zip(zipped(), zipped()).map(lambda pair, _: pair)),
    "take": replace(_SHORT, data=lambda: rows().batch(BATCH).repeat().take(6)),
    "concatenate": replace(
        _SHORT, data=lambda: rows().take(20).batch(BATCH).concatenate(rows().skip(20).batch(BATCH))
    ),
}
PROGRAMS = {**TUTORIALS, **LAST_BATCHES}


def of_dataset(dataset: DatasetInfo) -> keras.Model:
    """Texts of a column, as long in each replica's batch as the longest there."""
    inputs = {name: make_input(name, feature) for name, feature in dataset.inputs.items()}
    lookup = layers.TextVectorization()
    lookup.adapt(dataset.training_examples(["city"])["city"])
    x = layers.Embedding(lookup.vocabulary_size(), 4, mask_zero=True)(lookup(inputs["city"]))
    output, loss, metric = make_output(dataset, layers.GRU(4)(x))
    model = keras.Model(inputs, output)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=[metric])
    return model
