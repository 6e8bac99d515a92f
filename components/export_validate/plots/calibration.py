"""A reliability diagram: how often a model is right when it says that it is so sure."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from shardline.components.export_validate.evaluation import Bin
from shardline.components.export_validate.plots.figure import FIRST, SOFT, page_style, share_axes, to_svg


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
