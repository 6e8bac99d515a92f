"""Quantiles of a number: the loss by which a model learns them, and the head that says which it gives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import keras

from shardline.trainer.data.features import REGRESSION, Label
from shardline.trainer.errors import ModelError

# How a head of quantiles begins, as in "quantiles 0.1 0.5 0.9".
_PREFIX = "quantiles"


@keras.saving.register_keras_serializable("shardline")
class QuantileLoss(keras.losses.Loss):  # type: ignore[misc]  # keras has no types
    """Pinball loss, the mean over some quantiles of a number, of which the model has an output each.

    An output that is too low costs its quantile for each unit, one that is too high the rest to 1; what costs
    least is the number below which that share of the truth lies. A model that is compiled with it is exported
    with the signature's outputs `value` and `quantiles`.

    Args:
        quantiles: Shares within 0..1, rising.
        name: Name of the loss.
        kwargs: What every loss of Keras takes.

    Raises:
        ModelError: There is no quantile, or they are not within 0..1 or do not rise.
    """

    def __init__(
        self, quantiles: Sequence[float] = (0.1, 0.5, 0.9), name: str = "quantile_loss", **kwargs: Any
    ):
        super().__init__(name=name, **kwargs)
        self.quantiles = check_quantiles(quantiles)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the loss of each example: y_true (batch,) or (batch, 1), y_pred (batch, quantiles)."""
        true = keras.ops.cast(y_true, y_pred.dtype)
        true = keras.ops.expand_dims(true, -1) if len(true.shape) < len(y_pred.shape) else true
        if true.shape[-1] != 1 or y_pred.shape[-1] != len(self.quantiles):
            raise ModelError(
                f"QuantileLoss has {len(self.quantiles)} quantiles of one number: it takes labels (n,) and "
                f"outputs (n, {len(self.quantiles)}), got {('n', *y_true.shape[1:])} and "
                f"{('n', *y_pred.shape[1:])}".replace("'", "")
            )
        error, shares = true - y_pred, keras.ops.cast(self.quantiles, y_pred.dtype)
        return keras.ops.mean(keras.ops.maximum(shares * error, (shares - 1) * error), axis=-1)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {**super().get_config(), "quantiles": list(self.quantiles)}


def check_quantiles(quantiles: Any) -> tuple[float, ...]:
    """Returns some quantiles as numbers; a ModelError where they are none within 0..1 that rise."""
    listed = list(quantiles) if isinstance(quantiles, Sequence) and not isinstance(quantiles, str) else []
    sound = all(isinstance(one, int | float) and 0 < one < 1 for one in listed)  # NaN fails this too
    if not listed or not sound or any(a >= b for a, b in pairwise(listed)):
        raise ModelError(
            f"quantiles must be numbers between 0 and 1, each larger than the one before, got {quantiles!r}; "
            "write [0.1, 0.5, 0.9]"
        )
    return tuple(map(float, listed))


def compiled_quantiles(label: Label, losses: Sequence[Any]) -> tuple[float, ...]:
    """Returns the quantiles that a model's losses for a label ask for, () for none.

    Raises ModelError where the label is not one number.
    """
    found = next((loss for loss in losses if isinstance(loss, QuantileLoss)), None)
    if found is None:
        return ()
    if label.kind != REGRESSION:
        raise ModelError(
            f"QuantileLoss is for a number, and the label {label.name!r} is of kind {label.kind}; compile "
            "the model with a crossentropy"
        )
    if len(label.outputs) > 1:
        raise ModelError(
            f"QuantileLoss is for one number, and the label {label.name!r} has {len(label.outputs)}, "
            f"{', '.join(label.outputs[:5])}; make each a label of its own, as in "
            f"regression:{label.outputs[0]};regression:{label.outputs[1]}"
        )
    return found.quantiles


def head_of_quantiles(quantiles: Sequence[float]) -> str:
    """Returns the head of a model that gives these quantiles: "quantiles 0.1 0.5 0.9"."""
    return " ".join([_PREFIX, *map(repr, quantiles)])


def quantiles_of_head(head: object) -> tuple[float, ...]:
    """Returns the quantiles that a head is of, () for any other head."""
    if not isinstance(head, str) or not head.startswith(f"{_PREFIX} "):
        return ()
    try:
        return check_quantiles([float(one) for one in head.split()[1:]])
    except (ValueError, ModelError):
        return ()


def middle_of(quantiles: Sequence[float]) -> int:
    """Returns the place of the quantile that is nearest to 0.5."""
    return min(range(len(quantiles)), key=lambda place: abs(quantiles[place] - 0.5))
