"""How fast `shardline.fit` is against `keras.Model.fit`, in one process.

python -m benchmarks.fit --rounds 5

Both train the same models on the same data, in turn, each time anew: a round is a call of either. Given are
seconds of a call, with tracing, and of one epoch after the first. Medians (smallest-largest) of the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import shardline

EPOCHS = 4


@dataclass(frozen=True)
class Work:
    """A model and its data: examples, size of a batch, steps an execution, whether arrays or a dataset."""

    model: Callable[[], keras.Model]
    shape: tuple[int, ...]
    examples: int
    batch: int
    steps_per_execution: int = 1
    as_dataset: bool = False
    validation: bool = False


def _compiled(layers: list[Any], steps_per_execution: int) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], steps_per_execution=steps_per_execution)
    return model


def small(steps_per_execution: int) -> keras.Model:
    """A model whose steps take less than what is around them."""
    dense = keras.layers.Dense
    return _compiled([keras.Input((20,)), dense(32, activation="relu"), dense(10)], steps_per_execution)


def tutorial_cnn(steps_per_execution: int) -> keras.Model:
    """That of TensorFlow's tutorial of several workers."""
    layers = keras.layers
    return _compiled(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ],
        steps_per_execution,
    )


WORKS = {
    "small, arrays": Work(small, (20,), 20_000, 32),
    "small, arrays, 32 steps an execution": Work(small, (20,), 20_000, 32, 32),
    "small, dataset, 32 steps an execution": Work(small, (20,), 20_000, 32, 32, True),
    "tutorial CNN, arrays": Work(tutorial_cnn, (28, 28, 1), 6_400, 64),
    "tutorial CNN, dataset, validation": Work(tutorial_cnn, (28, 28, 1), 6_400, 64, 1, True, True),
}


class _Epochs(keras.callbacks.Callback):
    """Notes when each epoch ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())


def measure(work: Work, by_keras: bool) -> tuple[float, float]:
    """Returns seconds of one call, and of an epoch after the first."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(work.examples, *work.shape)).astype("float32")
    y = rng.integers(0, 10, work.examples)
    arguments: dict[str, Any] = {"epochs": EPOCHS, "verbose": 0, "callbacks": [epochs := _Epochs()]}
    if work.validation:
        arguments["validation_data"] = (x[:1000], y[:1000])
    data: Any = (x, y)
    if work.as_dataset:
        data = (
            tf.data.Dataset.from_tensor_slices((x, y))
            .shuffle(work.examples, seed=1)
            .batch(work.batch)
            .prefetch(2)
        )
    else:
        arguments["batch_size"] = work.batch
    begin = time.perf_counter()
    if by_keras:
        model = work.model(work.steps_per_execution)
        model.fit(*((data,) if work.as_dataset else data), **arguments)
    else:
        shardline.fit(lambda: work.model(work.steps_per_execution), data, **arguments)
    seconds = time.perf_counter() - begin
    return seconds, (epochs.ends[-1] - epochs.ends[0]) / (EPOCHS - 1)


def _show(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} s ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="calls of each (default: 5)")
    parser.add_argument("--only", action="append", choices=WORKS, help="one work; may be given again")
    chosen = parser.parse_args()
    print("| work | Keras: call | ours: call | speed | Keras: epoch | ours: epoch | speed |\n|" + "---|" * 7)
    for name in chosen.only or WORKS:
        found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for turn in range(2 * chosen.rounds + 2):
            by_keras = turn % 4 in (0, 3)
            measured = measure(WORKS[name], by_keras)
            if turn > 1:  # both have been loaded
                found[by_keras].append(measured)
        columns = []
        for part in range(2):
            theirs, ours = ([one[part] for one in found[way]] for way in (True, False))
            ratio = statistics.median(a / b for a, b in zip(theirs, ours, strict=True))
            columns += [_show(theirs), _show(ours), f"{ratio:.2f}"]
        print(f"| {name} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
