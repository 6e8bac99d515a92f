"""Environment of a replica: what it takes over from the process that starts it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from shardline.trainer.cluster.cluster import SECRET_VARIABLE

#: Variables that belong to one replica and must not be inherited from the shell.
PLATFORM_VARIABLES = (
    "TF_CONFIG",
    "CLUSTER_SPEC",
    "AIP_MODEL_DIR",
    "AIP_CHECKPOINT_DIR",
    "AIP_TENSORBOARD_LOG_DIR",
    "CLOUD_ML_PROJECT_ID",
    "CLOUD_ML_JOB_ID",
    "CLOUD_ML_TRIAL_ID",
    "CLOUD_ML_HP_METRIC_FILE",
    SECRET_VARIABLE,
)

#: First directory of the path, with a sitecustomize that moves the working directory to its end.
_SITE = str(Path(__file__).with_name("path"))


def with_safe_path(env: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment in which modules of the working directory come after all others."""
    others = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", _SITE)]
    return {**env, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join([_SITE, *others])}
