"""Early stopping on a validation metric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from shardline.trainer.errors import SettingsError


class Stopping(keras.callbacks.EarlyStopping):  # type: ignore[misc]  # keras has no types
    """Ends the training when a metric no longer improves, and gives the model its best weights back.

    For every replica: all of them see the same metrics and stop after the same epoch.
    """

    def __init__(self, metric: str, patience: int, available: Sequence[str]):
        """Checks the metric before the first step, where Keras would warn after an epoch.

        Args:
            metric: That has to improve ("val_loss").
            patience: Epochs without improvement after which the training ends.
            available: Metrics that an epoch reports.

        Raises:
            SettingsError: When `metric` is none of them.
        """
        if metric not in available:
            there = ", ".join(sorted(available)) or "none: the dataset has no validation split"
            raise SettingsError(f"early_stopping: no metric {metric!r}; there are {there}")
        # Keras finds no direction for the losses of several outputs.
        mode = "min" if metric.endswith(("loss", "error")) else "auto"
        super().__init__(metric, patience=patience, mode=mode, restore_best_weights=True)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts anew.

        Raises:
            SettingsError: When Keras does not know which way the metric improves.
        """
        super().on_train_begin(logs)
        try:
            self._set_monitor_op()
        except ValueError:
            raise SettingsError(
                f"early_stopping: Keras does not know whether {self.monitor} improves upwards or downwards; "
                "use another metric, or bring an EarlyStopping with its mode as a callback"
            ) from None
