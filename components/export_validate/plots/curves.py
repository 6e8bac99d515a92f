"""Curves of classes against all others: ROC, and precision over recall."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from shardline.components.export_validate.evaluation import Curve
from shardline.components.export_validate.plots.figure import FIRST, INK, SECOND, SOFT, page_style, share_axes, to_svg

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
                curve.x, curve.y, dashes, color=colour, label=f"{_shorten(curve.name)} {curve.area:.3f}"
            )
        axes.legend(loc=legend, title="smallest areas" if len(curves) > len(named) else "areas", reverse=True)
        smallest = ", ".join(f"{curve.name} {curve.area:.3f}" for curve, _ in named)
        return to_svg(figure, f"{title} of {len(curves):,} classes; smallest areas: {smallest}.")


def _shorten(name: str) -> str:
    return name if len(name) <= 20 else name[:19] + "…"
