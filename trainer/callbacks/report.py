"""What a person reads while a run trains."""

from __future__ import annotations

import time

import keras

from trainer import progress
from trainer.data.order import EpochPlan
from trainer.loop import Logs


class Report(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Reports steps, metrics, examples per second and the time left. For the chief alone."""

    def __init__(self, plan: EpochPlan, first_epoch: int, epochs: int):
        super().__init__()
        self._plan = plan
        self._first_step = first_epoch * plan.steps
        self._epochs = epochs
        self._epoch = first_epoch
        self._done = self._first_step
        self._started = time.monotonic()
        self._epoch_started = self._started
        self._rate = 0.0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Starts the clock of the epoch."""
        self._epoch = epoch
        self._epoch_started = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Reports how far the training has come."""
        self._done = self._epoch * self._plan.steps + batch + 1
        examples = min((batch + 1) * self._plan.global_batch_size, self._plan.records)
        self._rate = examples / (time.monotonic() - self._epoch_started)
        progress.advance("train", self._done, self._epochs * self._plan.steps, "steps", self._text(logs))

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Reports the epoch with its validation."""
        progress.say("train", self._text(logs))

    def _text(self, logs: Logs | None) -> str:
        steps_left = self._epochs * self._plan.steps - self._done
        eta = (time.monotonic() - self._started) / (self._done - self._first_step) * steps_left
        return (
            f"epoch {self._epoch + 1}/{self._epochs}  {_metrics(logs)}  "
            f"{self._rate:,.0f} examples/s  ETA {eta:.0f} s"
        )


def loss_first(logs: Logs | None) -> list[tuple[str, float]]:
    """Returns the metrics in the order in which people read them: losses first, validation last."""
    return sorted(
        (logs or {}).items(), key=lambda item: (item[0].startswith("val_"), not item[0].endswith("loss"))
    )


def _metrics(logs: Logs | None) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in loss_first(logs))
