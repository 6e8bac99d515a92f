"""Plots of a report, as <svg> elements in the page's colours, each with a text for screen readers."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup, escape
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, MultipleLocator

from shardline.components.validate.gate.power import POWER, PairedTest
from shardline.components.validate.metrics.evaluation import Curve, NumberScore

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

# Readable on a white page and on a black one: the cell's strength is its opacity.
_CELL = "#3b6fd4"
_MAX_NUMBERED_CLASSES = 20
# Characters of class names that fit side by side below a small matrix.
_LEVEL_CHARACTERS = 24
_LABEL_LENGTHS = (14, 20, 28, 36)

# Line styles of the weakest classes; more than these could not be distinguished.
_NAMED_LINES = ((SECOND, "-"), (FIRST, "--"), (INK, "-."))


def draw_reliability(points: Sequence[tuple[float, float]], description: str) -> str:
    """Draws how often predictions of some probability are right, with the diagonal where both are equal."""
    with _axes((4.2, 4.7), "confidence", "right", shares=True) as axes:
        axes.plot((0, 1), (0, 1), ":", color=SOFT, label="as it should be")
        axes.plot(*zip(*points, strict=True), "-o", color=FIRST, markersize=4, label="measured")
        return _to_svg(axes, description, legend={"ncols": 2})


def draw_confusion(matrix: Sequence[Sequence[int]], names: Sequence[str], most: int) -> str:
    """Draws a confusion matrix, a row per true class; a cell shows its share of the row's examples.

    Of more than `most` classes those with the most mistakes, missed or wrongly predicted, are drawn.
    """
    counts = np.asarray(matrix, dtype=np.int64)
    wrong = counts.sum(axis=0) + counts.sum(axis=1) - 2 * counts.diagonal()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    kept = np.sort(np.argsort(-wrong, kind="stable")[:most])
    short, counts, shares = _shorten([names[i] for i in kept]), counts[kept][:, kept], shares[kept][:, kept]
    side = float(np.clip(1.6 + 0.42 * len(short), 3.4, 8.5))
    colours = LinearSegmentedColormap.from_list("cells", [(*to_rgba(_CELL)[:3], 0.0), to_rgba(_CELL)])
    with _axes((side, side), "predicted class", "true class") as axes:
        axes.grid(visible=False)
        axes.imshow(shares, cmap=colours, vmin=0.0, vmax=1.0, interpolation="none")
        longest = max(map(len, short))
        upright = longest <= 3 or longest * len(short) <= _LEVEL_CHARACTERS
        axes.set_xticks(range(len(short)), short, rotation=0 if upright else 90)
        axes.set_yticks(range(len(short)), short)
        if len(short) <= _MAX_NUMBERED_CLASSES:
            for row, column in np.argwhere(counts > 0):
                colour = "white" if shares[row, column] > 0.5 else INK
                count = f"{counts[row, column]:,}"
                axes.text(column, row, count, ha="center", va="center", fontsize=9, color=colour)
        right = int(np.trace(counts))
        description = (
            f"Confusion matrix of {len(kept)} classes: {right:,} examples on the diagonal, "
            f"{int(counts.sum()) - right:,} off it."
        )
        return _to_svg(axes, description)


def draw_curves(curves: Sequence[Curve], title: str, x: str, y: str) -> str:
    """Draws the curves of classes; those with the smallest areas are named."""
    weakest = sorted(curves, key=lambda curve: curve.area)
    named = weakest[: len(_NAMED_LINES)]
    names = _shorten([curve.name for curve in named])
    with _axes((4.0, 5.2), x, y, shares=True) as axes:
        for curve in weakest[len(named) :]:
            axes.plot(curve.x, curve.y, color=SOFT, linewidth=0.8, alpha=0.5)
        lines = zip(named, names, _NAMED_LINES, strict=False)
        for curve, name, (colour, dashes) in reversed([*lines]):
            axes.plot(curve.x, curve.y, dashes, color=colour, label=f"{name} {curve.area:.3f}")
        smallest = ", ".join(f"{curve.name} {curve.area:.3f}" for curve in named)
        title_of_names = "smallest areas" if len(curves) > len(named) else "areas"
        description = f"{title} of {len(curves):,} classes; smallest areas: {smallest}."
        return _to_svg(axes, description, legend={"title": title_of_names, "reverse": True})


def draw_learning(name: str, history: Mapping[str, Sequence[float]]) -> str:
    """Draws one metric over the epochs, training and, where there is a column `val_<name>`, validation."""
    ranges = []
    with _axes((5.2, 3.2), "epoch", name) as axes:
        for column, label, colour, dashes, marker in (
            (name, "training", FIRST, "-", "o"),
            (f"val_{name}", "validation", SECOND, "--", "s"),
        ):
            if not (values := history.get(column)):
                continue
            epochs = history.get("epoch") or range(1, len(values) + 1)
            marked = marker if len(values) <= 30 else None
            axes.plot(epochs, values, dashes, color=colour, label=label, marker=marked, markersize=4)
            ranges.append(f"{label} from {values[0]:.4g} to {values[-1]:.4g}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        description = f"{name} per epoch: {', '.join(ranges) or 'no values'}"
        return _to_svg(axes, description, legend={"ncols": 2})


def draw_predictions(score: NumberScore) -> str:
    """Draws predicted over true values, a point for each example, with the diagonal where both are equal."""
    true, predicted = np.array(score.points).T
    ends = float(min(true.min(), predicted.min())), float(max(true.max(), predicted.max()))
    names = (f"{name}, {score.unit}" if score.unit else name for name in ("true", "predicted"))
    with _axes((4.4, 4.6), *names) as axes:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        opaque = 0.7 if len(true) < 300 else 0.35  # many points overlap
        axes.plot(true, predicted, "o", color=FIRST, markersize=3, alpha=opaque, markeredgewidth=0)
        axes.plot(ends, ends, ":", color=SOFT, label="predicted = true")
        examples = f"{len(true):,} examples from {true.min():.4g} to {true.max():.4g}"
        description = f"Predicted over true {score.name}, {examples}: RMSE {score.rmse:.4g}."
        return _to_svg(axes, description, legend={})


def draw_power(test: PairedTest) -> str:
    """Draws how often the gate finds a loss, over the true loss."""
    found, scale = test.smallest_loss(), 100 if test.unit else 1
    most = 1.5 * max(found, test.within) if found else 1.0
    losses = np.linspace(0.0, most if test.differ is None else min(most, 1.0), 60)
    with _axes((4.4, 3.2), f"true loss{f', {test.unit}' if test.unit else ''}", "share found") as axes:
        axes.axvline(scale * test.within, linestyle=":", color=SOFT, label="allowed")
        axes.plot(scale * losses, [test.power(float(loss)) for loss in losses], color=FIRST)
        if found:
            axes.plot(scale * found, POWER, "o", color=SECOND, label="found in 9 of 10 cases")
        axes.set(ylim=(-0.02, 1.02))
        return _to_svg(axes, f"How often a loss is found, over the true loss. {test}.", legend={"ncols": 2})


@contextmanager
def _axes(size: tuple[float, float], x: str, y: str, *, shares: bool = False) -> Iterator[Any]:
    """Yields the axes of a figure in the page's style; square where both show shares, 0..1."""
    with mpl.rc_context(_STYLE):
        axes = Figure(figsize=size, layout="constrained").subplots()
        axes.set(xlabel=x, ylabel=y)
        if shares:
            axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MultipleLocator(0.2))
        axes.grid()
        axes.set_axisbelow(True)
        yield axes


def _to_svg(axes: Any, description: str, legend: Mapping[str, Any] | None = None) -> str:
    """Returns a figure as an <svg> element for a page with other figures, in the page's style.

    `legend` are options of the legend, which is above the axes so that it hides no line; None for no legend.
    """
    figure, text = axes.figure, io.StringIO()
    if legend is not None:
        figure.legend(loc="outside upper left", alignment="left", **legend)
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with warnings.catch_warnings(), mpl.rc_context({"svg.hashsalt": description}):
        # The browser has the glyphs that matplotlib's own font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        FigureCanvasSVG(figure).print_svg(text, metadata=nothing)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    # Its style sheet would apply to the whole page, which has the same rule for plots only.
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = svg.replace("font-family: 'DejaVu Sans', sans-serif; ", "")
    # Ids are numbered from 1 in each figure: not unique in the page, and nothing refers to them.
    svg = re.sub(r' id="[A-Za-z][A-Za-z0-9.]*_\d+"', "", svg)
    for drawn, shown in _PAGE_COLOURS.items():
        svg = svg.replace(drawn, shown)
    width, height = figure.get_size_inches() * 72
    opening = (
        f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(description)}" style="max-width:{width * 1.35:.0f}px">'
    )
    # Our own markup; all text in it was escaped when it was drawn.
    return Markup(re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1))


def _shorten(names: Sequence[str]) -> list[str]:
    """Returns the names, shortened to the smallest length at which they stay distinct."""
    for length in _LABEL_LENGTHS:
        half = length // 2
        short = [name if len(name) <= length else f"{name[:half]}…{name[-half:]}" for name in names]
        if len(set(short)) == len(short):
            break
    return short
