"""Built-in models of a table: a multilayer perceptron of its columns, and a bag of words of a text column."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from shardline.trainer.base import progress
from shardline.trainer.base.errors import ModelError
from shardline.trainer.data.features import Feature
from shardline.trainer.data.manifest import DatasetInfo
from shardline.trainer.models.zoo import add_outputs

# Standard deviations at which normalized values are clipped.
_LARGEST = 10.0

_UNKNOWN = "[UNK]"

# Rows of a text value that has an embedding of its own, and buckets where no value has so many.
_RARE, _FEW = 5, 16

# Names that Keras gives to layers of built-in models, besides those of its operations.
_LAYERS = {
    "concatenate",
    "dense",
    "embedding",
    "hashing",
    "normalization",
    "rescaling",
    "string_lookup",
    "text_vectorization",
}


@keras.saving.register_keras_serializable("shardline")
class Column(keras.layers.InputLayer):  # type: ignore[misc]  # keras has no types
    """Input of a column whose name is invalid for a Keras layer, such as "od280/od315", or taken."""

    def __init__(
        self, column: str, dtype: str, name: str | None = None, shape: Sequence[int | None] = (), **_: Any
    ):
        tensor = keras.KerasTensor((None, *shape), dtype, name=column)
        super().__init__(input_tensor=tensor, name=name)
        self.column = column

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        shape = self.batch_shape[1:]
        return {"column": self.column, "dtype": self.dtype, "name": self.name, "shape": shape}


def make_input(name: str, column: Feature) -> keras.KerasTensor:
    """Returns the input of a column, (batch,) or (batch, n), under the column's own name."""
    taken = re.sub(r"_\d+$", "", name)
    if "/" in name or taken in _LAYERS or hasattr(keras.ops, taken):
        return Column(name, column.dtype, shape=column.shape).output
    return keras.Input(column.shape, name=name, dtype=column.dtype)


def build_model(
    dataset: DatasetInfo,
    learning_rate: float = 1e-3,
    label_smoothing: float = 0.0,
    units: int = 64,
    buckets: int = 1024,
    embedding: int = 8,
) -> keras.Model:
    """Numbers normalized, text looked up or hashed and embedded -> Dense relu, twice -> what labels need.

    A missing number counts as the mean of its column; if the training split has some, an indicator of 0 and 1
    is added. A missing text is a value like any other.

    Args:
        dataset: Columns and labels. Whole numbers and floats are numbers, text is a category.
        learning_rate: Learning rate of Adam.
        label_smoothing: Share of each label of classes that is spread evenly over all of them, in 0..1.
        units: Size of each hidden layer.
        buckets: Largest number of values of a text column that are looked up; with more they are hashed.
        embedding: Size of the embedding of a text value.
    """
    if not dataset.is_table:
        raise ModelError(
            "mlp takes a table, and the dataset has images; use mnist_cnn, resnet50 or keras:NAME"
        )
    inputs, parts = encode_columns(dataset, buckets=buckets, embedding=embedding)
    features = keras.layers.Concatenate()(parts) if len(parts) > 1 else parts[0]
    for _ in range(2):
        features = keras.layers.Dense(units, activation="relu")(features)
    return add_outputs("mlp", inputs, features, dataset, learning_rate, label_smoothing)


def encode_columns(
    dataset: DatasetInfo, skipped: Sequence[str] = (), buckets: int = 1024, embedding: int = 8
) -> tuple[dict[str, keras.KerasTensor], list[keras.KerasTensor]]:
    """Returns the inputs of a model of a table by name, and an encoding of all but some, (batch, units) each.

    Numbers are normalized, with indicators of missing ones; texts are looked up or hashed, and embedded, rare
    ones as one.
    """
    inputs = {name: make_input(name, column) for name, column in dataset.inputs.items()}
    names = [name for name in inputs if name not in skipped]
    examples = dataset.training_examples(names) if names else {}
    texts = [name for name in names if inputs[name].dtype == "string"]
    parts = [_embed(inputs[name], examples[name], buckets, embedding) for name in texts]
    if numbers := {name: inputs[name] for name in names if name not in texts}:
        parts.append(_normalize(numbers, examples))
    return inputs, parts


def _embed(column: keras.KerasTensor, examples: npt.NDArray[Any], buckets: int, embedding: int) -> Any:
    """Embeds a text column, (batch, embedding), or a vector of n texts, (batch, n * embedding).

    Rare values share one embedding, with those that the training split does not have: one of its own would
    learn the few rows by heart.
    """
    counts = Counter(examples.ravel().tolist())
    least = min(_RARE, 1 + counts.total() // 100)
    values = sorted(value for value in counts if counts[value] >= least and value != _UNKNOWN.encode())
    try:
        names = [value.decode() for value in values]
    except UnicodeDecodeError:  # stored by another program
        names = []
    if 0 < len(names) < buckets:
        lookup: Any = keras.layers.StringLookup(vocabulary=names, oov_token=_UNKNOWN)
        embedding = min(embedding, len(names) + 1)
    else:
        lookup = keras.layers.Hashing(buckets if values else _FEW)
        buckets = lookup.num_bins
    embedded = keras.layers.Embedding(buckets, embedding)(lookup(column))
    return keras.layers.Flatten()(embedded) if len(column.shape) > 1 else embedded


def _normalize(columns: Mapping[str, keras.KerasTensor], examples: Mapping[str, npt.NDArray[Any]]) -> Any:
    """Concatenates numbers, normalized to mean 0 and deviation 1, and indicators of missing ones."""
    numbers = {name: keras.ops.cast(column, "float32") for name, column in columns.items()}
    stacked = keras.ops.concatenate(
        [item if len(item.shape) > 1 else keras.ops.expand_dims(item, -1) for item in numbers.values()],
        axis=-1,
    )
    # In 64 bits: in 32 the squares of a column such as a year are too coarse for its deviation.
    rows = [examples[name].astype(np.float64) for name in columns]
    known = np.concatenate([column.reshape(len(column), -1) for column in rows], axis=-1)
    absent = ~np.isfinite(known)
    known[absent] = np.nan
    means = [np.nanmean(column) if np.isfinite(column).any() else 0.0 for column in known.T]
    layer = keras.layers.Normalization(dtype="float32")
    layer.adapt(np.where(absent, means, known))
    normalized = keras.ops.clip(layer(stacked), -_LARGEST, _LARGEST)
    missing = keras.ops.isnan(normalized)
    filled = keras.ops.where(missing, 0.0, normalized)
    gaps = np.flatnonzero(absent.any(axis=0)).tolist()
    if not gaps:
        return filled
    indicators = keras.ops.cast(keras.ops.take(missing, gaps, axis=-1), "float32")
    return keras.ops.concatenate([filled, indicators], axis=-1)


def build_text(
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

    The vocabulary is that of the training split, and is saved and exported with the model. Text is
    lower-cased, stripped of punctuation, and split at white space.

    Args:
        dataset: Columns and labels. Other columns than the text are left out.
        learning_rate: Learning rate of Adam.
        label_smoothing: Share of each label of classes that is spread evenly over all of them, in 0..1.
        column: Name of the column; "" if there is only one of text.
        vocabulary: Largest number of words, the most frequent ones; all others count as one.
        length: Words of a text that are used; further ones are left out.
        ngrams: Largest number of words in a row that are looked up as one.
        embedding: Size of the embedding of a word.
        units: Size of the hidden layer.
        dropout: Dropout rate of the hidden layer, in 0..1.
    """
    if not dataset.is_table:
        raise ModelError(
            "text takes a column of text, and the dataset has images; use mnist_cnn, resnet50 or keras:NAME"
        )
    texts = [name for name, item in dataset.inputs.items() if (item.dtype, item.shape) == ("string", ())]
    column = column or ("" if len(texts) != 1 else texts[0])
    if column not in texts:
        known = "no column has text: use mlp"
        if texts:
            known = f"{', '.join(texts)} have text: name one with hparam column"
        raise ModelError(f"text takes one column of text, and there is no text in column {column!r}; {known}")
    if others := [name for name in dataset.inputs if name != column]:
        progress.report("train", f"model text reads column {column!r} alone, not {', '.join(others)}")
    inputs = {name: make_input(name, feature) for name, feature in dataset.inputs.items()}
    words = keras.layers.TextVectorization(
        max_tokens=vocabulary,
        ngrams=ngrams if ngrams > 1 else None,
        output_sequence_length=length,
    )
    words.adapt(dataset.training_examples([column])[column])
    tokens = words(inputs[column])
    vectors = keras.layers.Embedding(vocabulary, embedding)(tokens)
    # 0 is padding. A text without words has the mean 0, but NaN with a masked pooling layer.
    mask = keras.ops.expand_dims(keras.ops.cast(keras.ops.not_equal(tokens, 0), vectors.dtype), -1)
    count = keras.ops.maximum(keras.ops.sum(mask, axis=1), 1)
    features = keras.ops.sum(vectors * mask, axis=1) / count
    features = keras.layers.Dense(units, activation="relu")(features)
    if dropout:
        features = keras.layers.Dropout(dropout)(features)
    return add_outputs("text", inputs, features, dataset, learning_rate, label_smoothing)
