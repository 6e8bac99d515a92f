"""Interface of a compiled model: the form of labels that its loss and metrics take, and its heads."""

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
    # Another number of examples than of classes, or the two dimensions could be confused.
    indices = np.arange(classes + 2) % classes
    outputs = np.full((classes + 2, classes), 1 / classes, np.float32)
    forms: tuple[tuple[LabelForm, Any], ...] = (
        ("sparse", indices.astype(np.int64)),
        ("one-hot", np.eye(classes, dtype=np.float32)[indices]),
    )
    for form, labels in forms:
        with contextlib.suppress(Exception):  # the user's code runs here and may raise anything
            compute_loss(loss, labels, outputs)
            return form
    return None
