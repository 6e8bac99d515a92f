"""The head of a model: whether it fits a dataset, and whether its outputs are probabilities or logits."""

from __future__ import annotations

from typing import Any, Literal

import keras
import numpy as np
import numpy.typing as npt

from trainer.data.manifest import DatasetInfo
from trainer.errors import ModelError

Head = Literal["probabilities", "logits"]

# Wide enough for a softmax computed in float16, far narrower than any accident.
_TOLERANCE = 1e-2


def read_head(model: keras.Model, dataset: DatasetInfo) -> Head:
    """Checks that a model fits a dataset and says what its outputs are.

    The outputs are logits, and the export adds the softmax, when the loss that the model was compiled
    with has `from_logits=True` and the outputs are not probabilities already (Keras finds its way back
    to the logits of a softmax layer, so that combination trains correctly). In every other case
    they must be probabilities: on an all-black and an all-white image each row has to be non-negative
    and to sum to 1. Outputs that are not finite are let through here, because the evaluation counts them.

    Raises:
        ModelError: When the model does not take the dataset's images, does not give one number per
            class, or gives numbers that are neither probabilities nor declared to be logits.
    """
    outputs = _outputs_on_probe(model, dataset)
    if _are_probabilities(outputs):
        return "probabilities"
    if _loss_wants_logits(model):
        return "logits"
    if np.isfinite(outputs).all():
        raise ModelError(
            f"the model's outputs are not probabilities (on a black image: {_shorten(outputs[0])}) and its "
            "loss does not say from_logits; end the model with a softmax, or compile it with from_logits=True"
        )
    return "probabilities"


def _outputs_on_probe(model: keras.Model, dataset: DatasetInfo) -> npt.NDArray[np.float32]:
    """Returns the float32 (2, classes) outputs on a black and a white image."""
    probe = np.stack([np.zeros(dataset.input_shape, np.uint8), np.full(dataset.input_shape, 255, np.uint8)])
    _check_input(model, dataset)
    try:
        outputs = model(probe, training=False)
    except Exception as error:  # The model's own code runs here and may raise anything.
        raise ModelError(
            f"the model does not take this dataset's images, uint8 {dataset.input_shape}: "
            f"{_first_line(error)}"
        ) from error
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


def _loss_wants_logits(model: keras.Model) -> bool:
    loss = getattr(model, "loss", None)
    if isinstance(loss, dict):
        loss = list(loss.values())
    if isinstance(loss, list | tuple) and len(loss) == 1:
        loss = loss[0]
    # A loss given by name or as a bare function has Keras' default, from_logits=False.
    return isinstance(loss, keras.losses.Loss) and bool(loss.get_config().get("from_logits", False))


def _are_probabilities(outputs: npt.NDArray[np.float32]) -> bool:
    return bool(
        (outputs >= -_TOLERANCE).all() and np.allclose(outputs.sum(axis=1), 1.0, rtol=0, atol=_TOLERANCE)
    )


def _shorten(row: npt.NDArray[np.float32]) -> str:
    shown = ", ".join(f"{value:.3g}" for value in row[:4])
    return f"[{shown}{', ...' if len(row) > 4 else ''}]"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
