"""The rules, a file for each noun; importing this package registers them all."""

from shardline.pipelines.check.rules import (
    access,
    images,
    jobs,
    machines,
    payload,
    pools,
    schedules,
    structure,
)

__all__ = [
    "access",
    "images",
    "jobs",
    "machines",
    "payload",
    "pools",
    "schedules",
    "structure",
]
