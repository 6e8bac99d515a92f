"""Head of a model: whether it fits a dataset, and whether its outputs are probabilities or logits."""

from __future__ import annotations

import re
from typing import Any, Literal

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shardline.trainer.data.decode import Inputs
from shardline.trainer.data.manifest import DatasetInfo
from shardline.trainer.errors import ModelError


def probe_inputs(dataset: DatasetInfo) -> Inputs:
    """Returns two examples: a black and a white image, or rows of 0, "" and of 1, "1"."""
    if not dataset.is_table:
        black_and_white = np.array([0, 255], np.uint8).reshape(2, 1, 1, 1)
        return tf.constant(np.broadcast_to(black_and_white, (2, *dataset.input_shape)))
    return {
        name: tf.constant(["", "1"]) if column.dtype == "string" else tf.constant([0, 1], column.dtype)
        for name, column in dataset.inputs.items()
    }


Head = Literal["probabilities", "logits"]

# Wide enough for a softmax computed in float16, far narrower than any accident.
_TOLERANCE = 1e-2


def read_head(model: keras.Model, dataset: DatasetInfo) -> Head:
    """Checks that a model fits a dataset and says what its outputs are.

    They are logits, and the export adds the softmax, when the loss that the model was compiled with has
    `from_logits=True` and the outputs are not probabilities already (Keras finds its way back to the logits
    of a softmax layer, so that combination trains correctly). In every other case they must be probabilities:
    on two made-up examples each row has to be non-negative and to sum to 1. Outputs that are not finite are
    let through here, because the evaluation counts them. All else is a ModelError.
    """
    outputs = _outputs_on_probe(model, dataset)
    sums = outputs.sum(axis=1)
    if (outputs >= -_TOLERANCE).all() and np.allclose(sums, 1.0, rtol=0, atol=_TOLERANCE):
        return "probabilities"
    if _loss_wants_logits(model):
        return "logits"
    if np.isfinite(outputs).all():
        probed = "a row of zeros" if dataset.is_table else "a black image"
        shown = ", ".join(f"{value:.3g}" for value in outputs[0][:4]) + ", ..." * (len(outputs[0]) > 4)
        raise ModelError(
            f"the model's outputs are not probabilities (on {probed}: [{shown}]) and its loss "
            "does not say from_logits; end the model with a softmax, or compile it with from_logits=True"
        )
    return "probabilities"


def _outputs_on_probe(model: keras.Model, dataset: DatasetInfo) -> npt.NDArray[np.float32]:
    """Returns the float32 (2, classes) outputs on two made-up examples."""
    (_check_columns if dataset.is_table else _check_input)(model, dataset)
    try:
        outputs = model(probe_inputs(dataset), training=False)
    except Exception as error:  # The model's own code runs here and may raise anything.
        columns = ", ".join(f"{name} {column.dtype}" for name, column in dataset.inputs.items())
        inputs = f"columns, {columns}" if dataset.is_table else f"images, uint8 {dataset.input_shape}"
        # Keras adds colours, and the arguments of every layer's call.
        text = re.sub(r"\x1b\[\d+m", "", str(error)).partition("Arguments received by")[0]
        reason = " ".join(text.split()) or type(error).__name__
        raise ModelError(f"the model does not take this dataset's {inputs}: {reason}") from error
    shape = getattr(outputs, "shape", None)
    if shape is None or tuple(shape) != (2, dataset.num_classes):
        found = f"shape {('n', *shape[1:])}".replace("'", "") if shape is not None else type(outputs).__name__
        raise ModelError(
            f"the model's output is {found}, the dataset has {dataset.num_classes} classes and needs "
            f"(n, {dataset.num_classes}): it was made for other data"
        )
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(outputs, "float32")))


def _check_input(model: keras.Model, dataset: DatasetInfo) -> None:
    """Compares the declared input, where the model declares one, with the dataset's images."""
    inputs: list[Any] = getattr(model, "inputs", None) or []
    if len(inputs) > 1:
        raise ModelError(f"the model has {len(inputs)} inputs; an exported model takes one, the image")
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


def _loss_wants_logits(model: keras.Model) -> bool:
    loss = getattr(model, "loss", None)
    if isinstance(loss, dict):
        loss = list(loss.values())
    if isinstance(loss, list | tuple) and len(loss) == 1:
        loss = loss[0]
    # A loss given by name or as a bare function has Keras' default, from_logits=False.
    return isinstance(loss, keras.losses.Loss) and bool(loss.get_config().get("from_logits", False))
