"""The rules, a file for each noun; importing this package registers them all."""

from shardline.pipelines.check.rules import (
    access,
    environment,
    images,
    labels,
    limits,
    machines,
    parameters,
    payload,
    placeholders,
    pools,
    schedules,
    scheduling,
    secrets,
    structure,
    tasks,
    training,
)

__all__ = [
    "access",
    "environment",
    "images",
    "labels",
    "limits",
    "machines",
    "parameters",
    "payload",
    "placeholders",
    "pools",
    "schedules",
    "scheduling",
    "secrets",
    "structure",
    "tasks",
    "training",
]
