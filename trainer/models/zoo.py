"""Built-in models of images and tables, with their outputs and losses.

mnist_cnn is the network of TensorFlow's multi-worker training tutorial, resnet50 the transfer learning of
the Vertex AI codelab, keras:NAME any model of keras.applications. Their common arguments: `learning_rate` of
Adam; `label_smoothing`, the share of each label of classes, in 0..1, that is spread evenly over all of them;
`weights`, "imagenet" (Keras downloads them), the path of a weights file, or "none". Loaded weights are frozen
and only the head is trained; with "none" everything is trained. Grey images are repeated over three channels.
Images that are too small, and weights that cannot be loaded, are a ModelError. Models of a table are a
multilayer perceptron of its columns, mlp, and a bag of words of a text column, text.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from shardline.trainer.base import files, plugins, progress
from shardline.trainer.base.deserialize import nearest
from shardline.trainer.base.errors import ModelError
from shardline.trainer.base.plugins import KERAS_PREFIX
from shardline.trainer.keras_compat.keras_internals import short_message
from shardline.trainer.manifest import LABEL, MULTILABEL, REGRESSION, DatasetInfo, Feature, Label

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
class SmoothedCrossentropy(keras.losses.Loss):  # type: ignore[misc]  # keras has no types
    """Crossentropy of class indices with label smoothing, which Keras has for one-hot labels only."""

    def __init__(self, label_smoothing: float, name: str = "smoothed_crossentropy", **kwargs: Any):
        super().__init__(name=name, **kwargs)
        self.label_smoothing = label_smoothing

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the loss of each example: y_true (batch,), y_pred probabilities (batch, classes)."""
        labels = keras.ops.one_hot(keras.ops.cast(y_true, "int32"), y_pred.shape[-1], dtype=y_pred.dtype)
        return keras.losses.categorical_crossentropy(labels, y_pred, label_smoothing=self.label_smoothing)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {**super().get_config(), "label_smoothing": self.label_smoothing}


@keras.saving.register_keras_serializable("shardline")
class StandardizedError(keras.losses.Loss):  # type: ignore[misc]  # keras has no types
    """Mean squared error in standard deviations: numbers of different units count alike.

    It is the unexplained share of a number's variance.
    """

    def __init__(self, deviations: Sequence[float], name: str = "standardized_error", **kwargs: Any):
        super().__init__(name=name, **kwargs)
        self.deviations = list(deviations)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the loss of each example: y_pred (batch, numbers), y_true alike, or (batch,)."""
        deviations = keras.ops.cast(self.deviations, y_pred.dtype)
        y_true = keras.ops.reshape(keras.ops.cast(y_true, y_pred.dtype), keras.ops.shape(y_pred))
        error = (y_true - y_pred) / deviations
        return keras.ops.mean(keras.ops.square(error), axis=-1)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {**super().get_config(), "deviations": self.deviations}


def check_images(name: str, dataset: DatasetInfo, smallest: int = 1) -> None:
    """Refuses a table, and images with a side of fewer than `smallest` pixels."""
    if dataset.is_table:
        raise ModelError(f"{name} takes images, and the dataset is a table; use mlp or a model of your own")
    if min(dataset.input_shape[:2]) < smallest:
        raise ModelError(
            f"{name} needs images of at least {smallest} pixels a side, got {dataset.input_shape}; "
            "preprocess with image_size"
        )


def add_outputs(
    name: str,
    inputs: keras.KerasTensor | list[keras.KerasTensor] | dict[str, keras.KerasTensor],
    features: keras.KerasTensor,
    dataset: DatasetInfo,
    learning_rate: float,
    label_smoothing: float,
) -> keras.Model:
    """Adds an output for each label to a model, and compiles it with Adam and losses for their kinds.

    They are as from `make_output`.
    """
    if not 0 <= label_smoothing < 1:
        raise ModelError(f"label_smoothing must be at least 0 and below 1, not {label_smoothing!r}")
    outputs, losses, metrics = {}, {}, {}
    for label in dataset.labels.values():
        output, loss, metric = _add_output(label, features, dataset, label_smoothing)
        outputs[label.name], losses[label.name], metrics[label.name] = output, loss, metric
    single = len(outputs) == 1
    model = keras.Model(inputs, outputs[LABEL] if single else outputs, name=name)
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss=losses[LABEL] if single else losses,
        metrics=[metrics[LABEL]] if single else metrics,
    )
    return model


def make_output(dataset: DatasetInfo, features: keras.KerasTensor) -> tuple[keras.KerasTensor, Any, str]:
    """Returns the output, the loss and the metric that suit the only label of a dataset.

    A class has a softmax, a multilabel a sigmoid for each output, and a number a linear layer in standard
    deviations around the mean of the training split: any unit is learned alike.
    """
    return _add_output(dataset.label, features, dataset, 0.0)


def _add_output(
    label: Label, features: keras.KerasTensor, dataset: DatasetInfo, label_smoothing: float
) -> tuple[keras.KerasTensor, Any, str]:
    """Returns a label's output, in float32 as the loss takes logarithms, its loss and its metric."""
    if label.kind == REGRESSION:
        spreads = dataset.train[label.name].spreads
        means = [spread.mean for spread in spreads]
        deviations = [spread.deviation or 1.0 for spread in spreads]
        plain = keras.layers.Dense(len(label.outputs), dtype="float32")(features)
        scaled = keras.layers.Rescaling(deviations, means, dtype="float32")(plain)
        return scaled, StandardizedError(deviations), "mean_absolute_error"
    dense = functools.partial(keras.layers.Dense, len(label.outputs), dtype="float32")
    if label.kind == MULTILABEL:
        loss: Any = keras.losses.BinaryCrossentropy(label_smoothing=label_smoothing)
        return dense(activation="sigmoid")(features), loss, "binary_accuracy"
    loss = SmoothedCrossentropy(label_smoothing) if label_smoothing else "sparse_categorical_crossentropy"
    return dense(activation="softmax")(features), loss, "accuracy"


Application = Callable[..., keras.Model]

# Smallest side in pixels: that keras.applications.ResNet50 accepts without its top, and that leaves a pixel
# after a 3x3 convolution and 2x2 pooling.
_SMALLEST_RESNET, _SMALLEST_DIGIT = 32, 4


def find_application(name: str) -> Application:
    """Returns a function of keras.applications by its name; a ModelError names similar ones."""
    known: dict[str, Application] = dict(inspect.getmembers(keras.applications, inspect.isfunction))
    if name in known:
        return known[name]
    near = nearest(name, known)
    raise ModelError(f"unknown model {KERAS_PREFIX + name!r}; keras.applications has {near}, ...")


def build_application(
    application: Application,
    dataset: DatasetInfo,
    learning_rate: float = 1e-4,
    weights: str = "none",
    label_smoothing: float = 0.0,
) -> keras.Model:
    """Preprocessing -> the application without its top -> global average pooling -> softmax."""
    name = application.__name__
    images, features = extract_features(KERAS_PREFIX + name, application, dataset, weights)
    return add_outputs(name.lower(), images, features, dataset, learning_rate, label_smoothing)


def extract_features(
    name: str, application: Application, dataset: DatasetInfo, weights: str
) -> tuple[keras.KerasTensor, keras.KerasTensor]:
    """Returns the input, uint8 (batch, height, width, channels), and the pooled features (batch, units)."""
    check_images(name, dataset)
    images = keras.Input(dataset.input_shape, dtype="uint8")
    # Always in float32: bfloat16 cannot distinguish neighbouring pixel values after their mean is subtracted.
    pixels = keras.layers.Rescaling(1.0, dtype="float32")(images)
    if dataset.input_shape[-1] == 1:
        pixels = keras.layers.Concatenate(dtype="float32")([pixels, pixels, pixels])
    # Each family's module has the preprocessing of its weights. On a symbolic tensor it becomes layers, which
    # are saved with the model.
    pixels = inspect.getmodule(application).preprocess_input(pixels)  # type: ignore[union-attr]
    base = _load_base(name, application, (*dataset.input_shape[:2], 3), weights)
    return images, base(pixels)


def _load_base(name: str, application: Application, shape: tuple[int, ...], weights: str) -> keras.Model:
    def create(**options: Any) -> keras.Model:
        return application(include_top=False, pooling="avg", input_shape=shape, **options)

    what, advice = f"{name} does not take images of {shape[:2]} pixels", "preprocess with image_size"
    with plugins.calling(what, ModelError, advice, short_message):
        base = create(weights=None)
    if weights == "none":
        return base
    path = files.local_path(weights)
    if weights != "imagenet" and not path.is_file():
        raise ModelError(f"{name}: no weights file {weights!r}; set imagenet, a path, or none")
    file = f"the path of a .weights.h5 file of {application.__name__} without its top"
    advice = f"imagenet needs network access, else set {file}"
    with plugins.calling(f"{name}: cannot load weights {weights!r}", ModelError, advice, short_message):
        if weights == "imagenet":
            base = create(weights=weights)
        else:
            base.load_weights(path)
    base.trainable = False
    return base


def build_resnet50(
    dataset: DatasetInfo, learning_rate: float = 1e-4, weights: str = "none", label_smoothing: float = 0.0
) -> keras.Model:
    """ResNet50 without its top -> global average pooling -> Dense 1016 relu -> softmax."""
    check_images("resnet50", dataset, _SMALLEST_RESNET)
    images, features = extract_features("resnet50", keras.applications.ResNet50, dataset, weights)
    features = keras.layers.Dense(1016, activation="relu")(features)
    return add_outputs("resnet50_transfer", images, features, dataset, learning_rate, label_smoothing)


def build_mnist_cnn(
    dataset: DatasetInfo, learning_rate: float = 2e-3, label_smoothing: float = 0.0
) -> keras.Model:
    """Conv2D 32 -> pooling -> flatten -> Dense 64 -> Dense classes."""
    check_images("mnist_cnn", dataset, _SMALLEST_DIGIT)
    images = keras.Input(dataset.input_shape, dtype="uint8")
    features = keras.layers.Rescaling(1 / 255)(images)
    features = keras.layers.Conv2D(32, 3, activation="relu")(features)
    features = keras.layers.Flatten()(keras.layers.MaxPooling2D()(features))
    features = keras.layers.Dense(64, activation="relu")(features)
    return add_outputs("mnist_cnn", images, features, dataset, learning_rate, label_smoothing)


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


def build_mlp(
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
