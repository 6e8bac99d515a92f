"""What makes a job slow as long as a file exists, so that a test can disturb it in the middle."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

#: Name of the environment variable with the path of the file.
VARIABLE = "TEST_SLOW"


def slow_steps() -> Any:
    """Returns a Keras callback that makes each step a quarter of a second longer while the file exists."""
    import keras

    def wait(batch: int, logs: Any = None) -> None:
        if Path(os.environ.get(VARIABLE, "nowhere")).exists():
            time.sleep(0.25)

    return keras.callbacks.LambdaCallback(on_train_batch_end=wait)
