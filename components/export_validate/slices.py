"""Slices: the accuracy on some of the examples, by class and by every further feature of the dataset."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shardline.components.export_validate.bootstrap import share_interval
from shardline.components.export_validate.evaluation import Slice
from shardline.components.export_validate.outcomes import Outcomes

#: A feature with more values is sliced at its quartiles when they are numbers, and not at all otherwise.
_MOST_VALUES = 20

_Mask = npt.NDArray[np.bool_]


def slice_outcomes(outcomes: Outcomes, min_slice: int) -> tuple[Slice, ...]:
    """Returns the accuracy by class and by feature.

    Args:
        outcomes: Of every example.
        min_slice: Smallest number of examples that a rule may be judged on.
    """
    slices = [
        _measure(f"class={name}", outcomes, outcomes.labels == label, min_slice)
        for label, name in enumerate(outcomes.class_names)
    ]
    for feature, column in outcomes.columns.items():
        slices += [
            _measure(f"{feature}={value}", outcomes, chosen, min_slice) for value, chosen in _parts(column)
        ]
    return tuple(slices)


def _measure(name: str, outcomes: Outcomes, chosen: _Mask, min_slice: int) -> Slice:
    examples, right = int(chosen.sum()), int((chosen & outcomes.right).sum())
    decided = examples >= min_slice
    return Slice(
        name=name,
        examples=examples,
        accuracy=right / examples if examples else 0.0,
        decided=decided,
        interval=share_interval(right, examples) if decided else None,
    )


def _parts(column: npt.NDArray[np.generic]) -> Iterator[tuple[str, _Mask]]:
    values = np.unique(column)
    if len(values) <= _MOST_VALUES:
        yield from ((_text(value), column == value) for value in values)
    elif np.issubdtype(column.dtype, np.number):
        edges = np.unique(np.nanquantile(column.astype(np.float64), (0.0, 0.25, 0.5, 0.75, 1.0)))
        for place, (lower, upper) in enumerate(pairwise(edges)):
            above = column >= lower if place == 0 else column > lower
            yield f"{lower:g}..{upper:g}", above & (column <= upper)


def _text(value: np.generic) -> str:
    return f"{value:g}" if isinstance(value, np.floating) else str(value)
