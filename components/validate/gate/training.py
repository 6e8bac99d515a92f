"""Record of a training: the settings and the history that it wrote next to its model file."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardline.trainer.base import files
from shardline.trainer.base.errors import ModelError
from shardline.trainer.base.settings import HISTORY_FILE, SETTINGS_FILE

_NOT_METRICS = ("epoch", "examples", "seconds")


@dataclass(frozen=True)
class TrainingRecord:
    """Settings and history that a training wrote next to its model file; empty where there is no such file.

    `settings` is the content of settings.json, `history` the columns of history.csv, NaN for no number.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    history: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the trainer."""
        return self.settings.get("settings") or {}

    @property
    def initial_model(self) -> str:
        """The training's option `initial_model`; "" where it started from none."""
        return str(self.options.get("initial_model") or "")

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the dataset of the training; "" where it is not known."""
        return str(self.settings.get("fingerprint") or "")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that have a curve, without their `val_` twins."""
        names = [name for name in self.history if name not in _NOT_METRICS]
        return tuple(name for name in names if name.removeprefix("val_") not in names or name[:4] != "val_")


def read_training(model_file: Path) -> TrainingRecord:
    """Reads settings.json and history.csv next to a model file; raises ModelError when one cannot be read."""
    path, settings, history = model_file.with_name(SETTINGS_FILE), {}, dict[str, tuple[float, ...]]()
    if path.exists():
        settings = files.read_json(path, ModelError)
        if not isinstance(settings.get("model"), str) or not isinstance(settings.get("settings", {}), dict):
            raise ModelError(f"{path} next to the model names no model function; remove it or train again")
    path = model_file.with_name(HISTORY_FILE)
    try:
        rows = list(csv.DictReader(path.read_text("utf-8").splitlines())) if path.exists() else []
        # A metric with a value per class is a list in the file, and has no curve.
        single = [name for name in (rows[0] if rows else ()) if not any(row[name][:1] == "[" for row in rows)]
        history = {name: tuple(float(row[name] or math.nan) for row in rows) for name in single}
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise ModelError(f"cannot read {path} next to the model: {error}; remove it or train again") from None
    return TrainingRecord(settings, history)
