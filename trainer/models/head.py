"""Head of a model: whether it fits a dataset, and whether its outputs are probabilities or logits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shardline.trainer.data.decode import Inputs
from shardline.trainer.data.features import CLASS, MULTILABEL, REGRESSION, Label
from shardline.trainer.data.manifest import DatasetInfo
from shardline.trainer.errors import ModelError
from shardline.trainer.keras_compilation import compiled_losses, is_activated, reason


def probe_inputs(dataset: DatasetInfo) -> Inputs:
    """Returns two examples: a black and a white image, or rows of 0, "" and of 1, "1"."""
    if not dataset.is_table:
        black_and_white = np.array([0, 255], np.uint8).reshape(2, 1, 1, 1)
        return tf.constant(np.broadcast_to(black_and_white, (2, *dataset.input_shape)))
    return {
        name: tf.constant(["", "1"]) if column.dtype == "string" else tf.constant([0, 1], column.dtype)
        for name, column in dataset.inputs.items()
    }


#: What to do about a model that cannot be exported.
ALL_THE_SAME = "to train it all the same, without an export, set allow_unexportable"

#: What the outputs of a model are: a probability by class, or logits; or for two classes one number, the
#: probability of the second class, or its logit; or numbers as they are.
Head = Literal["probabilities", "logits", "probability", "logit", "numbers"]
HEADS: tuple[Head, ...] = ("probabilities", "logits", "probability", "logit", "numbers")

# Wide enough for a softmax computed in float16, far narrower than any accident.
_TOLERANCE = 1e-2


def read_head(model: keras.Model, dataset: DatasetInfo, known: Head | None = None) -> Head:
    """Does what `read_heads` does for the only label of a dataset."""
    name = dataset.label.name
    return read_heads(model, dataset, {name: known} if known else None)[name]


def read_heads(
    model: keras.Model, dataset: DatasetInfo, known: Mapping[str, Head] | None = None
) -> dict[str, Head]:
    """Checks that a model fits a dataset and says what its outputs are by label, where that is not `known`.

    Those of classes are logits, and the export adds the softmax, when a loss that the model was compiled with
    has `from_logits=True` and the outputs are not probabilities already (Keras finds its way back to the
    logits of a softmax layer, so that combination trains correctly). In every other case they must be
    probabilities: on two made-up examples each row has to be non-negative and to sum to 1; or a single number
    in 0..1, for two classes. Of several labels each must be a number in 0..1, or a logit. Outputs that are
    not finite are let through here, because the evaluation counts them. All else is a ModelError.
    """
    labels = [*dataset.labels.values()]
    outputs = by_label(_outputs_on_probe(model, dataset), labels)
    for label in labels:
        _check_shape(outputs[label.name], label)
    if known and known.keys() == dataset.labels.keys():
        return dict(known)
    return {
        label.name: _head_of(outputs[label.name], label, _losses_of(model, label, labels), dataset)
        for label in labels
    }


def _losses_of(model: keras.Model, label: Label, labels: Sequence[Label]) -> list[Any]:
    """Returns the losses of a label's output, where they were given by output; else all."""
    given = getattr(model, "loss", None)
    if isinstance(given, Mapping):
        return [given[label.name]] if label.name in given else []
    if isinstance(given, list | tuple) and len(given) == len(labels):
        return [given[labels.index(label)]]
    return compiled_losses(model)


def _head_of(outputs: Any, label: Label, losses: Sequence[Any], dataset: DatasetInfo) -> Head:
    if label.kind == REGRESSION:
        return "numbers"
    values = np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(outputs, "float32")))
    values = values.reshape(len(values), -1)
    several = label.kind == MULTILABEL
    single = values.shape[1] == 1 and not several
    logits = any(map(_wants_logits, losses))
    # Untrained logits may lie in 0..1 as well; an activation of Keras is known for one.
    sure = not (single or several) or not logits or is_activated(outputs)
    if sure and (_are_shares(values) if several else _are_probabilities(values)):
        return "probability" if single else "probabilities"
    if logits:
        return "logit" if single else "logits"
    if np.isfinite(values).all():
        probed = "a row of zeros" if dataset.is_table else "a black image"
        shown = ", ".join(f"{value:.3g}" for value in values[0][:4]) + ", ..." * (len(values[0]) > 4)
        raise ModelError(
            f"the model's outputs are not probabilities (on {probed}: [{shown}]) and its loss does not say "
            f"from_logits; end the model with a {'sigmoid' if single or several else 'softmax'}, or compile "
            "it with from_logits=True"
        )
    return "probability" if single else "probabilities"


def to_probabilities(outputs: tf.Tensor, head: Head) -> tf.Tensor:
    """Returns the probability of each class, float32 (batch, classes), from a model's outputs."""
    outputs = tf.cast(outputs, tf.float32)
    if head in ("probability", "logit"):
        second = tf.sigmoid(outputs) if head == "logit" else outputs
        return tf.concat([1 - second, second], axis=-1)
    return tf.nn.softmax(outputs) if head == "logits" else outputs


def to_answer(outputs: tf.Tensor, head: Head, label: Label) -> tf.Tensor:
    """Returns what a model says of a label, float32 (batch, outputs): probabilities, or numbers.

    Those of a class sum to 1, each of several labels is one of its own.
    """
    if label.kind == CLASS:
        return to_probabilities(outputs, head)
    said = tf.reshape(tf.cast(outputs, tf.float32), [-1, len(label.outputs)])
    return tf.sigmoid(said) if head == "logits" else said


def by_label(outputs: Any, labels: Sequence[Label]) -> dict[str, Any]:
    """Returns a model's outputs by name of the label: a dict of these names, or a list in their order.

    Of a single label the output itself will do. Raises ModelError when there are others.
    """
    names = [label.name for label in labels]
    if isinstance(outputs, Mapping) and set(outputs) == set(names):
        return {name: outputs[name] for name in names}
    several = isinstance(outputs, Mapping | list | tuple)
    listed = [*outputs.values()] if isinstance(outputs, Mapping) else list(outputs) if several else [outputs]
    if len(listed) == len(names) and (len(names) == 1 or not isinstance(outputs, Mapping)):
        return dict(zip(names, listed, strict=True))
    found = f" ({', '.join(map(str, outputs))})" if isinstance(outputs, Mapping) else ""
    needed = f"one for each label, a dict of {', '.join(names)}," if len(names) > 1 else "one"
    raise ModelError(
        f"the model has {len(listed)} outputs{found}; an exported model has {needed}: train "
        f"a model with {'these' if len(names) > 1 else 'that one alone'}; {ALL_THE_SAME}"
    )


def _are_shares(values: npt.NDArray[np.float32]) -> bool:
    return bool(((values >= -_TOLERANCE) & (values <= 1 + _TOLERANCE)).all())


def _are_probabilities(values: npt.NDArray[np.float32]) -> bool:
    if values.shape[1] == 1:
        # A linear unit gives 0 for a black image before it is trained, a sigmoid never does.
        return bool(((values > 0) & (values <= 1 + _TOLERANCE)).all())
    return bool(
        (values >= -_TOLERANCE).all() and np.allclose(values.sum(axis=1), 1.0, rtol=0, atol=_TOLERANCE)
    )


def _outputs_on_probe(model: keras.Model, dataset: DatasetInfo) -> Any:
    """Returns the outputs on two made-up examples."""
    (_check_columns if dataset.is_table else _check_input)(model, dataset)
    try:
        return model(probe_inputs(dataset), training=False)
    except Exception as error:  # The model's own code runs here and may raise anything.
        columns = ", ".join(f"{name} {column.dtype}" for name, column in dataset.inputs.items())
        inputs = f"columns, {columns}" if dataset.is_table else f"images, uint8 {dataset.input_shape}"
        raise ModelError(f"the model does not take this dataset's {inputs}: {reason(error)}") from error


def _check_shape(outputs: Any, label: Label) -> None:
    """Refuses outputs on two examples that are not a number for each of a label's classes or numbers."""
    shape, wanted = getattr(outputs, "shape", None), len(label.outputs)
    fitting: list[tuple[int, ...]] = [(2, wanted)]
    if label.kind == CLASS and wanted == 2:
        fitting.append((2, 1))
    if label.kind == REGRESSION and wanted == 1:
        fitting.append((2,))
    if shape is None or tuple(shape) not in fitting:
        found = f"shape {('n', *shape[1:])}".replace("'", "") if shape is not None else type(outputs).__name__
        what = "classes" if label.class_names else "numbers"
        raise ModelError(
            f"the model's output is {found}, the dataset has {wanted} {what} and needs "
            f"(n, {wanted}): it was made for other data"
        )


def _check_input(model: keras.Model, dataset: DatasetInfo) -> None:
    """Compares the declared input, where the model declares one, with the dataset's images."""
    inputs: list[Any] = getattr(model, "inputs", None) or []
    if len(inputs) > 1:
        raise ModelError(
            f"the model has {len(inputs)} inputs; an exported model takes one, the image: make the others "
            f"of it in layers; {ALL_THE_SAME}"
        )
    declared = tuple(inputs[0].shape[1:]) if inputs else dataset.input_shape
    fits = len(declared) == 3 and all(
        size in (None, wanted) for size, wanted in zip(declared, dataset.input_shape, strict=True)
    )
    if not fits:
        raise ModelError(
            f"the model takes images of shape {declared}, the dataset has {dataset.input_shape}; "
            "it was made for other data"
        )


def _check_columns(model: keras.Model, dataset: DatasetInfo) -> None:
    """Compares a declared dict of inputs with the columns: Keras would feed others in their place."""
    declared = model.input if getattr(model, "inputs", None) else None
    if isinstance(declared, dict) and set(declared) != set(dataset.inputs):
        raise ModelError(
            f"the model takes a dict of {', '.join(sorted(declared))}, the dataset has the columns "
            f"{', '.join(sorted(dataset.inputs))}; to use some of them, give keras.Model a list of its "
            "inputs, each with the name of its column"
        )


def _wants_logits(loss: Any) -> bool:
    # A loss given by name or as a bare function has Keras' default, from_logits=False.
    if isinstance(loss, functools.partial):
        return bool(loss.keywords.get("from_logits", False))
    own = getattr(loss, "from_logits", False)
    with contextlib.suppress(Exception):  # a loss of the user's own need not have a configuration
        own = loss.get_config().get("from_logits", own)
    return bool(own)
