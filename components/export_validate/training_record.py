"""What a training left beside its model file: settings.json and history.csv, both optional."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardline.trainer.errors import ModelError

# The names that the trainer gives to these files; importing them would import Keras.
SETTINGS_FILE = "settings.json"
HISTORY_FILE = "history.csv"

_NOT_METRICS = ("epoch", "examples", "seconds")


@dataclass(frozen=True)
class TrainingRecord:
    """How a model was trained.

    Attributes:
        settings: Content of settings.json; empty where there is none.
        history: Columns of history.csv, a number per epoch, NaN where there is none; empty without a file.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    history: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that have a curve, without their `val_` twins."""
        names = [name for name in self.history if name not in _NOT_METRICS]
        return tuple(name for name in names if name.removeprefix("val_") not in names or name[:4] != "val_")


def read(model_file: Path) -> TrainingRecord:
    """Reads what lies beside a model file.

    Raises:
        ModelError: When one of the files is there and cannot be read.
    """
    settings, history = model_file.with_name(SETTINGS_FILE), model_file.with_name(HISTORY_FILE)
    return TrainingRecord(
        _read_settings(settings) if settings.exists() else {},
        _read_history(history) if history.exists() else {},
    )


def _read_settings(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path} beside the model: {error}; remove it or train again") from None
    if not isinstance(content, dict) or not isinstance(content.get("model"), str):
        raise ModelError(f"{path} beside the model names no model function; remove it or train again")
    return content


def _read_history(path: Path) -> Mapping[str, tuple[float, ...]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        names = list(rows[0]) if rows else []
        return {name: tuple(float(row[name] or math.nan) for row in rows) for name in names}
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise ModelError(f"cannot read {path} beside the model: {error}; remove it or train again") from None
