"""What checkpoints cost: how long training stands still for one, and how much longer it takes in all.

python -m benchmarks.checkpoints

One worker on one core, tutorial CNN and ResNet50; steps with and without a checkpoint after each stretch take
turns. The share is that of a run that saves at the default interval.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.training import WORKS
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.keras_compat import tensorflow_internals


def measure(work: str, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Returns seconds of a stretch of steps without a checkpoint, with one, and seconds of standing still."""
    import keras
    import tensorflow as tf

    from benchmarks import training_process
    from shardline.trainer.checkpoint import Checkpoints, Identity, Position, TrainingState
    from shardline.trainer.cluster import read_cluster
    from shardline.trainer.distribute import make_summation
    from shardline.trainer.loop.step import StepLoop

    name, side, batch, steps = WORKS[work]
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    settings = TrainSettings(dataset="-", model=name)
    data = training_process._batch(batch, side)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = training_process._model({"model": name, "side": side})
        model._symbolic_build(data_batch=data)
    batches = iter(tf.data.Dataset.from_tensors(data).repeat())
    loop = StepLoop(model, strategy, batches, make_summation(settings, strategy, read_cluster({})))
    loop.train([batch] * 3)
    state = TrainingState(model)
    without, saving, still = [], [], []
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as directory:
        checkpoints = Checkpoints(
            Path(directory), Identity(name, "benchmark", state.variables), keep=2, write=True
        )
        state.capture(Position())  # traces
        for number in range(1, rounds + 1):
            for found, saves in ((without, False), (saving, True)):
                started = time.perf_counter()
                if saves:
                    checkpoints.save(state.capture(Position(steps=number)))
                    still.append(time.perf_counter() - started)
                loop.train([batch] * steps)
                checkpoints.wait()
                found.append(time.perf_counter() - started)
    return without, saving, still


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    tensorflow_internals.keep_freed_memory()
    tensorflow_internals.import_tensorflow()
    interval = TrainSettings(dataset="-", model="-").checkpoint_minutes * 60
    print(f"| | training stands still | all that it costs | share, every {interval:g} s |\n|---|---|---|---|")
    for work in ("tutorial CNN, B=64", "ResNet50 96 px, B=16"):
        without, saving, still = measure(work, options.rounds)
        cost = statistics.median(saving) - statistics.median(without)
        spread = f"{min(still) * 1e3:,.0f}-{max(still) * 1e3:,.0f}"
        print(
            f"| {work} | {statistics.median(still) * 1e3:,.0f} ms ({spread}) | {cost * 1e3:,.0f} ms "
            f"| {cost / interval:.4%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
