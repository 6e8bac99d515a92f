"""Compiled retraining pipelines: a job to compile in, and what is in them."""

import yaml

from shardline.components.custom_job import Cluster, CustomJobSettings, WorkerPool

JOB = CustomJobSettings(cluster=Cluster.of(WorkerPool(replica_count=1, machine_type="n1-standard-8")))


def blessed_tasks(text: str) -> dict[str, dict]:
    """Returns the tasks of the branch in which a blessed model is published."""
    spec = yaml.safe_load(text)
    (tasks,) = (
        item["dag"]["tasks"]
        for name, item in spec["components"].items()
        if "register" in item.get("dag", {}).get("tasks", {}) and name.count("-") == 2
    )
    return tasks
