"""Plots of a report, as <svg> elements in the page's colours, each with a text for screen readers."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from markupsafe import escape
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, MultipleLocator

from shardline.components.validate.evaluation import Bin, Curve, NumberScore

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
_MOST_NUMBERED_CLASSES = 20
# Names of classes that stand side by side below a small matrix, in characters.
_LEVEL_CHARACTERS = 24
_LABEL_LENGTHS = (14, 20, 28, 36)

# The weakest classes stand out; nobody could tell more than these apart.
_NAMED_LINES = ((SECOND, "-"), (FIRST, "--"), (INK, "-."))

_MOST_MARKED_EPOCHS = 30

# Groups of equal size along the truth, of each of which the middle error is drawn.
_GROUPS = 12
_LEAST_IN_A_GROUP = 4


def draw_calibration(bins: Sequence[Bin]) -> str:
    """Draws a reliability diagram: the accuracy and the share of the examples over the confidence."""
    total = sum(one.examples for one in bins)
    with _axes((4.0, 4.9), "confidence", "share", shares=True) as axes:
        axes.plot((0, 1), (0, 1), ":", color=SOFT, label="as sure as right")
        lower, heights = [one.lower for one in bins], [one.examples / total for one in bins]
        widths = [one.upper - one.lower for one in bins]
        axes.bar(lower, heights, widths, align="edge", color=SOFT, alpha=0.25, label="of the examples")
        points = [one.confidence for one in bins], [one.accuracy for one in bins]
        axes.plot(*points, "-o", color=FIRST, markersize=4, label="right predictions")
        said = ", ".join(
            f"{one.accuracy:.2f} right of {one.examples:,} at confidence {one.confidence:.2f}" for one in bins
        )
        return _to_svg(axes, f"Reliability: {said}.")


class Confusions(NamedTuple):
    """A confusion matrix, whole or of the classes that are confused most.

    Attributes:
        names: Names of its classes; where some were left out the last one stands for all of these.
        counts: Examples by true class (row) and predicted class (column).
        left_out: Number of classes behind the last name; 0 when the matrix is whole.
    """

    names: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    left_out: int = 0


class ConfusedPair(NamedTuple):
    """One class that is taken for another: the number of examples, and their share of the class, 0..1."""

    true: str
    predicted: str
    # `count` is a method of a tuple.
    examples: int
    share: float


def most_confused(matrix: Sequence[Sequence[int]], names: Sequence[str], most: int) -> Confusions:
    """Returns the matrix of the `most` classes with the most mistakes, missed and wrongly given together.

    They stay in their order; all others become one. A matrix has a row per true class.
    """
    counts = np.asarray(matrix, dtype=np.int64)
    if len(names) <= most:
        return Confusions(tuple(names), tuple(map(tuple, counts.tolist())))
    wrong = counts.sum(axis=0) + counts.sum(axis=1) - 2 * counts.diagonal()
    kept = np.sort(np.argsort(-wrong, kind="stable")[:most])
    place = np.full(len(names), most)
    place[kept] = np.arange(most)
    folded = np.zeros((most + 1, most + 1), np.int64)
    np.add.at(folded, (place[:, None], place[None, :]), counts)
    left_out = len(names) - most
    shown = (*(names[i] for i in kept), f"{left_out:,} others")
    return Confusions(shown, tuple(map(tuple, folded.tolist())), left_out)


def confused_pairs(
    matrix: Sequence[Sequence[int]], names: Sequence[str], most: int
) -> tuple[ConfusedPair, ...]:
    """Returns up to `most` pairs of classes that are confused most often, the most frequent first."""
    counts = np.array(matrix, dtype=np.int64)
    examples = counts.sum(axis=1)
    np.fill_diagonal(counts, 0)
    first = np.argsort(-counts, axis=None, kind="stable")[:most]
    cells = zip(*np.unravel_index(first, counts.shape), strict=True)
    return tuple(
        ConfusedPair(names[i], names[j], int(counts[i, j]), float(counts[i, j] / examples[i]))
        for i, j in cells
        if counts[i, j]
    )


def draw_confusion(confusions: Confusions) -> str:
    """Draws a confusion matrix of at most some 40 classes; a cell shows its share of the row's examples."""
    counts = np.asarray(confusions.counts, dtype=np.int64)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    right, total = int(np.trace(counts)), int(counts.sum())
    return _draw_matrix(
        confusions.names,
        counts,
        shares,
        ("predicted class", "true class"),
        f"Confusion matrix of {len(confusions.names)} classes: {right:,} examples on the diagonal, "
        f"{total - right:,} beside it.",
    )


def draw_together(names: Sequence[str], counts: Sequence[Sequence[int]], examples: Sequence[int]) -> str:
    """Draws how often each label (column) is given to the examples that have another one (row)."""
    cells = np.asarray(counts, dtype=np.int64)
    shares = cells / np.maximum(np.asarray(examples)[:, None], 1)
    said = f"Labels given to the examples that have one, of {len(names)} labels."
    return _draw_matrix(names, cells, shares, ("given label", "label that examples have"), said)


def _draw_matrix(
    names: Sequence[str], counts: Any, shares: Any, axis_names: tuple[str, str], description: str
) -> str:
    short = _shorten(names)
    side = float(np.clip(1.6 + 0.42 * len(short), 3.4, 8.5))
    colours = LinearSegmentedColormap.from_list("cells", [(*to_rgba(_CELL)[:3], 0.0), to_rgba(_CELL)])
    with _axes((side, side), *axis_names) as axes:
        axes.grid(visible=False)
        axes.imshow(shares, cmap=colours, vmin=0.0, vmax=1.0, interpolation="none")
        longest = max(map(len, short))
        upright = longest <= 3 or longest * len(short) <= _LEVEL_CHARACTERS
        axes.set_xticks(range(len(short)), short, rotation=0 if upright else 90)
        axes.set_yticks(range(len(short)), short)
        if len(short) <= _MOST_NUMBERED_CLASSES:
            for row, column in np.argwhere(counts > 0):
                colour = "white" if shares[row, column] > 0.5 else INK
                count = f"{counts[row, column]:,}"
                axes.text(column, row, count, ha="center", va="center", fontsize=9, color=colour)
        return _to_svg(axes, description, legend=None)


def draw_roc(curves: Sequence[Curve]) -> str:
    """Draws ROC curves, those with the smallest areas by name."""
    return _draw_curves(curves, "ROC", "false positive rate", "true positive rate")


def draw_precision_recall(curves: Sequence[Curve]) -> str:
    """Draws precision over recall, the classes with the smallest areas by name."""
    return _draw_curves(curves, "Precision over recall", "recall", "precision")


def _draw_curves(curves: Sequence[Curve], title: str, x: str, y: str) -> str:
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
    said = []
    with _axes((5.2, 3.2), "epoch", name) as axes:
        for column, label, colour, dashes, marker in (
            (name, "training", FIRST, "-", "o"),
            (f"val_{name}", "validation", SECOND, "--", "s"),
        ):
            if not (values := history.get(column)):
                continue
            epochs = history.get("epoch") or range(1, len(values) + 1)
            marked = marker if len(values) <= _MOST_MARKED_EPOCHS else None
            axes.plot(epochs, values, dashes, color=colour, label=label, marker=marked, markersize=4)
            said.append(f"{label} from {values[0]:.4g} to {values[-1]:.4g}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        description = f"{name} per epoch: {', '.join(said) or 'no values'}"
        return _to_svg(axes, description, legend={"ncols": 2})


def draw_predictions(score: NumberScore) -> str:
    """Draws predicted over true, a point for each example, and the line on which both are the same."""
    true, said = np.array(score.points).T
    ends = float(min(true.min(), said.min())), float(max(true.max(), said.max()))
    with _number_axes(score, "predicted", true, said) as axes:
        axes.plot(ends, ends, ":", color=SOFT, label="predicted = true")
        return _to_svg(
            axes,
            f"Predicted over true {score.name}, {len(true):,} examples from {true.min():.4g} to "
            f"{true.max():.4g}: RMSE {score.rmse:.4g}.",
        )


def draw_errors(score: NumberScore) -> str:
    """Draws prediction minus truth over the truth, and the middle error of groups of equal size along it."""
    true, said = np.array(score.points).T
    error, groups = said - true, min(_GROUPS, len(true) // _LEAST_IN_A_GROUP)
    middles = []
    if groups > 1:
        for some in np.array_split(np.argsort(true, kind="stable"), groups):
            middles.append((float(np.median(true[some])), float(np.median(error[some]))))
    with _number_axes(score, "predicted minus true", true, error) as axes:
        axes.axhline(0, linestyle=":", color=SOFT, label="no error")
        if middles:
            axes.plot(*zip(*middles, strict=True), "--s", color=SECOND, markersize=4, label="middle error")
        said_so = ", ".join(f"{middle:.3g} at {value:.4g}" for value, middle in middles)
        description = f"Error over true {score.name}; middle error: {said_so or 'too few examples'}."
        return _to_svg(axes, description, legend={"ncols": 2})


def draw_quantiles(score: NumberScore) -> str:
    """Draws the share of the truth below each quantile over the share that should be, and their line."""
    with _axes((4.4, 4.6), "quantile", "share of true values below it") as axes:
        axes.plot((0, 1), (0, 1), ":", color=SOFT, label="as it should be")
        axes.plot(*zip(*score.calibration, strict=True), "-o", color=FIRST, markersize=5, label="measured")
        said_so = ", ".join(f"{below:.3f} below quantile {share:g}" for share, below in score.calibration)
        return _to_svg(
            axes, f"Share of true {score.name} below each quantile: {said_so}.", legend={"ncols": 2}
        )


@contextmanager
def _number_axes(score: NumberScore, y: str, true: Any, values: Any) -> Iterator[Any]:
    """Yields axes with a point for each example over the truth."""
    names = (f"{name}, {score.unit}" if score.unit else name for name in ("true", y))
    with _axes((4.4, 4.6), *names) as axes:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        opaque = 0.7 if len(true) < 300 else 0.35  # many points lie on each other
        axes.plot(true, values, "o", color=FIRST, markersize=3, alpha=opaque, markeredgewidth=0)
        yield axes


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


def _to_svg(axes: Any, description: str, legend: Mapping[str, Any] | None = MappingProxyType({})) -> str:
    """Returns a figure as an element that can stand in a page beside others, inside of its style.

    Names inside the element derive from the description. `legend` are options of that above the axes, where
    no line lies below the names; None for none.
    """
    figure, text = axes.figure, io.StringIO()
    if legend is not None:
        figure.legend(loc="outside upper left", alignment="left", **legend)
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with warnings.catch_warnings(), mpl.rc_context({"svg.hashsalt": description}):
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
        f'aria-label="{escape(description)}" style="max-width:{width * 1.35:.0f}px">'
    )
    return re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1)


def _shorten(names: Sequence[str]) -> list[str]:
    """Returns the names as short as they can be and still be told apart."""
    for length in _LABEL_LENGTHS:
        half = length // 2
        short = [name if len(name) <= length else f"{name[:half]}…{name[-half:]}" for name in names]
        if len(set(short)) == len(short):
            break
    return short
