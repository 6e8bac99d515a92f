"""Built-in models of images, and the outputs with which all built-in models end.

mnist_cnn is the network of TensorFlow's multi-worker training tutorial, resnet50 the transfer learning of
the Vertex AI codelab, keras:NAME any model of keras.applications. Their common arguments: `learning_rate` of
Adam; `label_smoothing`, the share of each label of classes, in 0..1, that is spread evenly over all of them;
`weights`, "imagenet" (Keras downloads them), the path of a weights file, or "none". Loaded weights are frozen
and only the head is trained; with "none" everything is trained. Grey images are repeated over three channels.
Images that are too small, and weights that cannot be had, are a ModelError.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras

from shardline.trainer import files
from shardline.trainer.data.features import CLASS, LABEL, MULTILABEL, REGRESSION, Label
from shardline.trainer.data.manifest import DatasetInfo
from shardline.trainer.errors import ModelError
from shardline.trainer.models import KERAS_PREFIX
from shardline.trainer.models.quantiles import QuantileLoss


@keras.saving.register_keras_serializable("shardline")
class SmoothedCrossentropy(keras.losses.Loss):  # type: ignore[misc]  # keras has no types
    """Crossentropy of whole-number labels, smoothed; Keras smooths one-hot labels alone."""

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
    """Mean squared error in standard deviations, so that numbers of different units count alike.

    It is the share of a number's variance that a model does not explain.
    """

    def __init__(self, deviations: Sequence[float], name: str = "standardized_error", **kwargs: Any):
        super().__init__(name=name, **kwargs)
        self.deviations = list(deviations)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the loss of each example: y_true and y_pred (batch, numbers)."""
        error = (keras.ops.cast(y_true, y_pred.dtype) - y_pred) / keras.ops.cast(
            self.deviations, y_pred.dtype
        )
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


def finish(
    name: str,
    inputs: keras.KerasTensor | list[keras.KerasTensor] | dict[str, keras.KerasTensor],
    features: keras.KerasTensor,
    dataset: DatasetInfo,
    learning_rate: float,
    label_smoothing: float,
    quantiles: Sequence[float] = (),
) -> keras.Model:
    """Ends a model with an output for each label, and compiles it with Adam and what fits their kinds.

    A class is a softmax, each of several labels a sigmoid, and a number what a linear layer gives in standard
    deviations around the mean of the training split, so that any unit is learned alike. With `quantiles`, the
    only label is one number, and the model gives these of it.
    """
    if quantiles:
        return _finish_quantiles(name, inputs, features, dataset, learning_rate, quantiles)
    outputs = {key: _output(label, features, dataset) for key, label in dataset.labels.items()}
    losses = {key: _loss(label, dataset, label_smoothing) for key, label in dataset.labels.items()}
    metrics = {key: _METRICS[label.kind] for key, label in dataset.labels.items()}
    single = len(outputs) == 1
    model = keras.Model(inputs, outputs[LABEL] if single else outputs, name=name)
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss=losses[LABEL] if single else losses,
        metrics=[metrics[LABEL]] if single else metrics,
    )
    return model


def _finish_quantiles(
    name: str,
    inputs: Any,
    features: keras.KerasTensor,
    dataset: DatasetInfo,
    learning_rate: float,
    quantiles: Sequence[float],
) -> keras.Model:
    kinds = [(label.kind, len(label.outputs)) for label in dataset.labels.values()]
    if kinds != [(REGRESSION, 1)]:
        found = "; ".join(f"{label.kind}:{','.join(label.outputs[:5])}" for label in dataset.labels.values())
        raise ModelError(
            f"{name}: quantiles are those of one number, and the dataset has {found}; leave quantiles out"
        )
    loss = QuantileLoss(quantiles)
    (label,) = dataset.labels.values()
    output = _number(label, len(loss.quantiles), features, dataset)
    model = keras.Model(inputs, output, name=name)
    # None of Keras' metrics is of quantiles.
    model.compile(optimizer=keras.optimizers.Adam(learning_rate), loss=loss)
    return model


_METRICS = {CLASS: "accuracy", MULTILABEL: "binary_accuracy", REGRESSION: "mean_absolute_error"}


def _output(label: Label, features: keras.KerasTensor, dataset: DatasetInfo) -> keras.KerasTensor:
    # In float32 whatever the precision of the rest: the loss takes the logarithm of small probabilities.
    if label.kind == REGRESSION:
        return _number(label, len(label.outputs), features, dataset)
    activation = {CLASS: "softmax", MULTILABEL: "sigmoid"}[label.kind]
    return keras.layers.Dense(len(label.outputs), activation=activation, dtype="float32")(features)


def _number(label: Label, units: int, features: keras.KerasTensor, dataset: DatasetInfo) -> keras.KerasTensor:
    output = keras.layers.Dense(units, dtype="float32")(features)
    means = [spread.mean for spread in dataset.train[label.name].spreads]
    return keras.layers.Rescaling(_deviations(label, dataset), means, dtype="float32")(output)


def _loss(label: Label, dataset: DatasetInfo, label_smoothing: float) -> Any:
    if label.kind == REGRESSION:
        return StandardizedError(_deviations(label, dataset))
    if label.kind == MULTILABEL:
        return keras.losses.BinaryCrossentropy(label_smoothing=label_smoothing)
    return SmoothedCrossentropy(label_smoothing) if label_smoothing else "sparse_categorical_crossentropy"


def _deviations(label: Label, dataset: DatasetInfo) -> list[float]:
    """Returns the standard deviation of each number in the training split; 1 for a constant."""
    return [spread.deviation or 1.0 for spread in dataset.train[label.name].spreads]


Application = Callable[..., keras.Model]

_SHOWN_NAMES = 8
# Pixels a side: what keras.applications.ResNet50 accepts without its top, and what a 3x3 convolution followed
# by 2x2 pooling needs to leave one.
_SMALLEST_RESNET, _SMALLEST_DIGIT = 32, 4


def find_application(name: str) -> Application:
    """Returns a function of keras.applications by its name; a ModelError names those that are like it."""
    there: dict[str, Application] = dict(inspect.getmembers(keras.applications, inspect.isfunction))
    if name in there:
        return there[name]
    by_lower_case = {key.lower(): key for key in there}
    like = difflib.get_close_matches(name.lower(), by_lower_case, n=_SHOWN_NAMES, cutoff=0.0)
    raise ModelError(
        f"unknown model {KERAS_PREFIX + name!r}; keras.applications has "
        f"{', '.join(by_lower_case[key] for key in like)}, ..."
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
    return finish(name.lower(), images, features, dataset, learning_rate, label_smoothing)


def extract_features(
    name: str, application: Application, dataset: DatasetInfo, weights: str
) -> tuple[keras.KerasTensor, keras.KerasTensor]:
    """Returns the input, uint8 (batch, height, width, channels), and the pooled features (batch, units)."""
    check_images(name, dataset)
    images = keras.Input(dataset.input_shape, dtype="uint8")
    # In float32 whatever the precision of the rest: bfloat16 cannot tell neighbouring pixel values apart
    # once their mean is taken from them.
    pixels = keras.layers.Rescaling(1.0, dtype="float32")(images)
    if dataset.input_shape[-1] == 1:
        pixels = keras.layers.Concatenate(dtype="float32")([pixels, pixels, pixels])
    # Each family's module has the function that its weights were trained with. Given a symbolic tensor it
    # becomes layers, which are saved with the model.
    pixels = inspect.getmodule(application).preprocess_input(pixels)  # type: ignore[union-attr]
    base = _base(name, application, (*dataset.input_shape[:2], 3), weights)
    return images, base(pixels)


def _base(name: str, application: Application, shape: tuple[int, ...], weights: str) -> keras.Model:
    def create(**options: Any) -> keras.Model:
        return application(include_top=False, pooling="avg", input_shape=shape, **options)

    try:
        base = create(weights=None)
    except ValueError as error:
        reason = _one_line(error)
        raise ModelError(
            f"{name} does not take images of {shape[:2]} pixels: {reason}; preprocess with image_size"
        ) from error
    if weights == "none":
        return base
    path = files.local_path(weights)
    if weights != "imagenet" and not path.is_file():
        raise ModelError(f"{name}: no weights file {weights!r}; give imagenet, a path, or none")
    try:
        if weights == "imagenet":
            base = create(weights=weights)
        else:
            base.load_weights(path)
    except Exception as error:  # Keras raises what its downloader and its file formats raise
        raise ModelError(
            f"{name}: cannot load weights {weights!r}: {_one_line(error)}; imagenet needs network access, "
            f"else give the path of a .weights.h5 file of {application.__name__} without its top"
        ) from error
    base.trainable = False
    return base


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def build_resnet50(
    dataset: DatasetInfo, learning_rate: float = 1e-4, weights: str = "none", label_smoothing: float = 0.0
) -> keras.Model:
    """ResNet50 without its top -> global average pooling -> Dense 1016 relu -> softmax."""
    check_images("resnet50", dataset, _SMALLEST_RESNET)
    images, features = extract_features("resnet50", keras.applications.ResNet50, dataset, weights)
    features = keras.layers.Dense(1016, activation="relu")(features)
    return finish("resnet50_transfer", images, features, dataset, learning_rate, label_smoothing)


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
    return finish("mnist_cnn", images, features, dataset, learning_rate, label_smoothing)
