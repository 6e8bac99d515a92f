"""A learning curve: one metric over the epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from shardline.components.export_validate.plots.figure import FIRST, SECOND, page_style, to_svg

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
        return to_svg(figure, f"{name} per epoch: {_describe(name, history)}")


def _describe(name: str, history: Mapping[str, Sequence[float]]) -> str:
    said = []
    for column, label in ((name, "training"), (f"val_{name}", "validation")):
        if values := history.get(column):
            said.append(f"{label} from {values[0]:.4g} to {values[-1]:.4g}")
    return ", ".join(said) or "no values"
