"""A training of four epochs, in the third of which it waits while a file OUT/wait exists.

`python -m tests.helpers.tracked_fit OUT`; it prints HERE when it waits.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import keras

import shardline
from shardline.trainer.checkpoint import preemption
from tests.helpers.fitting import classes, classifier


class Waiting(keras.callbacks.Callback):
    """Waits in the third epoch while a file exists, or until SIGTERM."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.epoch == 2 and self.file.exists():
            print("HERE", flush=True)
            while self.file.exists() and not (preemption.current and preemption.current.requested):
                time.sleep(0.02)


def main(out: Path) -> None:
    checkpoints = out / "checkpoints"
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
    shardline.fit(
        classifier,
        classes(),
        epochs=4,
        batch_size=20,
        verbose=0,
        validation_data=classes(seed=1),
        callbacks=[Waiting(out / "wait"), schedule],
        checkpoint_dir=checkpoints,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
