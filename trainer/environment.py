"""Where a run writes: flags first, then the AIP_* variables of Vertex AI, then a default."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardline.trainer.errors import SettingsError
from shardline.trainer.files import local_path
from shardline.trainer.settings import TrainSettings


@dataclass(frozen=True)
class OutputDirs:
    """The directories of a run, as this machine sees them.

    Attributes:
        model: model.keras, metrics.json, history.csv, settings.json.
        checkpoints: What a restarted job resumes from.
        logs: TensorBoard's event files.
    """

    model: Path
    checkpoints: Path
    logs: Path


def output_dirs(settings: TrainSettings, environ: Mapping[str, str]) -> OutputDirs:
    """Decides where the run writes.

    Raises:
        SettingsError: When neither a flag nor AIP_MODEL_DIR names the model directory.
    """
    model = settings.model_dir or environ.get("AIP_MODEL_DIR", "")
    if not model:
        raise SettingsError(
            "no place for the model: give --model-dir, or set AIP_MODEL_DIR as Vertex AI does"
        )
    base = local_path(model)
    checkpoints = settings.checkpoint_dir or environ.get("AIP_CHECKPOINT_DIR", "")
    logs = settings.tensorboard_log_dir or environ.get("AIP_TENSORBOARD_LOG_DIR", "")
    return OutputDirs(
        model=base,
        checkpoints=local_path(checkpoints) if checkpoints else base / "checkpoints",
        logs=local_path(logs) if logs else base / "logs",
    )


def has_evaluator(environ: Mapping[str, str]) -> bool:
    """Whether the job that this process belongs to has an evaluator: worker pool 3 of Vertex AI.

    TF_CONFIG never lists one, CLUSTER_SPEC does.
    """
    try:
        pools = json.loads(environ.get("CLUSTER_SPEC") or "{}").get("cluster", {})
    except (ValueError, AttributeError):
        return False  # not Vertex AI's, and read for nothing else
    return bool(pools.get("workerpool3")) if isinstance(pools, dict) else False
