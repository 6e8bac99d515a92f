"""Interface of a compiled model: its heads, the form of labels that it takes, and whether it can be exported.

A head is what an output is: probabilities, logits or numbers.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shardline.trainer.base import plugins
from shardline.trainer.base.errors import ModelError
from shardline.trainer.data.examples import Inputs, Prepare, make_probe_rows
from shardline.trainer.data.transforms import DEFAULT_FORMS, LabelForm
from shardline.trainer.keras_compat.keras_internals import (
    attached_logits,
    compiled_losses,
    compiled_metrics,
    compiled_name,
    compute_loss,
    passed_metrics,
    refuse_lambda,
    saveable,
    short_message,
    wrapped_function,
)
from shardline.trainer.keras_compat.tensorflow_internals import check_operations
from shardline.trainer.manifest import CLASS, LABEL, MULTILABEL, REGRESSION, DatasetInfo, Label

#: Advice about a model that cannot be exported.
TRAIN_WITHOUT_EXPORT = "to train it without an export, set allow_unexportable"

#: Meaning of an output. Class: "probabilities" or "logits" by class; for two classes also one number, the
#: "probability" of the second class, or its "logit". Multilabel: "probabilities" or "logits" by output.
#: Regression: "numbers".
Head = str
HEADS = ("probabilities", "logits", "probability", "logit", "numbers")

#: The head of each label, by its name.
Heads = Mapping[str, Head]

# Rounding of a softmax in float16.
_ROUNDING = 1e-2

# Names of losses and metrics that take either form, by the shape of the labels.
_ADAPTIVE = {"accuracy", "acc", "crossentropy", "ce"}


def probe_inputs(dataset: DatasetInfo, prepare: Prepare | None = None) -> Any:
    """Returns two examples, after `prepare`: a black and a white image, or rows of 0, "" and 1, "1"."""
    rows: Inputs
    if dataset.is_table:
        rows = make_probe_rows(dataset.inputs, ("", "1"), (0, 1))
    else:
        black_and_white = np.array([0, 255], np.uint8).reshape(2, 1, 1, 1)
        rows = tf.constant(np.broadcast_to(black_and_white, (2, *dataset.input_shape)))
    return prepare(rows) if prepare else rows


def read_heads(
    model: keras.Model, dataset: DatasetInfo, known: Heads | None = None, *, prepare: Prepare | None = None
) -> Heads:
    """Checks that a model fits a dataset, and determines its heads that are not `known`.

    Outputs for classes are logits, and the export adds the softmax (or sigmoid), if a compiled loss has
    `from_logits=True` and the outputs are not probabilities already (Keras finds the logits of a softmax
    layer). Else they must be probabilities on two synthetic examples, or not finite, which the evaluation
    counts; anything else is a ModelError. `prepare` transforms the dataset's inputs.
    """
    if prepare is None:
        _check_inputs(model, dataset)
    labels = dataset.labels
    outputs = outputs_by_label(model, _probe(model, dataset, prepare), list(labels.values()))
    for name, label in labels.items():
        _check_shape(outputs[name], label)
    if known and known.keys() == labels.keys():
        return dict(known)
    losses = by_label(model, getattr(model, "loss", None), labels.values(), compiled_losses(model))
    return {name: _read_head(outputs[name], label, losses[name], dataset) for name, label in labels.items()}


def _probe(model: keras.Model, dataset: DatasetInfo, prepare: Prepare | None) -> Any:
    columns = ", ".join(f"{name} {column.dtype}" for name, column in dataset.inputs.items())
    inputs = f"columns, {columns}" if dataset.is_table else f"images, uint8 {dataset.input_shape}"
    inputs += "" if prepare is None else ", as the transform makes them"
    with plugins.calling(
        f"the model does not take this dataset's {inputs}", ModelError, explain=short_message
    ):
        return model(probe_inputs(dataset, prepare), training=False)


def _read_head(outputs: Any, label: Label, losses: Sequence[Any], dataset: DatasetInfo) -> Head:
    _check_kind(outputs, label, losses, dataset)
    if label.kind == REGRESSION:
        return "numbers"
    values = np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(outputs, "float32")))
    single = label.kind == CLASS and values.shape[1] == 1
    logits = any(map(_has_logits, losses))
    inside = bool(((values >= 0) & (values <= 1 + _ROUNDING)).all())
    if single:  # an untrained linear unit is 0 for a black image, a sigmoid never is
        fits = inside and bool((values > 0).all())
    elif label.kind == CLASS:
        sums = np.allclose(values.sum(axis=1), 1.0, rtol=0, atol=_ROUNDING)
        fits = sums and bool((values >= -_ROUNDING).all())
    else:
        fits = inside and bool((values > 0).any())
    if fits and ((label.kind == CLASS and not single) or not logits or attached_logits(outputs) is not None):
        return "probability" if single else "probabilities"
    if logits:
        return "logit" if single else "logits"
    if np.isfinite(values).all():
        probed = "a row of zeros" if dataset.is_table else "a black image"
        shown = ", ".join(f"{value:.3g}" for value in values[0][:4]) + ", ..." * (len(values[0]) > 4)
        last = "sigmoid" if single or label.kind == MULTILABEL else "softmax"
        raise ModelError(
            f"the model's outputs are not probabilities (on {probed}: [{shown}]) and its loss does not say "
            f"from_logits; end the model with a {last}, or compile it with from_logits=True"
        )
    return "probability" if single else "probabilities"


def _check_kind(outputs: Any, label: Label, losses: Sequence[Any], dataset: DatasetInfo) -> None:
    """Refuses a loss, softmax or sigmoid of Keras that does not suit a label's kind."""
    unsuitable = {REGRESSION: "crossentropy", MULTILABEL: "categorical"}.get(label.kind, " ")
    wrong = [name for name in map(compiled_name, losses) if unsuitable in name.replace("_", "").lower()]
    reason = ""
    if wrong:
        kind = "classes" if label.kind == REGRESSION else "one class of several"
        reason = f"the loss {wrong[0]} is for {kind}"
    if (logits := attached_logits(outputs)) is not None:
        spreads = dataset.train[label.name].spreads if label.name in dataset.train else ()
        for output, spread in zip(label.outputs, spreads, strict=False):
            if spread.least < 0 or spread.largest > 1:
                values = f"{output!r} is {spread.least:g} to {spread.largest:g}"
                reason = f"the model ends with a softmax or sigmoid, which gives 0 to 1, and {values}"
        near = functools.partial(np.allclose, outputs, rtol=0, atol=_ROUNDING)
        multilabel = label.kind == MULTILABEL and len(label.outputs) > 1
        if multilabel and near(keras.ops.softmax(logits)) and not near(keras.ops.sigmoid(logits)):
            reason = "the model ends with a softmax, whose numbers sum to 1"
    if reason:
        advice = "Dense alone, and compile it with mse, mae or huber"
        if label.kind == MULTILABEL:
            advice = "a sigmoid for each, and compile it with binary_crossentropy: an example may have any"
        raise ModelError(
            f"{reason}, and the label {label.name!r} is {label.kind}; end the model with {advice}"
        )


def to_prediction(outputs: Any, head: Head, label: Label) -> tf.Tensor:
    """Returns the prediction of a label, float32 (batch, outputs), from a model's output for it.

    It is a probability for each class or output of a multilabel, or a number for each output.
    """
    outputs = tf.cast(outputs, tf.float32)
    if head == "numbers":
        return tf.reshape(outputs, (-1, len(label.outputs)))
    if head in ("probability", "logit"):
        second = tf.sigmoid(outputs) if head == "logit" else outputs
        return tf.concat([1 - second, second], axis=-1)
    if head == "logits":
        return tf.nn.softmax(outputs) if label.kind == CLASS else tf.sigmoid(outputs)
    return outputs


def to_predictions(
    model: keras.Model, outputs: Any, heads: Heads, labels: Sequence[Label]
) -> dict[str, tf.Tensor]:
    """Returns the `to_prediction` of each label, by name, from a model's outputs."""
    named = outputs_by_label(model, outputs, labels)
    return {label.name: to_prediction(named[label.name], heads[label.name], label) for label in labels}


def outputs_by_label(model: keras.Model, outputs: Any, labels: Sequence[Label]) -> dict[str, Any]:
    """Returns a model's outputs by the name of the label; a ModelError unless there is one for each.

    They are a dict by label, a list in the `output_order`, or for a single label the output itself.
    """
    names = [label.name for label in labels]
    nested = isinstance(outputs, Mapping | list | tuple)
    if isinstance(outputs, Mapping) and set(outputs) >= set(names):  # others are for training alone
        return {name: outputs[name] for name in names}
    if isinstance(outputs, list | tuple) and len(outputs) == len(names):
        return dict(zip(output_order(model, names), outputs, strict=True))
    if len(names) == 1 and not nested:
        return {names[0]: outputs}
    found = f"{len(outputs) if nested else 1} output{'s' if nested and len(outputs) != 1 else ''}"
    if isinstance(outputs, Mapping):
        found += f" ({', '.join(map(str, outputs))})"
    needed = f"one for each label, a dict of {', '.join(names)}," if len(names) > 1 else "one"
    raise ModelError(
        f"the model has {found}; an exported model has {needed}: train a model with "
        f"{'these' if len(names) > 1 else 'that one alone'}; {TRAIN_WITHOUT_EXPORT}"
    )


def output_order(model: keras.Model, names: Sequence[str]) -> Sequence[str]:
    """Returns the names of the labels in the order of a list of outputs: that of its layers, if so named."""
    layers = list(getattr(model, "output_names", None) or ())
    return layers if sorted(layers) == sorted(names) else names


def by_label(
    model: keras.Model, argument: Any, labels: Iterable[Label], everything: Sequence[Any]
) -> dict[str, list[Any]]:
    """Returns the part of an argument of `compile` for each label; `everything` if it is not by output."""
    names = [label.name for label in labels]
    if isinstance(argument, Mapping) and set(argument) & set(names):
        parts = dict(argument)
    elif isinstance(argument, list | tuple) and len(argument) == len(names) > 1:
        parts = dict(zip(output_order(model, names), argument, strict=True))
    else:
        return {name: list(everything) for name in names}
    return {
        name: [item for item in keras.tree.flatten(parts.get(name)) if item is not None] for name in names
    }


def _check_shape(output: Any, label: Label) -> None:
    """Refuses an output for two examples whose shape does not fit a label."""
    shape, count = getattr(output, "shape", None), len(label.outputs)
    fitting: list[tuple[int, ...]] = [(2, count)]
    if (label.kind, count) == (CLASS, 2):
        fitting.append((2, 1))
    if (label.kind, count) == (REGRESSION, 1):
        fitting.append((2,))
    if shape is not None and tuple(shape) in fitting:
        return
    found = f"shape {('n', *shape[1:])}".replace("'", "") if shape is not None else type(output).__name__
    nouns = {CLASS: "classes", MULTILABEL: "labels", REGRESSION: f"number{'s' if count > 1 else ''}"}
    of = f" of {label.name!r}" if label.name != LABEL else ""
    raise ModelError(
        f"the model's output is {found}, the dataset has {count} {nouns[label.kind]}{of} "
        f"and needs (n, {count}): give its last layer {count} unit{'s' * (count > 1)}, or use "
        "the data that it was made for"
    )


def _check_inputs(model: keras.Model, dataset: DatasetInfo) -> None:
    """Checks the declared inputs of a model, if any: Keras would accept others."""
    inputs: list[Any] = getattr(model, "inputs", None) or []
    if dataset.is_table:
        declared = model.input if inputs else None
        if isinstance(declared, dict) and set(declared) != set(dataset.inputs):
            raise ModelError(
                f"the model takes a dict of {', '.join(sorted(declared))}, the dataset has the columns "
                f"{', '.join(sorted(dataset.inputs))}; to use some of them, pass keras.Model a list of its "
                "inputs, each with the name of its column"
            )
        return
    if len(inputs) > 1:
        raise ModelError(
            f"the model has {len(inputs)} inputs; an exported model takes one, the image: compute the others "
            f"from it in layers; {TRAIN_WITHOUT_EXPORT}"
        )
    shape = tuple(inputs[0].shape[1:]) if inputs else dataset.input_shape
    if not tf.TensorShape(shape).is_compatible_with(dataset.input_shape):
        raise ModelError(
            f"the model takes images of shape {shape}, the dataset has {dataset.input_shape}; build it with "
            "dataset.input_shape, or use the data that it was made for"
        )


def _has_logits(loss: Any) -> bool:
    # A loss passed by name or as a bare function has Keras' default, from_logits=False.
    if isinstance(loss, functools.partial):
        return bool(loss.keywords.get("from_logits", False))
    own = getattr(loss, "from_logits", False)
    with contextlib.suppress(Exception):  # a custom loss need not have a configuration
        own = loss.get_config().get("from_logits", own)
    return bool(own)


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
    labels, order, shapes = list(dataset.labels.values()), tuple[str, ...](), dict[str, Any]()
    with contextlib.suppress(ModelError):  # a model that is not to be exported
        outputs = _probe(model, dataset, None)
        named = outputs_by_label(model, outputs, labels)
        shapes = {name: getattr(each, "shape", ()) for name, each in named.items()}
        order = tuple(output_order(model, [*shapes])) if isinstance(outputs, list | tuple) else ()
    losses = by_label(model, getattr(model, "loss", None), labels, compiled_losses(model))
    metrics = by_label(model, passed_metrics(model), labels, compiled_metrics(model))
    forms, descriptions = dict[str, LabelForm](), list[str]()
    for name, label in dataset.labels.items():
        form, reason = DEFAULT_FORMS[label.kind], ""
        shape, count = tuple(shapes.get(name, ())), len(label.outputs)
        if label.kind == CLASS:
            form, reason = choose_form(losses[name], metrics[name], 1 if shape[1:] == (1,) else count, count)
        elif (label.kind, count, len(shape)) == (REGRESSION, 1, 2):
            form = "column"
        if form != DEFAULT_FORMS[label.kind]:
            forms[name] = form
        if name in forms and reason:
            of = f"{name} " if name != LABEL else ""
            descriptions.append(f"{of}{_FORM_NAMES[form]}, as {reason} takes them")
    return Interface(forms, tuple(descriptions), heads, order)


_FORM_NAMES = {"binary": "0 or 1", "one-hot": "one-hot"}


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
# A part that begins with a list as its "value" is a lambda as an activation.
_FOREIGN = re.compile(
    r'"module": "(?!keras[".]|builtins[".])|\{"value": \['
    r'|"class_name": "(Lambda|TFSMLayer|JaxLayer|FlaxLayer|TorchModuleWrapper|function|__lambda__)"'
)

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
    refusing = functools.partial(plugins.calling, error=ModelError, explain=short_message)
    instead = TRAIN_WITHOUT_EXPORT
    with warnings.catch_warnings(), saveable(model):
        warnings.simplefilter("ignore")  # anything serious is refused
        with refusing("the model cannot be saved", advice=_SAVEABLE):
            config = keras.saving.serialize_keras_object(model)
            json.dumps(config)
        own = {name: value for name, value in config.items() if name != "compile_config"}
        if not model.built or not _FOREIGN.search(json.dumps(own)):
            return
        with tempfile.TemporaryDirectory(prefix="shardline-check-") as directory:
            path = Path(directory) / "model.keras"
            with refusing("the model cannot be saved", advice=_SAVEABLE):
                model.save(path)
            if not exported:
                return
            with refusing("the model cannot be loaded once it is saved", advice=f"{_LOADABLE}; {instead}"):
                try:
                    loaded = keras.models.load_model(path, safe_mode=True, compile=False)
                except Exception as error:
                    refuse_lambda(error, "the model", instead)
                    raise
    inputs = probe_inputs(dataset, prepare)
    specs = tf.nest.map_structure(lambda part: tf.TensorSpec([None, *part.shape[1:]], part.dtype), inputs)
    predict = tf.function(lambda inputs: loaded(inputs, training=False), autograph=False)
    with refusing("the model cannot be traced for an export", advice=f"{_TRACEABLE}; {instead}"):
        concrete = predict.get_concrete_function(specs)
    check_operations(concrete)
    _compare(model, loaded, inputs)


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
