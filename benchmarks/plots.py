"""Draws docs/_static/two-workers.svg: `python -m benchmarks.plots`.

It reads benchmarks/training.csv, which has one row for each measurement of benchmarks.training: work, batch,
workers, way, milliseconds.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_OUT = _HERE.parent / "docs" / "_static"


def rows() -> list[dict[str, str]]:
    """Returns the measurements."""
    with (_HERE / "training.csv").open() as file:
        return list(csv.DictReader(file))


def step_ms(work: str, batch: int, workers: int, way: str) -> float:
    """Returns the median of one measurement.

    Raises:
        LookupError: When it was not made.
    """
    wanted = (work, str(batch), str(workers), way)
    for row in rows():
        if (row["work"], row["batch"], row["workers"], row["way"]) == wanted:
            return float(row["ms"])
    raise LookupError(wanted)


def rings() -> None:
    """Efficiency of two workers with Shardline's exchange of gradients, next to TensorFlow's own ring."""
    figure, axes = empty_figure("Efficiency of two workers on two cores (1.00 is twice the speed of one)")
    shown = [
        ("tutorial CNN", 64, "ring of Unix sockets"),
        ("tutorial CNN", 512, "ring of Unix sockets"),
        ("ResNet50 96 px", 16, "ring of sockets"),
    ]
    labels = []
    for position, (work, batch, ours) in enumerate(shown):
        one = step_ms(work, batch, 1, "one worker")
        labels.append(f"{work}\n{batch} examples a worker and step")
        ways = (("TensorFlow's ring", "#8c959f", 0.2), (ours, "#1a7f37", -0.2))
        for way, colour, offset in ways:
            share = one / step_ms(work, batch, 2, way)
            axes.barh(-position + offset, share, height=0.36, color=colour)
            axes.text(share + 0.01, -position + offset, f"{share:.2f}", va="center", fontsize=9)
    for name, colour in (("TensorFlow's ring", "#8c959f"), ("Shardline", "#1a7f37")):
        axes.barh([0], [0], color=colour, label=name)
    axes.set_yticks(range(0, -len(shown), -1), labels)
    axes.set(xlim=(0, 1.08), xticks=[0, 0.25, 0.5, 0.75, 1])
    axes.legend(frameon=False, loc="upper right", fontsize=9)
    figure.savefig(_OUT / "two-workers.svg", metadata={"Date": None})


def empty_figure(title: str) -> tuple[Any, Any]:
    """Returns an empty figure and its axes."""
    import matplotlib

    matplotlib.use("svg")
    # The same bytes each time.
    matplotlib.rcParams["svg.hashsalt"] = "performance"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 3.6), layout="constrained")
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


if __name__ == "__main__":
    rings()
