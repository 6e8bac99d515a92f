"""Judging: seconds that 20,000 predictions of 1,000 classes take to score, with intervals, areas and leads.

`python -m benchmarks.judging`: CPU time and time that passes, without that of making the data.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from shardline.components.validate.metrics.outcomes import ClassOutcomes
from shardline.trainer.manifest import CLASS, LABEL, Label, Tally

EXAMPLES, CLASSES = 20_000, 1_000


def make_outcomes(noise: float) -> ClassOutcomes:
    """Returns outcomes of a model whose logits have more or less noise, on the same examples."""
    random = np.random.default_rng(0)
    labels = random.integers(0, CLASSES, EXAMPLES)
    logits = random.normal(0, 1, (EXAMPLES, CLASSES)).astype(np.float32)
    logits[np.arange(EXAMPLES), labels] += 3.5
    logits += np.random.default_rng(1).normal(0, noise, logits.shape).astype(np.float32)
    odds = np.exp(logits)
    columns = {"age": random.integers(0, 90, EXAMPLES), "camera": random.integers(0, 5, EXAMPLES).astype(str)}
    label = Label(LABEL, CLASS, tuple(f"class {number}" for number in range(CLASSES)))
    probabilities = odds / odds.sum(axis=1, keepdims=True)
    return ClassOutcomes(label, labels, probabilities, columns, predicted=probabilities.argmax(axis=1))


def timed(name: str, work: Callable[[], Any]) -> tuple[float, float]:
    """Prints and returns the CPU time and the time that passes while something is done."""
    cpu, start = time.process_time(), time.perf_counter()
    work()
    took = time.process_time() - cpu, time.perf_counter() - start
    print(f"| {name} | {took[0]:.2f} | {took[1]:.2f} |")
    return took


def main() -> None:
    """Prints the table of the steps, and their sum."""
    ours, champion = make_outcomes(0.0), make_outcomes(0.5)
    champion.summarize(20)
    trained = Tally(tuple(np.bincount(ours.true, minlength=CLASSES).tolist()))
    print("| step | CPU s | s |\n|---|---|---|")
    steps = {
        "metrics, areas, curves, slices and intervals": lambda: ours.summarize(20),
        "leads over a champion": lambda: ours.leads(champion),
        "leads over the most frequent class": lambda: ours.baseline(trained),
    }
    took = [timed(name, work) for name, work in steps.items()]
    print(f"| all | {sum(cpu for cpu, _ in took):.2f} | {sum(passed for _, passed in took):.2f} |")


if __name__ == "__main__":
    main()
