"""Plots of numbers in a report: predicted against true, the error over the truth, quantiles' calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from shardline.components.validate.evaluation import NumberScore
from shardline.components.validate.plots import FIRST, SECOND, SOFT, add_legend, page_style, to_svg

# Groups of equal size along the truth, of each of which the middle error is drawn.
_GROUPS = 12
_LEAST_IN_A_GROUP = 4


def draw_predictions(score: NumberScore) -> str:
    """Draws predicted over true, a point for each example, and the line on which both are the same."""
    true, said = np.array(score.points).T
    ends = float(min(true.min(), said.min())), float(max(true.max(), said.max()))
    with page_style(f"predicted {score.name} {score.rmse}"):
        figure = Figure(figsize=(4.4, 4.6), layout="constrained")
        axes = _axes(figure, _with_unit("true", score), _with_unit("predicted", score))
        axes.plot(true, said, "o", color=FIRST, markersize=3, alpha=_strength(true), markeredgewidth=0)
        axes.plot(ends, ends, ":", color=SOFT, label="predicted = true")
        add_legend(figure)
        return to_svg(
            figure,
            f"Predicted over true {score.name}, {len(true):,} examples from {true.min():.4g} to "
            f"{true.max():.4g}: RMSE {score.rmse:.4g}.",
        )


def draw_errors(score: NumberScore) -> str:
    """Draws prediction minus truth over the truth, and the middle error of groups of examples."""
    true, said = np.array(score.points).T
    error = said - true
    with page_style(f"errors {score.name} {score.rmse}"):
        figure = Figure(figsize=(4.4, 4.6), layout="constrained")
        axes = _axes(figure, _with_unit("true", score), _with_unit("predicted minus true", score))
        axes.plot(true, error, "o", color=FIRST, markersize=3, alpha=_strength(true), markeredgewidth=0)
        axes.axhline(0, linestyle=":", color=SOFT, label="no error")
        middles = _middles(true, error)
        if middles:
            axes.plot(*zip(*middles, strict=True), "--s", color=SECOND, markersize=4, label="middle error")
        add_legend(figure, columns=2)
        said_so = ", ".join(f"{middle:.3g} at {value:.4g}" for value, middle in middles)
        return to_svg(figure, f"Error over true {score.name}; middle error: {said_so or 'too few examples'}.")


def draw_calibration(score: NumberScore) -> str:
    """Draws the share of the truth below each quantile over the share that should be, and their line."""
    with page_style(f"quantiles {score.name} {score.calibration}"):
        figure = Figure(figsize=(4.4, 4.6), layout="constrained")
        axes = _axes(figure, "quantile", "share of true values below it")
        axes.plot((0, 1), (0, 1), ":", color=SOFT, label="as it should be")
        axes.plot(*zip(*score.calibration, strict=True), "-o", color=FIRST, markersize=5, label="measured")
        add_legend(figure, columns=2)
        said_so = ", ".join(f"{below:.3f} below quantile {share:g}" for share, below in score.calibration)
        return to_svg(figure, f"Share of true {score.name} below each quantile: {said_so}.")


def _middles(true: Any, error: Any) -> list[tuple[float, float]]:
    """Returns (truth, error) in the middle of groups of equal size along the truth."""
    order = np.argsort(true, kind="stable")
    groups = np.array_split(order, min(_GROUPS, len(order) // _LEAST_IN_A_GROUP)) if len(order) >= 8 else []
    return [(float(np.median(true[one])), float(np.median(error[one]))) for one in groups]


def _strength(values: Sequence[float]) -> float:
    """Returns how opaque points are, which may lie on each other where there are many."""
    return 0.7 if len(values) < 300 else 0.35


def _with_unit(text: str, score: NumberScore) -> str:
    return f"{text}, {score.unit}" if score.unit else text


def _axes(figure: Figure, x: str, y: str) -> Any:
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.grid()
    axes.set_axisbelow(True)
    return axes
