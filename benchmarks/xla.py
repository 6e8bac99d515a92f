"""XLA on this machine's CPU: `python -m benchmarks.xla mlp|mnist_cnn|resnet50 [ROUNDS]`.

Both ways train in one process and take turns: without XLA, with it, and so on; medians of the rounds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from shardline.trainer.loop.build import build
from shardline.trainer.loop.step import StepLoop
from shardline.trainer.manifest import CLASS, LABEL, DatasetInfo, Feature, Label

#: Shape of an image, or () for a table of 20 columns; batch; steps a round; rounds.
CASES: Mapping[str, tuple[tuple[int, ...], int, int, int]] = {
    "mlp": ((), 64, 200, 20),
    "mnist_cnn": ((28, 28, 1), 64, 10, 16),
    "resnet50": ((96, 96, 3), 16, 1, 7),
}


def make_loop(name: str, jit_compile: bool) -> StepLoop:
    """Returns a loop of a built-in model over one batch, again and again."""
    shape, batch, _, _ = CASES[name]
    random = np.random.default_rng(0)
    keras.utils.set_random_seed(1)
    if shape:
        inputs = {"image": Feature("image", "uint8", shape, "raw")}
        x = random.integers(0, 256, (batch, *shape)).astype(np.uint8)
    else:
        inputs = {f"c{number}": Feature(f"c{number}", "float32") for number in range(20)}
        x = {column: random.normal(size=batch).astype(np.float32) for column in inputs}
    info = DatasetInfo(
        shape, {LABEL: Label(LABEL, CLASS, tuple("0123456789"))}, inputs, {"train": batch}, inputs
    )
    data = (x, random.integers(0, 10, batch))
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    with strategy.scope():
        model = build(name, info, {})
        model._symbolic_build(data_batch=tf.nest.map_structure(lambda one: one[:1], data))
    batches = iter(tf.data.Dataset.from_tensors(data).repeat())
    return StepLoop(model, strategy, batches, lambda gradients: gradients, jit_compile=jit_compile)


def main(name: str, rounds: str = "") -> None:
    """Prints the seconds of the first step, and the milliseconds of a later one, of both ways."""
    _, batch, steps, usual = CASES[name]
    loops, first = {}, {}
    for way in ("off", "on"):
        loops[way] = make_loop(name, way == "on")
        started = time.perf_counter()
        loops[way].train([batch])
        first[way] = time.perf_counter() - started
        loops[way].train([batch] * 3)
    times: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(int(rounds or usual)):
        for way, loop in loops.items():
            started = time.perf_counter()
            loop.train([batch] * steps)
            times[way].append((time.perf_counter() - started) / steps * 1000)
    for way, taken in times.items():
        spread = f"{min(taken):.2f}-{max(taken):.2f}"
        print(
            f"{name} {way}: first step {first[way]:.1f} s, then {statistics.median(taken):.2f} ms ({spread})"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
