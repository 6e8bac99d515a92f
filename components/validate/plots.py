"""A figure that becomes an <svg> element: its style, its colours, its text for screen readers.

A reliability diagram: how often a model is right when it says that it is so sure.

A confusion matrix as a plot.

Curves of classes against all others: ROC, and precision over recall.

A learning curve: one metric over the epochs.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, MultipleLocator

from shardline.components.validate.evaluation import Bin, Curve
from shardline.components.validate.metrics import Confusions

# Drawn in these colours, which nothing else uses, and then replaced by the page's own.
INK, LINE, SOFT, FIRST, SECOND = "#010203", "#040506", "#050607", "#070809", "#0a0b0c"
_PAGE_COLOURS = {
    INK: "currentColor",
    LINE: "var(--line)",
    SOFT: "var(--soft)",
    FIRST: "var(--train)",
    SECOND: "var(--validation)",
}

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
}


@contextmanager
def page_style(name: str) -> Iterator[None]:
    """Draws what is drawn meanwhile in the page's style.

    Args:
        name: Of the figure, different from others on the page: names inside the element derive from it.
    """
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        yield


def share_axes(figure: Figure, x: str, y: str) -> Any:
    """Returns axes that both show shares, 0..1, as a square.

    Args:
        figure: Gets the axes.
        x: Name of what lies across.
        y: Name of what lies upwards.
    """
    axes = figure.subplots()
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel=x, ylabel=y, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MultipleLocator(0.2))
    axes.grid()
    axes.set_axisbelow(True)
    return axes


def to_svg(figure: Figure, description: str) -> str:
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


def draw_calibration(bins: Sequence[Bin]) -> str:
    """Draws the accuracy over the confidence, and how many examples have which confidence.

    Args:
        bins: Lowest confidence first.

    Returns:
        An <svg> element.
    """
    total = sum(one.examples for one in bins)
    with page_style("calibration"):
        figure = Figure(figsize=(4.0, 4.0), layout="constrained")
        axes = share_axes(figure, "confidence", "share")
        axes.plot((0, 1), (0, 1), ":", color=SOFT, label="as sure as right")
        axes.bar(
            [one.lower for one in bins],
            [one.examples / total for one in bins],
            [one.upper - one.lower for one in bins],
            align="edge",
            color=SOFT,
            alpha=0.25,
            label="of the examples",
        )
        axes.plot(
            [one.confidence for one in bins],
            [one.accuracy for one in bins],
            "-o",
            color=FIRST,
            markersize=4,
            label="right predictions",
        )
        axes.legend(loc="upper left")
        return to_svg(figure, f"Reliability: {_describe(bins)}.")


def _describe(bins: Sequence[Bin]) -> str:
    said = (
        f"{one.accuracy:.2f} right of {one.examples:,} at confidence {one.confidence:.2f}" for one in bins
    )
    return ", ".join(said) or "nothing was measured"


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


# The weakest classes stand out; more than these nobody could tell apart.
_NAMED_LINES = ((SECOND, "-"), (FIRST, "--"), (INK, "-."))


def draw_roc(curves: Sequence[Curve]) -> str:
    """Draws ROC curves, those with the smallest areas by name.

    Returns:
        An <svg> element.
    """
    return _draw(curves, "ROC", "false positive rate", "true positive rate", "lower right")


def draw_precision_recall(curves: Sequence[Curve]) -> str:
    """Draws precision over recall, the classes with the smallest areas by name.

    Returns:
        An <svg> element.
    """
    return _draw(curves, "Precision over recall", "recall", "precision", "lower left")


def _draw(curves: Sequence[Curve], title: str, x: str, y: str, legend: str) -> str:
    weakest = sorted(curves, key=lambda curve: curve.area)
    named = list(zip(weakest, _NAMED_LINES, strict=False))
    with page_style(title):
        figure = Figure(figsize=(4.0, 4.0), layout="constrained")
        axes = share_axes(figure, x, y)
        for curve in weakest[len(named) :]:
            axes.plot(curve.x, curve.y, color=SOFT, linewidth=0.8, alpha=0.5)
        for curve, (colour, dashes) in reversed(named):
            axes.plot(
                curve.x,
                curve.y,
                dashes,
                color=colour,
                label=f"{_curves_shorten(curve.name)} {curve.area:.3f}",
            )
        axes.legend(loc=legend, title="smallest areas" if len(curves) > len(named) else "areas", reverse=True)
        smallest = ", ".join(f"{curve.name} {curve.area:.3f}" for curve, _ in named)
        return to_svg(figure, f"{title} of {len(curves):,} classes; smallest areas: {smallest}.")


def _curves_shorten(name: str) -> str:
    return name if len(name) <= 20 else name[:19] + "…"


_MOST_MARKED_EPOCHS = 30


def draw_learning(name: str, history: Mapping[str, Sequence[float]]) -> str:
    """Draws one metric over the epochs, training and, where there is one, validation.

    Args:
        name: Of the metric, a column of `history`; its validation twin is `val_<name>`.
        history: Columns of numbers, one per epoch.

    Returns:
        An <svg> element.
    """
    lines = (
        (name, "training", FIRST, "-", "o"),
        (f"val_{name}", "validation", SECOND, "--", "s"),
    )
    with page_style(f"curve {name}"):
        figure = Figure(figsize=(5.2, 3.2), layout="constrained")
        axes = figure.subplots()
        for column, label, colour, dashes, marker in lines:
            values = history.get(column)
            if values is None:
                continue
            epochs = history.get("epoch") or range(1, len(values) + 1)
            axes.plot(
                epochs,
                values,
                dashes,
                color=colour,
                label=label,
                marker=marker if len(values) <= _MOST_MARKED_EPOCHS else None,
                markersize=4,
            )
        axes.set_xlabel("epoch")
        axes.set_ylabel(name)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid()
        axes.legend()
        return to_svg(figure, f"{name} per epoch: {_learning_describe(name, history)}")


def _learning_describe(name: str, history: Mapping[str, Sequence[float]]) -> str:
    said = []
    for column, label in ((name, "training"), (f"val_{name}", "validation")):
        if values := history.get(column):
            said.append(f"{label} from {values[0]:.4g} to {values[-1]:.4g}")
    return ", ".join(said) or "no values"
