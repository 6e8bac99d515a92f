"""Which shards an input worker reads: shard policies.

Where the number of input workers W divides the number of shards, a worker's records are whole shards and
it opens only those (file); elsewhere it reads all shards and keeps its own records (data). Both give the
order of `shardline.trainer.data.order`. The policy off gives that up: every worker reads every shard in an order of
its own, so that an epoch has as many examples as ever, but some of them twice and others not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardline.trainer.errors import DatasetError


class ShardPolicy(NamedTuple):
    """A shard policy and why it is the one.

    Attributes:
        name: "file", "data" or "off".
        reason: In words, for the log.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class WorkerShards:
    """What one input worker reads.

    Attributes:
        policy: "file", "data" or "off".
        files: Names of the shards to open, in round-robin order.
        indices: Position of each of them in the split.
        keep_every: Of the records read, keep one in this many ...
        keep_offset: ... starting with this one.
        order: Which of several orders of the same records the worker reads: its index where the policy
            is off, else 0.
    """

    policy: str
    files: tuple[str, ...]
    indices: tuple[int, ...]
    keep_every: int = 1
    keep_offset: int = 0
    order: int = 0


def choose_policy(policy: str, shards: int, workers: int) -> ShardPolicy:
    """Resolves "auto" and refuses "file" where it cannot be.

    Args:
        policy: "auto", "file", "data" or "off".
        shards: Number of shards of the split.
        workers: Number of input workers: processes that read data.

    Raises:
        DatasetError: When whole shards are asked for and cannot be dealt out evenly.
    """
    if policy == "off":
        return ShardPolicy("off", "as asked for: every worker reads all shards in its own order")
    divides = shards % workers == 0
    if policy == "file" and not divides:
        raise DatasetError(
            f"shard_policy file needs a multiple of {workers} shards, one share for each input worker, and "
            f"the split has {shards}; preprocess with shards={-(-shards // workers) * workers}, or use "
            "shard_policy auto or data"
        )
    if policy == "data":
        return ShardPolicy("data", "as asked for: every worker reads all shards and keeps its share")
    counts = f"{shards} shard{'s' * (shards != 1)}, {workers} input worker{'s' * (workers != 1)}"
    if divides:
        return ShardPolicy("file", f"{counts}: each reads whole shards of its own")
    return ShardPolicy("data", f"{counts}: each reads all shards and keeps its share")


def worker_shards(files: Sequence[str], workers: int, worker: int, policy: str = "auto") -> WorkerShards:
    """Decides which shards an input worker opens and which of their records it keeps.

    Args:
        files: Shards of the split, in order.
        workers: Number of input workers.
        worker: Which of them this is.
        policy: "auto", "file", "data" or "off".

    Raises:
        DatasetError: When whole shards are asked for and cannot be dealt out evenly.
    """
    chosen = choose_policy(policy, len(files), workers).name
    every = tuple(range(len(files)))
    if chosen == "off":
        return WorkerShards("off", tuple(files), every, order=worker)
    if chosen == "data":
        return WorkerShards("data", tuple(files), every, keep_every=workers, keep_offset=worker)
    mine = every[worker::workers]
    return WorkerShards("file", tuple(files[i] for i in mine), mine)
