"""How long a local job takes from its start to the end of its first step, with and without forked replicas.

python -m benchmarks.start --rounds 5

The same job, a chief and a worker that train the tutorial's network, is started in turn in both ways: forked
from a process that has TensorFlow loaded, and plain. A flag of Python's own (-u) keeps the runner
from recognizing a command that it could fork.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from pipelines.local.job import CustomJob
from pipelines.local.supervisor import run_job
from trainer import progress
from trainer.progress import Event


def measure(dataset: Path, out: Path, replicas: int, *, forked: bool) -> tuple[float, float, float]:
    """Returns seconds to the end of the first step, seconds of the whole job, and its CPU seconds."""
    command = [sys.executable, *([] if forked else ["-u"]), "-m", "trainer.task", "--dataset", str(dataset)]
    command += [
        "--model",
        "mnist_cnn",
        "--model-dir",
        str(out),
        "--max-steps",
        "20",
        "--steps-per-execution",
        "1",
    ]
    first: list[float] = []

    def listen(event: Event) -> None:
        if event.kind == "progress" and event.unit == "steps" and not first:
            first.append(time.monotonic() - started)

    cpu = _cpu_seconds()
    started = time.monotonic()
    with progress.sink(listen), contextlib.redirect_stdout(None):
        run_job(CustomJob.with_roles(command, replicas), out / "replicas")
    return first[0], time.monotonic() - started, _cpu_seconds() - cpu


def _cpu_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    """Measures and prints medians and spreads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=2)
    options = parser.parse_args()
    from tests.helpers.datasets import write_dataset

    found: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="start-") as name:
        directory = Path(name)
        write_dataset(directory / "data", records={"train": 512, "validation": 32, "test": 8}, shards=4)
        for number in range(options.rounds):
            for forked in found:
                out = directory / f"{number}-{forked}"
                found[forked].append(measure(directory / "data", out, options.replicas, forked=forked))
                print(
                    f"round {number + 1} {'forked' if forked else 'plain'}: {found[forked][-1][0]:.1f} s",
                    flush=True,
                )
    for column, what in enumerate(("to the end of the first step", "whole job", "CPU of all replicas")):
        medians = {}
        for forked, rows in found.items():
            values = [row[column] for row in rows]
            medians[forked] = statistics.median(values)
            print(
                f"{what}, {'forked' if forked else 'plain'}: {medians[forked]:.1f} s "
                f"({min(values):.1f}-{max(values):.1f})"
            )
        print(f"  ratio {medians[True] / medians[False]:.2f}")


if __name__ == "__main__":
    main()
