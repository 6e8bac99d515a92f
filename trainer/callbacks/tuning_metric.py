"""The metric of a hyperparameter tuning job, reported as Vertex AI reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import keras

from shardline.trainer import progress
from shardline.trainer.callbacks.report import Meter
from shardline.trainer.errors import SettingsError
from shardline.trainer.loop import Logs
from shardline.trainer.measurements import Measurements


class TuningMetric(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Reports a metric after each validation. For the chief alone."""

    def __init__(self, metric: str, meter: Meter, environ: Mapping[str, str]):
        """Takes what it needs.

        Args:
            metric: To report ("val_accuracy").
            meter: Counts the steps.
            environ: The process's environment.
        """
        super().__init__()
        self._metric = metric
        self._meter = meter
        self._measurements = Measurements(environ)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Reports the metric, unless it is not finite: the trial has then measured nothing."""
        value = float((logs or {}).get(self._metric, math.nan))
        if math.isfinite(value):
            self._measurements.add(self._metric, value, self._meter.steps)
        else:
            progress.say("train", f"{self._metric} is not finite and is not reported")


def check_metric(metric: str, available: Sequence[str]) -> None:
    """Checks the metric before the first step.

    Args:
        metric: To report.
        available: Metrics that an epoch reports.

    Raises:
        SettingsError: When `metric` is none of them.
    """
    if metric not in available:
        raise SettingsError(f"tuning_metric: no metric {metric!r}; there are {', '.join(sorted(available))}")
