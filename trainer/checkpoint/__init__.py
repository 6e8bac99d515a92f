"""Checkpoints: a run's training state, its files, and its identity when it resumes.

It may import `distribute` and what `distribute` may import.
"""

from shardline.trainer.checkpoint.state import (
    BEGINNING,
    Position,
    Snapshot,
    TrainingState,
    finite_variables,
    restore_model,
)
from shardline.trainer.checkpoint.store import (
    Checkpoints,
    Identity,
    IdentityRecord,
    check_model_dir,
    format_rate,
)

__all__ = [
    "BEGINNING",
    "Checkpoints",
    "Identity",
    "IdentityRecord",
    "Position",
    "Snapshot",
    "TrainingState",
    "check_model_dir",
    "finite_variables",
    "format_rate",
    "restore_model",
]
