"""What a training job needs of the platform's quotas."""

from __future__ import annotations

import re
from collections import Counter

from shardline.components.train.pools.job import CustomJobSettings

#: Machine families whose vCPUs count together; every other family has a quota of its own.
_COMMON = ("n1", "e2")
_CPUS = re.compile(r"([a-z0-9]+)-[a-z]+-(\d+)")


def needs(job: CustomJobSettings) -> dict[str, int]:
    """Returns how much of each quota a job takes, by the quota's name without its service.

    Machines with built-in accelerators count by these alone.

    Source: https://cloud.google.com/vertex-ai/docs/quotas#training
    """
    cluster = job.cluster
    wanted: Counter[str] = Counter()
    prefix = "custom_model_training_preemptible_" if job.strategy == "SPOT" else "custom_model_training_"
    pools = (
        cluster.chief,
        cluster.workers,
        cluster.parameter_servers,
        cluster.reduction_server,
        cluster.evaluator,
    )
    for pool in pools:
        if pool is None:
            continue
        if pool.accelerator_type:
            name = pool.accelerator_type.lower().replace("tesla_", "")
            wanted[f"{prefix}{name}_gpus"] += pool.replica_count * pool.accelerator_count
        if found := _CPUS.fullmatch(pool.machine_type):
            family = "" if found[1] in _COMMON else f"{found[1]}_"
            wanted[f"{prefix}{family}cpus"] += pool.replica_count * int(found[2])
    return dict(wanted)
