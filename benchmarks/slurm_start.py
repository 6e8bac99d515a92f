"""How long a job on Slurm takes from `sbatch` to its first step, next to plain processes of this machine.

python -m benchmarks.slurm_start --rounds 5

A Slurm of two nodes on loopback, with Slurm's own scheduling intervals. The same job, a chief and a worker
that train the tutorial's network, is started in turn as processes of this machine, each of which imports
TensorFlow as the tasks of Slurm do; by `sbatch`; and forked from a process that has TensorFlow loaded, as
`shardline train` starts them here. Then 1,000 parts are submitted as one array.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardline.components.runs.slurm_job import cancel_job, read_job
from shardline.pipelines.engines.custom_job import CustomJob
from shardline.pipelines.engines.slurm import engine
from shardline.pipelines.engines.slurm.settings import SlurmSettings
from shardline.pipelines.local.job.supervisor import run_job

_FILE = "FIRST_STEP_FILE"
_REPOSITORY = Path(__file__).resolve().parents[1]


def first_step() -> Any:
    """Returns a Keras callback that writes the time of the end of the first step into a file."""
    import keras

    def write(batch: int, logs: Any = None) -> None:
        with contextlib.suppress(FileExistsError), open(os.environ[_FILE], "x") as file:
            file.write(str(time.time()))

    return keras.callbacks.LambdaCallback(on_train_batch_end=write)


def measure(kind: str, dataset: Path, out: Path) -> float:
    """Returns seconds to the end of the first step."""
    command = [sys.executable, *(["-u"] if kind == "plain" else []), "-m", "shardline.trainer.task"]
    options = {
        "--dataset": dataset,
        "--model": "mnist_cnn",
        "--model-dir": out,
        "--max-steps": 5,
        "--callback": "benchmarks.slurm_start:first_step",
    }
    command += [str(word) for pair in options.items() for word in pair]
    job = CustomJob.with_roles(command, 2, display_name="train")
    out.mkdir()
    file = out / "first-step"
    os.environ[_FILE] = str(file)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        started = time.time()
        if kind == "slurm":
            job_id = engine.submit(engine.batch_job(job, out / "job"), SlurmSettings())
            engine.follow(job_id, out / "job", topic="train")
        else:
            run_job(job, out / "replicas")
    return float(file.read_text()) - started


def submit_array(directory: Path, parts: int) -> float:
    """Returns seconds to submit one array of `parts` elements, which is cancelled at once."""
    job = CustomJob.with_roles(["true"], 1, display_name="parts")
    batch = replace(engine.batch_job(job, directory), elements=parts)
    started = time.time()
    job_id = engine.submit(batch, SlurmSettings())
    seconds = time.time() - started
    assert len(read_job(job_id).elements) == parts
    cancel_job(job_id)
    return seconds


def main() -> None:
    """Measures and prints medians and spreads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", type=int, default=1000)
    options = parser.parse_args()
    from tests.helpers.datasets import write_dataset
    from tests.helpers.slurm import start

    kinds = ("plain", "slurm", "forked")
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    os.environ["PYTHONPATH"] = str(_REPOSITORY)
    with (
        tempfile.TemporaryDirectory(prefix="slurm-start-") as name,
        start(scheduler="sched_interval=60") as slurm,
    ):
        os.environ.update(slurm.environ)
        print(subprocess.check_output(["sinfo", "--version"], text=True).strip(), flush=True)
        directory = Path(name)
        write_dataset(directory / "data", records={"train": 512, "validation": 32, "test": 8}, shards=4)
        for number in range(options.rounds):
            for kind in kinds:
                found[kind].append(measure(kind, directory / "data", directory / f"{number}-{kind}"))
                print(f"round {number + 1} {kind}: {found[kind][-1]:.2f} s", flush=True)
        for kind, values in found.items():
            print(f"{kind}: {statistics.median(values):.2f} s ({min(values):.2f}-{max(values):.2f})")
        more = statistics.median(found["slurm"]) - statistics.median(found["plain"])
        print(f"Slurm takes {more:.2f} s more than plain processes")
        seconds = [
            submit_array(directory / f"array-{number}", options.parts) for number in range(options.rounds)
        ]
        print(
            f"an array of {options.parts:,} parts is submitted in {statistics.median(seconds):.2f} s "
            f"({min(seconds):.2f}-{max(seconds):.2f})"
        )


if __name__ == "__main__":
    main()
