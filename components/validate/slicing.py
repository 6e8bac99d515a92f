"""Slices: examples with something in common, by the values of their columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Chosen = npt.NDArray[np.bool_]

# Text with more values is not sliced, and numbers with more are sliced at their quartiles.
_MOST_TEXTS, _MOST_NUMBERS = 20, 5
_QUARTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


def slices(columns: Mapping[str, npt.NDArray[np.generic]]) -> Iterator[tuple[str, Chosen]]:
    """Yields the names of slices, "camera=left", "height=96..128", and which examples are in them, [n]."""
    for name, column in columns.items():
        for value, chosen in _parts(column):
            yield f"{name}={value}", chosen


def _parts(column: npt.NDArray[Any]) -> Iterator[tuple[str, Chosen]]:
    numbers = np.issubdtype(column.dtype, np.number)
    finite = np.isfinite(column) if np.issubdtype(column.dtype, np.floating) else np.full(len(column), True)
    values = np.unique(column[finite])
    if len(values) <= (_MOST_NUMBERS if numbers else _MOST_TEXTS):
        for value in values:
            yield f"{value:g}" if isinstance(value, np.floating) else str(value), column == value
    elif numbers:
        edges = np.unique(np.quantile(column[finite].astype(np.float64), _QUARTILES))
        for place, (lower, upper) in enumerate(pairwise(edges)):
            above = column >= lower if place == 0 else column > lower
            yield f"{lower:g}..{upper:g}", finite & above & (column <= upper)
    if not finite.all():
        yield "missing", ~finite
