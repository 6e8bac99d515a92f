"""Plots as inline SVG that follows the page's colours, light or dark."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Drawn in these colours, which nothing else uses, and then replaced by the page's own.
_INK, _LINE, _TRAIN, _VALIDATION = "#010203", "#040506", "#070809", "#0a0b0c"
_PAGE_COLOURS = {
    _INK: "currentColor",
    _LINE: "var(--line)",
    _TRAIN: "var(--train)",
    _VALIDATION: "var(--validation)",
}
# Readable on a white page and on a black one: the cell's strength is its opacity.
_CELL = "#3b6fd4"
_MOST_NUMBERED_CLASSES = 20
_MOST_NAMED_CLASSES = 40

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "text.parse_math": False,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _LINE,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
}


def draw_curve(name: str, history: Mapping[str, Sequence[float]]) -> str:
    """Draws one metric over the epochs, training and, where there is one, validation.

    Args:
        name: Of the metric, a column of `history`; its validation twin is `val_<name>`.
        history: Columns of numbers, one per epoch.

    Returns:
        An <svg> element.
    """
    lines = (
        (name, "training", _TRAIN, "-", "o"),
        (f"val_{name}", "validation", _VALIDATION, "--", "s"),
    )
    with mpl.rc_context({**_STYLE, "svg.hashsalt": f"curve {name}"}):
        figure = Figure(figsize=(5.2, 3.2), layout="constrained")
        axes = figure.subplots()
        for column, label, colour, dashes, marker in lines:
            values = history.get(column)
            if values is None:
                continue
            epochs = history.get("epoch") or range(1, len(values) + 1)
            few = len(values) <= 30
            axes.plot(
                epochs,
                values,
                dashes,
                color=colour,
                label=label,
                marker=marker if few else None,
                markersize=4,
            )
        axes.set_xlabel("epoch")
        axes.set_ylabel(name)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(linewidth=0.6)
        axes.legend()
        return _to_svg(figure, f"{name} per epoch: {_describe_curve(name, history)}")


def draw_confusion(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """Draws a confusion matrix; a cell is as strong as its share of the row's examples.

    Args:
        matrix: Examples by true class (row) and predicted class (column).
        names: Of the classes.

    Returns:
        An <svg> element.
    """
    counts = np.asarray(matrix, dtype=np.int64)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    classes = len(names)
    side = float(np.clip(1.6 + 0.42 * classes, 3.4, 8.5))
    colours = LinearSegmentedColormap.from_list("cells", [(*to_rgba(_CELL)[:3], 0.0), to_rgba(_CELL)])
    with mpl.rc_context({**_STYLE, "svg.hashsalt": "confusion"}):
        figure = Figure(figsize=(side, side), layout="constrained")
        axes = figure.subplots()
        axes.imshow(shares, cmap=colours, vmin=0.0, vmax=1.0, interpolation="none")
        axes.set_xlabel("predicted class")
        axes.set_ylabel("true class")
        if classes <= _MOST_NAMED_CLASSES:
            short = [_shorten(name) for name in names]
            upright = max(map(len, short)) > 3
            axes.set_xticks(range(classes), short, rotation=90 if upright else 0)
            axes.set_yticks(range(classes), short)
        if classes <= _MOST_NUMBERED_CLASSES:
            _write_counts(axes, counts, shares)
        wrong = int(counts.sum() - np.trace(counts))
        return _to_svg(
            figure,
            f"Confusion matrix of {classes} classes: {int(np.trace(counts)):,} examples on the diagonal are "
            f"right, {wrong:,} beside it are wrong.",
        )


def _write_counts(axes: Any, counts: Any, shares: Any) -> None:
    for row, column in np.argwhere(counts > 0):
        axes.text(
            column,
            row,
            f"{counts[row, column]:,}",
            ha="center",
            va="center",
            fontsize=9,
            color="white" if shares[row, column] > 0.5 else _INK,
        )


def _describe_curve(name: str, history: Mapping[str, Sequence[float]]) -> str:
    said = []
    for column, label in ((name, "training"), (f"val_{name}", "validation")):
        if values := history.get(column):
            said.append(f"{label} from {values[0]:.4g} to {values[-1]:.4g}")
    return ", ".join(said) or "no values"


def _shorten(name: str) -> str:
    return name if len(name) <= 14 else name[:13] + "…"


def _to_svg(figure: Figure, description: str) -> str:
    """Returns the figure as an element that can stand in a page beside others.

    Args:
        figure: What to draw. The caller's style context must still be open.
        description: What a screen reader says instead.
    """
    text = io.StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with warnings.catch_warnings():
        # The browser has the glyphs that matplotlib's own font lacks; here they are only measured.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        FigureCanvasSVG(figure).print_svg(text, metadata=nothing)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    # Its style sheet would apply to the whole page, which has the same rule for plots alone.
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = svg.replace("font-family: 'DejaVu Sans', sans-serif; ", "")
    # Numbered in each figure anew, they would not be unique in the page; nothing refers to them.
    svg = re.sub(r' id="[A-Za-z][A-Za-z0-9.]*_\d+"', "", svg)
    for drawn, shown in _PAGE_COLOURS.items():
        svg = svg.replace(drawn, shown)
    width, height = figure.get_size_inches() * 72
    opening = (
        f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{_escape(description)}" style="max-width:{width * 1.35:.0f}px">'
    )
    return re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1)


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
