"""How long a local job takes from its start to the end of its first step, with and without forked replicas.

python -m benchmarks.start --rounds 5

The same job, a chief and a worker that train the tutorial's network, is started in turn in both ways: forked
from a process that has TensorFlow loaded, and plain; and once more as in a pipeline, where that process is
ready when the job begins. A flag of Python's own (-u) keeps the runner from recognizing a command that it
could fork.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from shardline.pipelines.local.job import CustomJob, run_job
from shardline.pipelines.local.process import GuardedProcess, Launch, start_fork_server
from shardline.pipelines.local.process.processes import with_safe_path
from shardline.trainer.base import progress
from shardline.trainer.base.progress import Event


def measure(dataset: Path, out: Path, replicas: int, *, forked: bool) -> tuple[float, float, float]:
    """Returns seconds to the end of the first step, seconds of the whole job, and its CPU seconds."""
    command = [
        sys.executable,
        *([] if forked else ["-u"]),
        "-m",
        "shardline.trainer.task",
        "--dataset",
        str(dataset),
    ]
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
    """Returns the CPU time of processes that have ended, below a fork server that is running as well."""
    times = [psutil.Process().cpu_times(), *(child.cpu_times() for child in psutil.Process().children())]
    return sum(item.children_user + item.children_system for item in times)


def ready(dataset: str, out: str, replicas: str) -> None:
    """Measures a job that finds a fork server ready, as it does in a pipeline."""
    os.environ.update(with_safe_path(os.environ))  # as there, or nothing could be forked
    with start_fork_server(["shardline.trainer.train"]):
        command = [sys.executable, "-m", "shardline.trainer.task", "-h"]
        GuardedProcess(
            Launch(command, os.environ), lambda line: None
        ).run_to_end()  # waits for it to be ready
        print(json.dumps(measure(Path(dataset), Path(out), int(replicas), forked=True)), flush=True)


def _measure(kind: str, dataset: Path, out: Path, replicas: int) -> tuple[float, float, float]:
    if kind != "ready":
        return measure(dataset, out, replicas, forked=kind == "forked")
    command = [sys.executable, "-m", "benchmarks.start", "--ready", str(dataset), str(out), str(replicas)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    first, whole, cpu = json.loads(done.stdout.splitlines()[-1])
    return first, whole, cpu


def main() -> None:
    """Measures and prints medians and spreads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=2)
    options = parser.parse_args()
    from tests.helpers.datasets import write_dataset

    kinds = ("ready", "forked", "plain")
    found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="start-") as name:
        directory = Path(name)
        write_dataset(directory / "data", records={"train": 512, "validation": 32, "test": 8}, shards=4)
        for number in range(options.rounds):
            for kind in kinds:
                out = directory / f"{number}-{kind}"
                found[kind].append(_measure(kind, directory / "data", out, options.replicas))
                print(f"round {number + 1} {kind}: {found[kind][-1][0]:.1f} s", flush=True)
    for column, what in enumerate(("to the end of the first step", "whole job", "CPU of all replicas")):
        medians = {}
        for kind, rows in found.items():
            values = [row[column] for row in rows]
            medians[kind] = statistics.median(values)
            print(f"{what}, {kind}: {medians[kind]:.1f} s ({min(values):.1f}-{max(values):.1f})")
        ratios = "  ".join(f"{kind} {medians[kind] / medians['plain']:.2f}" for kind in kinds[:2])
        print(f"  of plain: {ratios}")


if __name__ == "__main__":
    ready(*sys.argv[2:]) if sys.argv[1:2] == ["--ready"] else main()
