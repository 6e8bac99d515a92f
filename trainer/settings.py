"""What a training run is asked to do: one frozen, checked value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.errors import SettingsError

STRATEGIES = ("auto", "one_device", "mirrored", "multi_worker_mirrored")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of one training run; the same on every replica.

    Attributes:
        dataset: Dataset directory, a path or gs://.
        model: Built-in model name or the user's own `pkg.module:function`.
        model_dir: Where the chief writes the model; "" means AIP_MODEL_DIR.
        checkpoint_dir: "" means AIP_CHECKPOINT_DIR, else `model_dir`/checkpoints.
        tensorboard_log_dir: "" means AIP_TENSORBOARD_LOG_DIR, else `model_dir`/logs.
        epochs: Passes over the training split.
        per_replica_batch_size: Examples per replica and step; the global batch is this times the replicas.
        learning_rate: Given to the model function; 0 keeps the model's own default.
        hparams: Further keyword arguments of the model function.
        seed: Of weights, dropout and shuffling.
        strategy: One of `STRATEGIES`.
        steps_per_execution: Steps between two looks at the metrics; 0 chooses.
    """

    dataset: str
    model: str
    model_dir: str = ""
    checkpoint_dir: str = ""
    tensorboard_log_dir: str = ""
    epochs: int = 10
    per_replica_batch_size: int = 16
    learning_rate: float = 0.0
    hparams: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    strategy: str = "auto"
    steps_per_execution: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "per_replica_batch_size"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "seed", "steps_per_execution"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.strategy not in STRATEGIES:
            raise SettingsError(f"unknown strategy {self.strategy!r}; there are {', '.join(STRATEGIES)}")
        if not self.model:
            raise SettingsError("model is empty; give a built-in name or pkg.module:function")

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the model function."""
        chosen = {"learning_rate": self.learning_rate} if self.learning_rate else {}
        return {**chosen, **self.hparams}
