"""What makes a job slow as long as a file exists, so that a test can disturb it in the middle."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Name of the environment variable with the path of the file.
VARIABLE = "TEST_SLOW"


def is_slow() -> bool:
    """Whether the file exists."""
    path = os.environ.get(VARIABLE)
    return path is not None and Path(path).exists()


def slow_steps() -> Any:
    """Returns a Keras callback that makes each step a quarter of a second longer while the file exists."""
    import keras

    def wait(batch: int, logs: Any = None) -> None:
        if is_slow():
            time.sleep(0.25)

    return keras.callbacks.LambdaCallback(on_train_batch_end=wait)


class SlowSource:
    """Source of 80 small pictures in two classes; elements of a job array wait while the file exists."""

    class_names = ("dark", "bright")

    def __iter__(self) -> Iterator[Any]:
        import numpy as np

        from shardline.components.preprocess.sources.example import Example

        for number in range(80):
            while "SLURM_ARRAY_TASK_ID" in os.environ and is_slow():
                time.sleep(0.02)
            image = np.full((6, 6, 1), number + 100 * (number % 2), np.uint8)
            yield Example(key=f"{number:03}", label=number % 2, image=image)
