"""A program that waits at one moment of a training: `python -m tests.helpers.ends MOMENT OUT`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

import shardline
from shardline.trainer import preemption
from shardline.trainer.base.errors import RestartError
from shardline.trainer.checkpoint import Checkpoints
from shardline.trainer.distribute import peers


class Moments(keras.callbacks.Callback):
    """Waits at a moment until the process was asked to stop, which some moments end at once."""

    def __init__(self, moment: str) -> None:
        super().__init__()
        self.moment = moment

    def reach(self, moment: str) -> None:
        if moment == self.moment:
            self.moment = ""
            print("HERE", flush=True)
            asked = threading.Event()
            for _ in range(6000):
                if preemption.current is None or preemption.current.requested:
                    break
                asked.wait(0.01)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2:
            self.reach("step")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.reach("evaluation")

    def on_train_end(self, logs: Any = None) -> None:
        self.reach("last")


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def main(moment: str, out: str) -> None:
    at = Moments(moment)
    if moment == "connect":
        peers.Peers.handshake = lambda *_: None  # type: ignore[method-assign]
    if moment == "peers":
        peers._REPORT_AFTER_S = 0.0
    if moment == "write":
        write: Callable[..., None] = Checkpoints._write_files

        def slowly(self: Checkpoints, *arguments: Any) -> None:
            at.reach("write")
            write(self, *arguments)

        Checkpoints._write_files = slowly  # type: ignore[method-assign]
    if moment != "thread":
        shardline.strategy()
        at.reach("before")
    x = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
    y = (x[:, 0] > 0).astype("int64")

    def fit() -> None:
        data = {"validation_data": (x, y), "checkpoint_dir": Path(out, "checkpoints")}
        shardline.fit(build, (x, y), batch_size=6, epochs=2, verbose=0, callbacks=[at], **data)

    if moment == "mistake":
        shardline.fit(build, (x, y), batch_sizes=6)
    if moment == "thread":
        caught: list[Exception] = []

        def run() -> None:
            try:
                fit()
            except RestartError as error:
                caught.append(error)

        fitting = threading.Thread(target=run)
        fitting.start()
        fitting.join()
        print(f"caught {caught}", flush=True)
        return
    fit()
    at.reach("after")
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
