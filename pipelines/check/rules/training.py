"""Rules about numbers that have to fit together in distributed training."""

from __future__ import annotations

from collections.abc import Iterator

from shardline.pipelines.check.ir import whole
from shardline.pipelines.check.job import Job, jobs
from shardline.pipelines.check.pipeline import Task
from shardline.pipelines.check.registry import error, warning

_GLOBAL_BATCH = ("global_batch_size", "total_batch_size")
_SHARDS = ("shards", "num_shards", "shard_count")
_READERS = ("readers", "input_workers", "num_input_workers")


@error("SL701", Job, fix="take a multiple of the number of replicas, or say the batch size per replica")
def global_batch_is_divisible(job: Job) -> Iterator[str]:
    """A global batch can be divided among the replicas.

    Each accelerator of a machine is a replica of its own.

    Source: tensorflow.org, tf.distribute.InputContext.get_per_replica_batch_size: it raises ValueError.
    """
    machines = job.training_replicas
    chief = job.pool(0)
    devices = whole(chief.machine.get("accelerator_count", 1)) if chief else None
    for name in _GLOBAL_BATCH:
        batch = whole(job.task.value(name)) if name in job.task.declared("parameters") else None
        if batch and machines and devices and batch % (machines * devices):
            yield f"{name} is {batch}, and there are {machines * devices} replicas"


@warning("SL702", Task, fix="take a multiple of the number of workers, chief included")
def shards_are_a_multiple_of_workers(task: Task) -> Iterator[str]:
    """The number of shards is a multiple of the training workers.

    Source: tensorflow.org, tf.data.experimental.AutoShardPolicy.FILE: with fewer files than workers it
    fails, and with a number that does not divide some workers read more.
    """
    names = task.declared("parameters")
    # Where the writer is told how many will read, it sees to the shards itself.
    told = [name for name in _READERS if name in names] or [name for name in _SHARDS if name in names]
    if not task.container or not told:
        return
    for workers in sorted({job.training_replicas or 1 for job in jobs(task.pipeline)} - {1}):
        for name in told:
            count = whole(task.value(name))
            if count and count % workers:
                yield f"{name} is {count}, and {workers} workers read the shards"
