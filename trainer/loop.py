"""The training loop: the model's own `train_step` under a strategy, and Keras callbacks around it.

Keras 3's `fit` fails on several workers (keras-team/keras#20585), its inner `train_step` does not: this
loop calls it through `strategy.run`. Everything that reads a metric is a collective and therefore happens
on every replica, at the same step; only what is done with the numbers differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import keras
import tensorflow as tf

from trainer.data.order import EpochPlan

Logs = dict[str, float]


class Loop:
    """Runs epochs of training and passes of evaluation of one compiled model under one strategy."""

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy, *, steps_per_execution: int):
        """Wraps the model.

        Args:
            model: Compiled and built inside the strategy's scope.
            strategy: The strategy.
            steps_per_execution: Steps that run inside one call into TensorFlow.
        """
        self.model = model
        self._steps_per_execution = steps_per_execution

        def repeat(step: Callable[..., object]) -> Callable[[Iterator[object], tf.Tensor], None]:
            @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
            def run(iterator: Iterator[object], count: tf.Tensor) -> None:
                for _ in tf.range(count):
                    strategy.run(step, args=(next(iterator),))

            return cast("Callable[[Iterator[object], tf.Tensor], None]", run)

        self._train = repeat(model.train_step)
        self._test = repeat(model.test_step)

    def train_epoch(
        self, batches: Iterator[object], plan: EpochPlan, callbacks: keras.callbacks.CallbackList
    ) -> Logs:
        """Trains one epoch and returns the metrics' means over it."""
        self.model.reset_metrics()
        logs: Logs = {}
        for done, count in self._executions(plan.steps):
            callbacks.on_train_batch_begin(done)
            self._train(batches, tf.constant(count))
            logs = self._read_metrics()
            callbacks.on_train_batch_end(done + count - 1, logs)
            if self.model.stop_training:
                break
        return logs

    def evaluate(self, batches: Iterator[object], plan: EpochPlan) -> Logs:
        """Evaluates every example of a split once and returns the exact means."""
        self.model.reset_metrics()
        for _, count in self._executions(plan.steps):
            self._test(batches, tf.constant(count))
        return self._read_metrics()

    def _executions(self, steps: int) -> Iterator[tuple[int, int]]:
        """Yields (steps done so far, steps to run now)."""
        for done in range(0, steps, self._steps_per_execution):
            yield done, min(self._steps_per_execution, steps - done)

    def _read_metrics(self) -> Logs:
        return {name: float(value) for name, value in self.model.get_metrics_result().items()}
