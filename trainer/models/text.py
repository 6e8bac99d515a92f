"""Model of a text: words looked up in a vocabulary of the training split, embedded, and averaged."""

from __future__ import annotations

import keras

from shardline.trainer import progress
from shardline.trainer.data.manifest import DatasetInfo
from shardline.trainer.errors import ModelError
from shardline.trainer.models.mlp import make_input
from shardline.trainer.models.zoo import finish


def build_model(
    dataset: DatasetInfo,
    learning_rate: float = 1e-3,
    label_smoothing: float = 0.0,
    column: str = "",
    vocabulary: int = 20_000,
    length: int = 256,
    ngrams: int = 1,
    embedding: int = 64,
    units: int = 64,
    dropout: float = 0.2,
) -> keras.Model:
    """Words of one column looked up and embedded -> their mean -> Dense relu -> what labels need.

    The vocabulary is of the training split and is saved and exported with the model. Text is put in lower
    case, without punctuation, and divided at white space.

    Args:
        dataset: Columns and labels. Other columns than the text are left out.
        learning_rate: Learning rate of Adam.
        label_smoothing: Share of each label of classes that is spread evenly over all of them, in 0..1.
        column: Name of the column; "" where there is only one of text.
        vocabulary: Number of words, at most, the most frequent ones; all others count as one.
        length: Number of words of a text, at most; further ones are left out.
        ngrams: Up to how many words in a row are looked up together as well.
        embedding: Numbers that stand for a word.
        units: Size of the hidden layer.
        dropout: Share of the hidden layer that is left out at random in training, in 0..1.
    """
    column = column or _only_text(dataset)
    if dataset.is_table and column not in _names(dataset):
        raise ModelError(f"text: the dataset has no text in column {column!r}; {_texts(dataset)}")
    if others := [name for name in dataset.inputs if name != column]:
        progress.say("train", f"model text reads column {column!r} alone, not {', '.join(others)}")
    inputs = {name: make_input(name, feature) for name, feature in dataset.inputs.items()}
    words = keras.layers.TextVectorization(
        max_tokens=vocabulary,
        ngrams=ngrams if ngrams > 1 else None,
        output_sequence_length=length,
    )
    words.adapt(dataset.training_examples([column])[column])
    tokens = words(inputs[column])
    vectors = keras.layers.Embedding(vocabulary, embedding)(tokens)
    # 0 is no word. A text without any has the mean 0, where a pooling layer with a mask gives NaN.
    there = keras.ops.expand_dims(keras.ops.cast(keras.ops.not_equal(tokens, 0), vectors.dtype), -1)
    count = keras.ops.maximum(keras.ops.sum(there, axis=1), 1)
    features = keras.ops.sum(vectors * there, axis=1) / count
    features = keras.layers.Dense(units, activation="relu")(features)
    if dropout:
        features = keras.layers.Dropout(dropout)(features)
    return finish("text", inputs, features, dataset, learning_rate, label_smoothing)


def _only_text(dataset: DatasetInfo) -> str:
    if not dataset.is_table:
        raise ModelError(
            "text takes a column of text, and the dataset has images; use mnist_cnn, resnet50 or keras:NAME"
        )
    names = _names(dataset)
    if len(names) != 1:
        raise ModelError(f"text takes one column of text; {_texts(dataset)}")
    return names[0]


def _names(dataset: DatasetInfo) -> list[str]:
    """Returns the columns of one text each."""
    return [name for name, column in dataset.inputs.items() if (column.dtype, column.shape) == ("string", ())]


def _texts(dataset: DatasetInfo) -> str:
    """Returns which columns have text, and what to do."""
    names = _names(dataset)
    if not names:
        return "no column has text: use mlp"
    return f"{', '.join(names)} have text: name one with hparam column"
