"""Interface of a compiled model: the form of labels that its loss and metrics take, and its heads."""

from __future__ import annotations

import contextlib
import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shardline.trainer.base.errors import ModelError
from shardline.trainer.data.decode import Prepare
from shardline.trainer.data.features import CLASS, LABEL, REGRESSION
from shardline.trainer.data.manifest import DatasetInfo
from shardline.trainer.data.transforms import DEFAULT_FORMS, LabelForm
from shardline.trainer.keras_compat.keras_compilation import (
    compiled_metrics,
    compiled_name,
    compute_loss,
    passed_metrics,
    refuse_lambda,
    saveable,
    short_message,
    wrapped_function,
)
from shardline.trainer.keras_compat.operations import check_operations
from shardline.trainer.models.head import (
    TRAIN_WITHOUT_EXPORT,
    Heads,
    compiled_by_label,
    losses_by_label,
    output_order,
    outputs_by_label,
    probe_inputs,
    read_heads,
)

# Names of losses and metrics that take either form, by the shape of the labels.
_ADAPTIVE = {"accuracy", "acc", "crossentropy", "ce"}


@dataclass(frozen=True)
class Interface:
    """Labels and outputs of a model.

    Attributes:
        forms: Forms of labels that differ from `DEFAULT_FORMS`, by name.
        descriptions: Each such form and the loss or metric that decides it, for the log.
        heads: Head of each label; None for a model that cannot be exported.
        order: Names of the labels in the order of a list of outputs; () for other structures.
    """

    forms: Mapping[str, LabelForm] = field(default_factory=dict)
    descriptions: tuple[str, ...] = ()
    heads: Heads | None = None
    order: tuple[str, ...] = ()


def unwrap_single_label(values: Mapping[str, str] | None) -> Any:
    """Returns the value of the only label, or of several labels all values by name, for settings.json."""
    return next(iter(values.values())) if values and [*values] == [LABEL] else values


def read_interface(
    model: keras.Model,
    dataset: DatasetInfo,
    *,
    transformed: bool = False,
    prepare: Prepare | None = None,
    exported: bool = True,
) -> Interface:
    """Returns the interface of a compiled model for the dataset that it is trained on.

    Targets that are `transformed` stay as they are; `prepare` transforms the dataset's inputs. Raises
    ModelError if a model to be exported cannot be, or losses and metrics take labels of different forms.
    """
    heads = None
    try:
        heads = read_heads(model, dataset, prepare=prepare)
    except ModelError:
        if exported:
            raise
    if transformed:
        return Interface(heads=heads)
    labels, order = list(dataset.labels.values()), tuple[str, ...]()
    shapes: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # the model's own code runs here and may raise anything
        outputs = model(probe_inputs(dataset), training=False)
        names = output_order(model, labels)
        shapes = {
            name: tuple(output.shape) for name, output in outputs_by_label(outputs, labels, names).items()
        }
        order = tuple(names) if isinstance(outputs, list | tuple) else ()
    losses = losses_by_label(model, labels)
    metrics = compiled_by_label(model, passed_metrics(model), labels, compiled_metrics(model))
    chosen: dict[str, tuple[LabelForm, str]] = {}
    for name, label in dataset.labels.items():
        chosen[name] = DEFAULT_FORMS[label.kind], ""
        shape, count = shapes.get(name, ()), len(label.outputs)
        if label.kind == CLASS:
            single = shape[1:] == (1,) or (heads is not None and heads[name] in ("probability", "logit"))
            chosen[name] = choose_form(losses[name], metrics[name], 1 if single else count, count)
        elif (label.kind, count, len(shape)) == (REGRESSION, 1, 2):
            chosen[name] = "column", ""
    forms = {
        name: form for name, (form, _) in chosen.items() if form != DEFAULT_FORMS[dataset.labels[name].kind]
    }
    descriptions = tuple(
        f"{f'{name} ' if name != LABEL else ''}{_FORM_NAMES[form]}, as {chosen[name][1]} takes them"
        for name, form in forms.items()
        if chosen[name][1]
    )
    return Interface(forms, descriptions, heads, order)


_FORM_NAMES = {"binary": "0 or 1", "one-hot": "one-hot", "column": "a column", "sparse": "sparse"}


def choose_form(losses: list[Any], metrics: list[Any], units: int, classes: int) -> tuple[LabelForm, str]:
    """Returns the form of labels that compiled losses and metrics take, and which of them decides it.

    Losses decide, then metrics of Keras. The default is class indices, also for a custom loss that can be
    computed from them. `units` are the model's outputs per example: with 1, labels are 0 or 1.
    """
    first = compiled_name(losses[0]) if losses else ""
    if units == 1 and classes > 1:
        if sparse := [compiled_name(loss) for loss in losses if _known_form(loss) == "sparse"]:
            raise ModelError(
                f"the model has one output and its loss {sparse[0]} needs one for each of {classes} classes; "
                f"end it with Dense({classes}), or compile it with binary_crossentropy"
            )
        return "binary", f"the loss {first}" if first else "a model with one output"
    forms: dict[LabelForm, str] = {}
    for loss in losses:
        if form := _known_form(loss) or _probed_form(loss, classes):
            forms.setdefault(form, f"the loss {compiled_name(loss)}")
    for metric in metrics:
        if form := _known_form(metric):
            forms.setdefault(form, f"the metric {compiled_name(metric)}")
    if len(forms) > 1:
        raise ModelError(
            f"{forms['sparse']} takes class numbers and {forms['one-hot']} one-hot labels, and Keras' own "
            "fit has one kind of labels too; compile the model with losses and metrics of one kind "
            "(sparse_categorical_crossentropy with SparseCategoricalAccuracy, categorical_crossentropy with "
            "AUC or F1Score)"
        )
    return next(iter(forms.items()), ("sparse", ""))


def _known_form(compiled: Any) -> LabelForm | None:
    """Returns the form that a loss or metric of Keras takes; None if either form, and for a custom one."""
    inner = wrapped_function(compiled)
    if isinstance(inner, str):
        known = ">" not in inner  # which the names of registered custom classes have
    else:
        kind = inner if callable(inner) and hasattr(inner, "__name__") else type(inner)
        known = str(getattr(kind, "__module__", "")).partition(".")[0] == "keras"
    name = compiled_name(compiled).replace("_", "").lower()
    if not known or name in _ADAPTIVE:
        return None
    # Metrics of intersection over union take either form, by an argument.
    sparse = getattr(inner, "sparse_y_true", name.startswith("sparse") or name == "circle")
    return "sparse" if sparse else "one-hot"


def _probed_form(loss: Any, classes: int) -> LabelForm | None:
    """Returns the first form from which a loss can be computed; None for an adaptive loss, or none."""
    if compiled_name(loss).lower() in _ADAPTIVE:
        return None
    # A few examples, but not as many as classes, or the two dimensions could be confused.
    indices = np.arange(classes + 2 if classes < 30 else 29) % classes
    outputs = np.full((len(indices), classes), 1 / classes, np.float32)
    forms: tuple[tuple[LabelForm, Any], ...] = (
        ("sparse", indices.astype(np.int64)),
        ("one-hot", (indices[:, None] == np.arange(classes)).astype(np.float32)),
    )
    for form, labels in forms:
        with contextlib.suppress(Exception):  # the user's code runs here and may raise anything
            compute_loss(loss, labels, outputs)
            return form
    return None


# Layers of Keras that hold code, or need something outside the file.
_LAMBDA = "__lambda__"  # left out by Keras if the lambda is an activation
_FOREIGN = ("Lambda", "TFSMLayer", "JaxLayer", "FlaxLayer", "TorchModuleWrapper")

_SAVEABLE = (
    "give each class of its own a get_config() that returns the arguments of its constructor, as numbers, "
    "text or objects of Keras"
)
_LOADABLE = (
    "classes and functions of its own need @keras.saving.register_keras_serializable(), and a get_config() "
    "that returns the arguments of their constructor"
)
_TRACEABLE = "its call() has to consist of operations of Keras or TensorFlow, for any number of examples"

# Largest rounding difference between a batch of two and a larger one.
_TOLERANCE = 1e-3


def check_export(
    model: keras.Model, dataset: DatasetInfo, *, prepare: Prepare | None = None, exported: bool = True
) -> None:
    """Saves a model, loads it in safe mode, and traces it, if it has code that is not Keras' own.

    Collective: every replica must call it at the same point, outside the strategy's scope. A model of Keras'
    own layers alone is skipped, as this takes seconds for a large model. One that is not to be exported is
    only saved. Raises ModelError if one of these fails, or the loaded model has other outputs than the model.
    """
    with warnings.catch_warnings(), saveable(model):
        warnings.simplefilter("ignore")  # anything serious is refused
        with _raising_model_error("cannot be saved", _SAVEABLE):
            config = keras.saving.serialize_keras_object(model)
            json.dumps(config)
        own = {name: value for name, value in config.items() if name != "compile_config"}
        if not model.built or not any(_is_foreign(part) for part in _parts(own)):
            return
        with tempfile.TemporaryDirectory(prefix="shardline-check-") as directory:
            path = Path(directory) / "model.keras"
            with _raising_model_error("cannot be saved", _SAVEABLE):
                model.save(path)
            if not exported:
                return
            with _raising_model_error(
                "cannot be loaded once it is saved", f"{_LOADABLE}; {TRAIN_WITHOUT_EXPORT}"
            ):
                loaded = keras.models.load_model(path, safe_mode=True, compile=False)
    inputs = probe_inputs(dataset, prepare)
    specs = tf.nest.map_structure(lambda part: tf.TensorSpec([None, *part.shape[1:]], part.dtype), inputs)
    predict = tf.function(lambda inputs: loaded(inputs, training=False), autograph=False)
    with _raising_model_error("cannot be traced for an export", f"{_TRACEABLE}; {TRAIN_WITHOUT_EXPORT}"):
        concrete = predict.get_concrete_function(specs)
    check_operations(concrete)
    _compare(model, loaded, inputs)


@contextlib.contextmanager
def _raising_model_error(problem: str, advice: str) -> Iterator[None]:
    """Converts any exception of the user's code, or of Keras, in the context to a ModelError."""
    try:
        yield
    except Exception as error:
        if "loaded" in problem:
            refuse_lambda(error, "the model", TRAIN_WITHOUT_EXPORT)
        raise ModelError(f"the model {problem}: {short_message(error)}; {advice}") from error


def _parts(config: Any) -> Iterator[dict[str, Any]]:
    nested = (
        config.values() if isinstance(config, dict) else config if isinstance(config, list | tuple) else ()
    )
    if isinstance(config, dict) and ("class_name" in config or config.keys() == {"value"}):
        yield config
    for value in nested:
        yield from _parts(value)


def _is_foreign(part: dict[str, Any]) -> bool:
    module, name = str(part.get("module") or "keras"), str(part.get("class_name", _LAMBDA))
    own = name in (*_FOREIGN, "function", _LAMBDA)
    return own or module.partition(".")[0] not in ("keras", "builtins")


def _compare(model: keras.Model, loaded: keras.Model, inputs: Any) -> None:
    """Refuses a model that loses weights when it is saved, unless its own outputs differ between calls."""

    def predict(model: keras.Model) -> list[Any]:
        return [np.asarray(part, np.float64) for part in tf.nest.flatten(model(inputs, training=False))]

    def agree(ours: list[Any], theirs: list[Any]) -> bool:
        pairs = zip(ours, theirs, strict=True)
        return all(np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True) for a, b in pairs)

    first = predict(model)
    if agree(first, predict(model)) and not agree(first, predict(loaded)):
        raise ModelError(
            "the model has other outputs after it is saved and loaded: some of its weights are not saved; "
            "make them attributes of layers, created in __init__ or build() from the arguments in "
            f"get_config(); {TRAIN_WITHOUT_EXPORT}"
        )
