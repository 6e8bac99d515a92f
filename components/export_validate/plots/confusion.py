"""A confusion matrix as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure

from shardline.components.export_validate.confusions import Confusions
from shardline.components.export_validate.plots.figure import INK, page_style, to_svg

# Readable on a white page and on a black one: the cell's strength is its opacity.
_CELL = "#3b6fd4"
_MOST_NUMBERED_CLASSES = 20
_LABEL_LENGTHS = (14, 20, 28, 36)


def draw_confusion(confusions: Confusions) -> str:
    """Draws a confusion matrix; a cell is as strong as its share of the row's examples.

    Args:
        confusions: At most some 40 classes: every one is named.

    Returns:
        An <svg> element.
    """
    counts = np.asarray(confusions.counts, dtype=np.int64)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    short = _shorten(confusions.names)
    side = float(np.clip(1.6 + 0.42 * len(short), 3.4, 8.5))
    colours = LinearSegmentedColormap.from_list("cells", [(*to_rgba(_CELL)[:3], 0.0), to_rgba(_CELL)])
    with page_style("confusion"):
        figure = Figure(figsize=(side, side), layout="constrained")
        axes = figure.subplots()
        axes.imshow(shares, cmap=colours, vmin=0.0, vmax=1.0, interpolation="none")
        axes.set_xlabel("predicted class")
        axes.set_ylabel("true class")
        upright = max(map(len, short)) > 3
        axes.set_xticks(range(len(short)), short, rotation=90 if upright else 0)
        axes.set_yticks(range(len(short)), short)
        if len(short) <= _MOST_NUMBERED_CLASSES:
            _write_counts(axes, counts, shares)
        right, total = int(np.trace(counts)), int(counts.sum())
        return to_svg(
            figure,
            f"Confusion matrix of {len(short)} classes: {right:,} examples on the diagonal, "
            f"{total - right:,} beside it.",
        )


def _shorten(names: Sequence[str]) -> list[str]:
    """Returns the names as short as they can be and still be told apart."""
    for length in _LABEL_LENGTHS:
        half = length // 2
        short = [name if len(name) <= length else f"{name[:half]}…{name[-half:]}" for name in names]
        if len(set(short)) == len(short):
            break
    return short


def _write_counts(axes: Any, counts: Any, shares: Any) -> None:
    for row, column in np.argwhere(counts > 0):
        axes.text(
            column,
            row,
            f"{counts[row, column]:,}",
            ha="center",
            va="center",
            fontsize=9,
            color="white" if shares[row, column] > 0.5 else INK,
        )
