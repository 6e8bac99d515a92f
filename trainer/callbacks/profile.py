"""TensorBoard's profile of some steps."""

from __future__ import annotations

from pathlib import Path

import keras
import tensorflow as tf

from shardline.trainer.callbacks.report import Meter


class Profile(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Profiles the steps first..last of the run. For the chief alone.

    The steps of one call into TensorFlow cannot be told apart from outside, so the run has to look up before
    the first and after the last of them.
    """

    def __init__(self, directory: Path, meter: Meter, first: int, last: int):
        super().__init__()
        self._directory = str(directory)
        self._meter = meter
        self._first = first
        self._last = last
        self._running = False

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Starts the profile before its first step."""
        if not self._running and self._meter.steps == self._first - 1:
            tf.profiler.experimental.start(self._directory)
            self._running = True

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Ends it after its last."""
        if self._running and self._meter.steps >= self._last:
            self._stop()

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Ends it where the run ends earlier."""
        if self._running:
            self._stop()

    def _stop(self) -> None:
        tf.profiler.experimental.stop()
        self._running = False
