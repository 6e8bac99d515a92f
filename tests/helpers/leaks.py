"""Calls `fit` and `evaluate` again and again, and prints what the process holds after each round as JSON."""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import keras
import numpy as np

import shardline

ROUNDS, WIDTH = 5, 1000


class Batches(keras.utils.PyDataset):
    """Batches of arrays."""

    def __init__(self, *arrays: Any) -> None:
        super().__init__()
        self.arrays = arrays

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return tuple(array[:8] for array in self.arrays)


def build() -> keras.Model:
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def sockets() -> int:
    return sum(os.readlink(f"/proc/self/fd/{name}").startswith("socket") for name in _descriptors())


def _descriptors() -> list[str]:
    return [name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]


def main(megabytes: str, cpu_devices: str) -> None:
    count = int(megabytes) * 1_000_000 // (4 * WIDTH)
    data = np.full((count, WIDTH), 0.01, np.float32), np.zeros((count, 1), np.float32)
    options = {"batch_size": 200, "verbose": 0, "cpu_devices": int(cpu_devices)}
    held, passed = [], []
    for _ in range(ROUNDS):
        shardline.fit(build, data, validation_data=data, **options)
        shardline.evaluate(build, data, **options)
        batches = Batches(*data)
        passed.append(weakref.ref(batches))
        shardline.fit(build, batches, verbose=0)
        del batches
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        threads = len(os.listdir("/proc/self/task"))
        held.append(
            {
                "megabytes": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
                "threads": threads,
                "sockets": sockets(),
                "data": sum(each() is not None for each in passed),
            }
        )
    print(json.dumps(held))


if __name__ == "__main__":
    main(*sys.argv[1:])
