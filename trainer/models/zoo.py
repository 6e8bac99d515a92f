"""Built-in models of images, and the outputs and losses of all built-in models.

mnist_cnn is the network of TensorFlow's multi-worker training tutorial, resnet50 the transfer learning of
the Vertex AI codelab, keras:NAME any model of keras.applications. Their common arguments: `learning_rate` of
Adam; `label_smoothing`, the share of each label of classes, in 0..1, that is spread evenly over all of them;
`weights`, "imagenet" (Keras downloads them), the path of a weights file, or "none". Loaded weights are frozen
and only the head is trained; with "none" everything is trained. Grey images are repeated over three channels.
Images that are too small, and weights that cannot be loaded, are a ModelError.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras

from shardline.trainer.base import files
from shardline.trainer.base.errors import ModelError
from shardline.trainer.base.plugins import KERAS_PREFIX
from shardline.trainer.data.features import LABEL, MULTILABEL, REGRESSION, Label
from shardline.trainer.data.manifest import DatasetInfo
from shardline.trainer.keras_compat.keras_internals import short_message


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

    def similarity(other: str) -> float:
        return difflib.SequenceMatcher(None, other.lower(), name.lower()).ratio()

    near = sorted(known, key=similarity, reverse=True)
    raise ModelError(
        f"unknown model {KERAS_PREFIX + name!r}; keras.applications has {', '.join(near[:8])}, ..."
    )


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

    try:
        base = create(weights=None)
    except ValueError as error:
        reason = short_message(error)
        raise ModelError(
            f"{name} does not take images of {shape[:2]} pixels: {reason}; preprocess with image_size"
        ) from error
    if weights == "none":
        return base
    path = files.local_path(weights)
    if weights != "imagenet" and not path.is_file():
        raise ModelError(f"{name}: no weights file {weights!r}; set imagenet, a path, or none")
    try:
        if weights == "imagenet":
            base = create(weights=weights)
        else:
            base.load_weights(path)
    except Exception as error:  # of Keras' downloader or its file formats
        raise ModelError(
            f"{name}: cannot load weights {weights!r}: {short_message(error)}; imagenet needs network "
            f"access, else set the path of a .weights.h5 file of {application.__name__} without its top"
        ) from error
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
