"""Interface of a compiled model: the form of labels that loss and metrics take, and what its outputs are."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

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
    wrapped_function,
)
from shardline.trainer.models.head import (
    Heads,
    by_label,
    compiled_by_label,
    losses_by_label,
    output_order,
    probe_inputs,
    read_heads,
)

# What takes either form, deciding by the shape of the labels.
_ADAPTIVE = {"accuracy", "acc", "crossentropy", "ce"}
# What takes class numbers, beside all whose name begins with "sparse".
_OF_NUMBERS = {"circle"}


@dataclass(frozen=True)
class Interface:
    """What a model takes and gives.

    Attributes:
        forms: By the name of a label, its form in a batch, where that is not the usual one.
        described: In words, each form and the loss or metric that has decided it.
        heads: What the outputs are, by label; None for a model that cannot be exported.
        order: Of a model whose outputs are a list, the names of the labels in their order; () for any other.
    """

    forms: Mapping[str, LabelForm] = field(default_factory=dict)
    described: tuple[str, ...] = ()
    heads: Heads | None = None
    order: tuple[str, ...] = ()


def only(by_label: Mapping[str, str] | None) -> Any:
    """Returns the value for the only label, or all of them by label, as settings.json has it."""
    return next(iter(by_label.values())) if by_label and [*by_label] == [LABEL] else by_label


def read_interface(
    model: keras.Model,
    dataset: DatasetInfo,
    *,
    transformed: bool = False,
    prepare: Prepare | None = None,
    exported: bool = True,
) -> Interface:
    """Returns the interface of a compiled model.

    The targets that a transformation makes stay as they are, and its inputs are those of `prepare`. Raises
    ModelError when a model that is to be exported cannot be, or when losses and metrics take labels of
    different forms, as `fit` would too.
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
        shapes = {name: tuple(one.shape) for name, one in by_label(outputs, labels, names).items()}
        order = tuple(names) if isinstance(outputs, list | tuple) else ()
    losses = losses_by_label(model, labels)
    metrics = compiled_by_label(model, passed_metrics(model), labels, compiled_metrics(model))
    found: dict[str, tuple[LabelForm, str]] = {}
    for name, label in dataset.labels.items():
        found[name] = DEFAULT_FORMS[label.kind], ""
        shape, count = shapes.get(name, ()), len(label.outputs)
        if label.kind == CLASS:
            one = shape[1:] == (1,) or (heads is not None and heads[name] in ("probability", "logit"))
            found[name] = choose_form(losses[name], metrics[name], 1 if one else count, count)
        elif (label.kind, count, len(shape)) == (REGRESSION, 1, 2):
            found[name] = "column", ""
    forms = {
        name: form for name, (form, _) in found.items() if form != DEFAULT_FORMS[dataset.labels[name].kind]
    }
    described = tuple(
        f"{f'{name} ' if name != LABEL else ''}{_FORMS[form]}, as {found[name][1]} takes them"
        for name, form in forms.items()
        if found[name][1]
    )
    return Interface(forms, described, heads, order)


_FORMS = {"binary": "0 or 1", "one-hot": "one-hot", "column": "a column", "sparse": "sparse"}


def choose_form(losses: list[Any], metrics: list[Any], units: int, classes: int) -> tuple[LabelForm, str]:
    """Returns the form of labels that losses and metrics given to `compile` take, and which of them needs it.

    Losses decide, then metrics of Keras, else labels are class numbers; so are those of a loss of one's own
    that can be computed from them. `units` are the model's outputs by example: with 1, labels are 0 or 1.
    """
    first = compiled_name(losses[0]) if losses else ""
    if units == 1 and classes > 1:
        if sparse := [compiled_name(one) for one in losses if _known_form(one) == "sparse"]:
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
            f"{forms['sparse']} takes class numbers and {forms['one-hot']} one-hot labels, of which Keras' "
            "own fit takes one kind too; compile the model with those of one kind "
            "(sparse_categorical_crossentropy with SparseCategoricalAccuracy, categorical_crossentropy with "
            "AUC or F1Score)"
        )
    return next(iter(forms.items()), ("sparse", ""))


def _known_form(given: Any) -> LabelForm | None:
    """Returns the form that a loss or metric of Keras takes; None for either, and for one of one's own."""
    inner = wrapped_function(given)
    if isinstance(inner, str):
        known = ">" not in inner  # as in the name of a class that was registered
    else:
        kind = inner if callable(inner) and hasattr(inner, "__name__") else type(inner)
        known = str(getattr(kind, "__module__", "")).partition(".")[0] == "keras"
    name = compiled_name(given).replace("_", "").lower()
    if not known or name in _ADAPTIVE:
        return None
    # Of the intersections over unions, which take either, each says which it was made for.
    numbers = getattr(inner, "sparse_y_true", name.startswith("sparse") or name in _OF_NUMBERS)
    return "sparse" if numbers else "one-hot"


def _probed_form(loss: Any, classes: int) -> LabelForm | None:
    """Returns the form from which a loss can be computed; None where the loss takes what others do."""
    if compiled_name(loss).lower() in _ADAPTIVE:
        return None
    # Another number of examples than of classes, or one could pass for the other.
    numbers = np.arange(classes + 2) % classes
    outputs = np.full((classes + 2, classes), 1 / classes, np.float32)
    forms: tuple[tuple[LabelForm, Any], ...] = (
        ("sparse", numbers.astype(np.int64)),
        ("one-hot", np.eye(classes, dtype=np.float32)[numbers]),
    )
    for form, labels in forms:
        with contextlib.suppress(Exception):  # the user's code runs here and may raise anything
            compute_loss(loss, labels, outputs)
            return form
    return None
