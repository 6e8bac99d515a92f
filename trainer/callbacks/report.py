"""What a person reads while a run trains."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import keras

from shardline.trainer import progress
from shardline.trainer.loop import Logs

#: Share of the time for which it is worth to change something.
_MUCH = 0.1


@dataclass
class Meter:
    """What the chief has counted since this process began to train.

    Attributes:
        replicas: Replicas that share the work.
        total_steps: Steps of the whole run, if nothing ends it early.
        first_step: Steps done before this process began.
        steps: Steps done, those before this process included.
        examples: Examples trained by this process's job.
        seconds: Time spent on them.
        waited: Part of it, on the chief, spent waiting for input.
    """

    replicas: int
    total_steps: int = 0
    first_step: int = 0
    steps: int = 0
    examples: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    def add(self, steps: int, examples: int, seconds: float, waited: float) -> None:
        """Counts some steps."""
        self.steps += steps
        self.examples += examples
        self.seconds += seconds
        self.waited += waited


@dataclass
class _Mark:
    """Where the meter stood at the last report."""

    examples: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    started: float = field(default_factory=time.monotonic)


class Report(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Reports steps, metrics, speed, the wait for input and the time left. For the chief alone."""

    def __init__(self, meter: Meter, epochs: int, *, in_memory: bool = False):
        """Takes what is counted, and whether examples are in memory already."""
        super().__init__()
        self._in_memory = in_memory
        self._meter = meter
        self._epochs = epochs
        self._epoch = 0
        self._mark = _Mark()
        self._speed = ""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Remembers the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Reports how far the training has come."""
        meter, mark = self._meter, self._mark
        seconds = max(meter.seconds - mark.seconds, 1e-9)
        rate = (meter.examples - mark.examples) / seconds
        waited = min(1.0, (meter.waited - mark.waited) / seconds)
        each = f" ({rate / meter.replicas:,.0f} per replica)" if meter.replicas > 1 else ""
        self._speed = f"{rate:,.0f} examples/s{each}  input wait {waited:.0%}"
        self._mark = _Mark(meter.examples, meter.seconds, meter.waited, mark.started)
        progress.advance("train", meter.steps, meter.total_steps, "steps", self._text(logs))

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Reports the epoch with its validation."""
        progress.say("train", self._text(logs))

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Says what the run has waited for, where that was much, and what would help."""
        meter = self._meter
        share = min(1.0, meter.waited / meter.seconds) if meter.seconds else 0.0
        if share > _MUCH:
            advice = "larger batches" if self._in_memory else "cache memory, images stored raw or smaller"
            progress.say("train", f"steps waited for input {share:.0%} of the time; what may help: {advice}")

    def _text(self, logs: Logs | None) -> str:
        meter = self._meter
        done = max(1, meter.steps - meter.first_step)
        left = max(0, meter.total_steps - meter.steps)
        eta = (time.monotonic() - self._mark.started) / done * left
        return f"epoch {self._epoch + 1}/{self._epochs}  {_metrics(logs)}  {self._speed}  ETA {eta:.0f} s"


def loss_first(logs: Logs | None) -> list[tuple[str, float]]:
    """Returns the metrics in the order in which people read them: losses first, validation last."""
    return sorted(
        (logs or {}).items(), key=lambda item: (item[0].startswith("val_"), not item[0].endswith("loss"))
    )


def _metrics(logs: Logs | None) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in loss_first(logs))
