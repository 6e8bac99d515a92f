"""Head of a model: whether it fits a dataset, and whether its outputs are probabilities or logits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shardline.trainer.base.errors import ModelError
from shardline.trainer.data.decode import Inputs, Prepare, make_probe_rows
from shardline.trainer.data.features import CLASS, LABEL, MULTILABEL, REGRESSION, Label
from shardline.trainer.data.manifest import DatasetInfo
from shardline.trainer.keras_compat.keras_compilation import (
    compiled_losses,
    compiled_name,
    is_activated,
    short_message,
)
from shardline.trainer.models.zoo import compiled_quantiles, middle_of, quantiles_of_head


def probe_inputs(dataset: DatasetInfo, prepare: Prepare | None = None) -> Any:
    """Returns two examples, through `prepare`: a black and a white image, or rows of 0, "", and 1, "1"."""
    rows: Inputs
    if dataset.is_table:
        rows = make_probe_rows(dataset.inputs, ("", "1"), (0, 1))
    else:
        black_and_white = np.array([0, 255], np.uint8).reshape(2, 1, 1, 1)
        rows = tf.constant(np.broadcast_to(black_and_white, (2, *dataset.input_shape)))
    return prepare(rows) if prepare else rows


#: What to do about a model that cannot be exported.
ALL_THE_SAME = "to train it all the same, without an export, set allow_unexportable"

#: What an output of a model is. Of a class: a probability by class, or logits; or for two classes one number,
#: the probability of the second class, or its logit. Of several labels: a probability of each, or logits. Of
#: numbers: these; or of one number its quantiles, as "quantiles 0.1 0.5 0.9".
Head = str
_HEADS = ("probabilities", "logits", "probability", "logit", "numbers")

#: The head of each label, by its name.
Heads = Mapping[str, Head]

# Wide enough for a softmax computed in float16, far narrower than any accident.
_TOLERANCE = 1e-2


def read_heads(
    model: keras.Model, dataset: DatasetInfo, known: Heads | None = None, *, prepare: Prepare | None = None
) -> Heads:
    """Checks that a model fits a dataset and says what its outputs are, where that is not `known`.

    Of classes, they are logits, and the export adds the softmax (or sigmoid), when a loss that the model was
    compiled with has `from_logits=True` and the outputs are not probabilities already (Keras finds its way
    back to the logits of a softmax layer). In every other case they must be probabilities on two made-up
    examples, or not finite, which the evaluation counts. All else is a ModelError. A model takes inputs as
    `prepare`, if given, makes them.
    """
    labels = list(dataset.labels.values())
    if prepare is None:
        _check_inputs(model, dataset)
    try:
        probed = model(probe_inputs(dataset, prepare), training=False)
    except Exception as error:  # The model's own code runs here and may raise anything.
        columns = ", ".join(f"{name} {column.dtype}" for name, column in dataset.inputs.items())
        inputs = f"columns, {columns}" if dataset.is_table else f"images, uint8 {dataset.input_shape}"
        inputs += "" if prepare is None else ", as the transform makes them"
        raise ModelError(
            f"the model does not take this dataset's {inputs}: {short_message(error)}"
        ) from error
    outputs = by_label(probed, labels, output_order(model, labels))
    recorded = dict(known) if known and known.keys() == dataset.labels.keys() else None
    losses = {} if recorded else losses_by_label(model, labels)
    heads = {}
    for label in labels:
        name = label.name
        quantiles = quantiles_of_head(recorded[name]) if recorded else compiled_quantiles(label, losses[name])
        _check_shape(outputs[name], label, quantiles)
        if quantiles:
            heads[name] = " ".join(["quantiles", *map(repr, quantiles)])
        elif not recorded:
            heads[name] = _read_head(outputs[name], label, losses[name], dataset)
    return {**(recorded or {}), **heads}


def is_head(text: object) -> bool:
    """Whether this is the name of a head."""
    return text in _HEADS or bool(quantiles_of_head(text))


def _read_head(outputs: Any, label: Label, losses: Sequence[Any], dataset: DatasetInfo) -> Head:
    _check_kind(outputs, label, losses, dataset)
    if label.kind == REGRESSION:
        return "numbers"
    values = np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(outputs, "float32")))
    single = label.kind == CLASS and values.shape[1] == 1
    logits = any(map(_wants_logits, losses))
    inside = bool(((values >= 0) & (values <= 1 + _TOLERANCE)).all())
    if single:  # a linear unit gives 0 for a black image before it is trained, a sigmoid never does
        fits = inside and bool((values > 0).all())
    elif label.kind == CLASS:
        sums = np.allclose(values.sum(axis=1), 1.0, rtol=0, atol=_TOLERANCE)
        fits = sums and bool((values >= -_TOLERANCE).all())
    else:
        fits = inside and bool((values > 0).any())
    if fits and ((label.kind == CLASS and not single) or not logits or is_activated(outputs)):
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
    """Refuses a loss, softmax or sigmoid of Keras that can never give what a label is."""
    word = {REGRESSION: "crossentropy", MULTILABEL: "categorical"}.get(label.kind, " ")
    wrong = [compiled_name(one) for one in losses if word in compiled_name(one).replace("_", "").lower()]
    reason = ""
    if wrong:
        whom = "classes" if label.kind == REGRESSION else "one class of several"
        reason = f"the loss {wrong[0]} is for {whom}"
    if (logits := getattr(outputs, "_keras_logits", None)) is not None:
        spreads = dataset.train[label.name].spreads if label.name in dataset.train else ()
        for output, spread in zip(label.outputs, spreads, strict=False):
            if spread.least < 0 or spread.largest > 1:
                given = f"{output!r} is {spread.least:g} to {spread.largest:g}"
                reason = f"the model ends with a softmax or sigmoid, which gives 0 to 1, and {given}"
        near = functools.partial(np.allclose, outputs, rtol=0, atol=_TOLERANCE)
        several = label.kind == MULTILABEL and len(label.outputs) > 1
        if several and near(keras.ops.softmax(logits)) and not near(keras.ops.sigmoid(logits)):
            reason = "the model ends with a softmax, whose numbers sum to 1"
    if reason:
        end = "Dense alone, and compile it with mse, mae or huber"
        if label.kind == MULTILABEL:
            end = "a sigmoid for each, and compile it with binary_crossentropy: an example may have any"
        raise ModelError(f"{reason}, and the label {label.name!r} is {label.kind}; end the model with {end}")


def to_answer(outputs: Any, head: Head, label: Label) -> tf.Tensor:
    """Returns what a model says of a label, float32 (batch, outputs), from its output for it.

    It is the probability of each class, of each of several labels, or a number for each; of quantiles it is
    the one nearest to 0.5.
    """
    outputs = tf.cast(outputs, tf.float32)
    if quantiles := quantiles_of_head(head):
        return outputs[:, middle_of(quantiles), None]
    if head == "numbers":
        return tf.reshape(outputs, (-1, len(label.outputs)))
    if head in ("probability", "logit"):
        second = tf.sigmoid(outputs) if head == "logit" else outputs
        return tf.concat([1 - second, second], axis=-1)
    if head == "logits":
        return tf.nn.softmax(outputs) if label.kind == CLASS else tf.sigmoid(outputs)
    return outputs


def to_answers(
    outputs: Any, heads: Heads, labels: Sequence[Label], order: Sequence[str] = ()
) -> dict[str, tf.Tensor]:
    """Returns what a model says of each label, as `to_answer`, by its name; the rest is as for `by_label`."""
    found = by_label(outputs, labels, order)
    return {label.name: to_answer(found[label.name], heads[label.name], label) for label in labels}


def to_quantiles(
    outputs: Any, heads: Heads, labels: Sequence[Label], order: Sequence[str] = ()
) -> dict[str, tf.Tensor]:
    """Returns by name the quantiles of each label of which a model gives them, float32 (batch, quantiles)."""
    found = by_label(outputs, labels, order)
    names = [label.name for label in labels if quantiles_of_head(heads[label.name])]
    return {name: tf.cast(found[name], tf.float32) for name in names}


def by_label(outputs: Any, labels: Sequence[Label], order: Sequence[str] = ()) -> dict[str, Any]:
    """Returns a model's outputs by name of the label: a dict of these names, or a list in an `order`.

    Of a single label the output itself will do. A ModelError says that they are not one for each label.
    """
    names = [label.name for label in labels]
    nested = isinstance(outputs, Mapping | list | tuple)
    if isinstance(outputs, Mapping) and set(outputs) >= set(names):  # others serve the training alone
        return {name: outputs[name] for name in names}
    if isinstance(outputs, list | tuple) and len(outputs) == len(names):
        return dict(zip(order or names, outputs, strict=True))
    if len(names) == 1 and not nested:
        return {names[0]: outputs}
    found = f"{len(outputs) if nested else 1} output{'s' if nested and len(outputs) != 1 else ''}"
    if isinstance(outputs, Mapping):
        found += f" ({', '.join(map(str, outputs))})"
    needed = f"one for each label, a dict of {', '.join(names)}," if len(names) > 1 else "one"
    raise ModelError(
        f"the model has {found}; an exported model has {needed}: train a model with "
        f"{'these' if len(names) > 1 else 'that one alone'}; {ALL_THE_SAME}"
    )


def output_order(model: keras.Model, labels: Sequence[Label]) -> Sequence[str]:
    """Returns the names of the labels in the order of a list of outputs: by its layers' names if it can."""
    given, names = list(getattr(model, "output_names", None) or ()), [label.name for label in labels]
    return given if sorted(given) == sorted(names) else names


def losses_by_label(model: keras.Model, labels: Sequence[Label]) -> dict[str, list[Any]]:
    """Returns the losses that a model was compiled with, for each label."""
    return compiled_by_label(model, getattr(model, "loss", None), labels, compiled_losses(model))


def compiled_by_label(
    model: keras.Model, given: Any, labels: Sequence[Label], everything: Sequence[Any]
) -> dict[str, list[Any]]:
    """Returns of what was given to `compile` the part for each label; all of it where it is not by output."""
    names = [label.name for label in labels]
    if isinstance(given, Mapping) and set(given) & set(names):
        parts = dict(given)
    elif isinstance(given, list | tuple) and len(given) == len(names) > 1:
        parts = dict(zip(output_order(model, labels), given, strict=True))
    else:
        return {name: list(everything) for name in names}
    return {name: [one for one in keras.tree.flatten(parts.get(name)) if one is not None] for name in names}


def _check_shape(output: Any, label: Label, quantiles: Sequence[float]) -> None:
    """Refuses an output on two examples that is not one for each of a label's outputs, or its quantiles."""
    shape, count = getattr(output, "shape", None), len(quantiles or label.outputs)
    fitting: list[tuple[int, ...]] = [(2, count)]
    if not quantiles and (label.kind, count) == (CLASS, 2):
        fitting.append((2, 1))
    if not quantiles and (label.kind, count) == (REGRESSION, 1):
        fitting.append((2,))
    if shape is not None and tuple(shape) in fitting:
        return
    found = f"shape {('n', *shape[1:])}".replace("'", "") if shape is not None else type(output).__name__
    words = {CLASS: "classes", MULTILABEL: "labels", REGRESSION: f"number{'s' if count > 1 else ''}"}
    of = f" of {label.name!r}" if label.name != LABEL else ""
    has = f"its QuantileLoss has {count} quantiles" if quantiles else f"the dataset has {count}"
    kind = "" if quantiles else f" {words[label.kind]}{of}"
    raise ModelError(
        f"the model's output is {found}, {has}{kind} and needs (n, {count}): it was made for other data"
    )


def _check_inputs(model: keras.Model, dataset: DatasetInfo) -> None:
    """Compares what the model declares, if anything, with images or columns: Keras would feed others."""
    inputs: list[Any] = getattr(model, "inputs", None) or []
    if dataset.is_table:
        declared = model.input if inputs else None
        if isinstance(declared, dict) and set(declared) != set(dataset.inputs):
            raise ModelError(
                f"the model takes a dict of {', '.join(sorted(declared))}, the dataset has the columns "
                f"{', '.join(sorted(dataset.inputs))}; to use some of them, give keras.Model a list of its "
                "inputs, each with the name of its column"
            )
        return
    if len(inputs) > 1:
        raise ModelError(
            f"the model has {len(inputs)} inputs; an exported model takes one, the image: make the others "
            f"of it in layers; {ALL_THE_SAME}"
        )
    shape = tuple(inputs[0].shape[1:]) if inputs else dataset.input_shape
    if not tf.TensorShape(shape).is_compatible_with(dataset.input_shape):
        raise ModelError(
            f"the model takes images of shape {shape}, the dataset has {dataset.input_shape}; "
            "it was made for other data"
        )


def _wants_logits(loss: Any) -> bool:
    # A loss given by name or as a bare function has Keras' default, from_logits=False.
    if isinstance(loss, functools.partial):
        return bool(loss.keywords.get("from_logits", False))
    own = getattr(loss, "from_logits", False)
    with contextlib.suppress(Exception):  # a loss of the user's own need not have a configuration
        own = loss.get_config().get("from_logits", own)
    return bool(own)
