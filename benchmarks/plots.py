"""Draws docs/_static/performance-*.svg and two-workers.svg: `python -m benchmarks.plots`.

It reads benchmarks/training.csv, which has one row for each measurement of benchmarks.training: work, batch,
workers, way, milliseconds.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_OUT = _HERE.parent / "docs" / "_static"
_WAYS = {"TensorFlow's ring": "#9a6700", "ring of sockets": "#1a7f37", "sockets, every 4 steps": "#0969da"}
#: Bytes of gradients by work.
_GRADIENTS = {"tutorial CNN": 11.1e6, "ResNet50 96 px": 94.4e6}
#: Loopback between two pinned processes: bytes per second (13.6 Gbit/s), seconds. From docs/performance.md.
_BANDWIDTH, _LATENCY = 1.7e9, 0.1e-3
#: Seconds to lay out and add up a byte of gradients. From docs/performance.md.
_HANDLING = 0.4e-9


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


def efficiencies() -> None:
    """Efficiency of two workers by batch, measured and predicted."""
    figure, axes = empty_figure("Two workers: share of twice one worker's speed")
    batches = sorted({int(row["batch"]) for row in rows() if row["work"] == "tutorial CNN"})
    ones = [step_ms("tutorial CNN", batch, 1, "one worker") for batch in batches]
    for way, colour in _WAYS.items():
        values = [
            one / step_ms("tutorial CNN", batch, 2, way) for batch, one in zip(batches, ones, strict=True)
        ]
        axes.plot(batches, values, "o", color=colour, label=f"{way}, measured")
    slope = (ones[-1] - ones[0]) / (batches[-1] - batches[0])
    line = range(32, 1025, 16)
    predicted = [efficiency((ones[0] + slope * (batch - batches[0])) / 1e3, 2) for batch in line]
    axes.plot(line, predicted, "-", color="#1a7f37", linewidth=1, label="ring of sockets, predicted")
    axes.set(xlabel="examples per worker and step (tutorial CNN, 11 MB of gradients)", ylim=(0, 1.05))
    axes.set_xscale("log", base=2)
    axes.set_xticks([32, 64, 128, 256, 512, 1024], ["32", "64", "128", "256", "512", "1,024"])
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(_OUT / "performance-batch.svg", metadata={"Date": None})


def steps() -> None:
    """Where a step's time goes on two workers."""
    figure, axes = empty_figure("A step on two workers")
    shown = [("tutorial CNN", 64), ("tutorial CNN", 512), ("ResNet50 96 px", 16)]
    labels, position = [], 0
    for work, batch in shown:
        one = step_ms(work, batch, 1, "one worker")
        for way, colour in _WAYS.items():
            whole = step_ms(work, batch, 2, way)
            axes.barh(position, one / whole, color="#8c959f")
            axes.barh(position, 1 - one / whole, left=one / whole, color=colour)
            labels.append(f"{work}, B={batch}: {way}")
            position -= 1
    axes.set_yticks(range(0, position, -1), labels)
    axes.set(xlabel="share of the step: as on one worker (grey), all else (coloured)", xlim=(0, 1))
    figure.savefig(_OUT / "performance-step.svg", metadata={"Date": None})


def workers() -> None:
    """Predicted efficiency by number of workers on a network of 10 Gbit/s, by batch."""
    figure, axes = empty_figure(
        "Predicted: 10 Gbit/s, 0.1 ms, tutorial CNN on workers of this machine's speed"
    )
    counts = [1, 2, 4, 8, 16, 32]
    ones = {batch: step_ms("tutorial CNN", batch, 1, "one worker") / 1e3 for batch in (64, 512)}
    slope = (ones[512] - ones[64]) / (512 - 64)
    for batch, shade in ((64, "#9a6700"), (512, "#1a7f37"), (4096, "#0969da")):
        seconds = ones[64] + slope * (batch - 64)
        values = [efficiency(seconds, count, bandwidth=1.25e9) for count in counts]
        axes.plot(counts, values, "o-", color=shade, label=f"B={batch:,}")
    axes.set(xlabel="workers", ylim=(0, 1.05))
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(_OUT / "performance-workers.svg", metadata={"Date": None})


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


def efficiency(seconds: float, workers: int, bandwidth: float = _BANDWIDTH) -> float:
    """Returns what is predicted of the tutorial CNN: the share of so many times one worker's speed.

    In a ring every worker sends and receives 2 (N - 1) / N times the gradients, in 2 (N - 1) turns
    (Patarasuk and Yuan, 2009), and lays out and adds up each byte.
    """
    size = _GRADIENTS["tutorial CNN"]
    sent = 2 * (workers - 1) / workers * size
    exchange = sent / bandwidth + 2 * (workers - 1) * _LATENCY + size * _HANDLING
    return seconds / (seconds + (exchange if workers > 1 else 0))


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
    efficiencies()
    steps()
    workers()
    rings()
