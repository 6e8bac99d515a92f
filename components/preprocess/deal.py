"""Dealing of a survey's examples: the rows of every shard, in order, in a file of their own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from shardline.components.preprocess import plan, rows
from shardline.components.preprocess.duplicates import repeated
from shardline.components.preprocess.marks import blocks
from shardline.components.preprocess.plan import PlannedShard
from shardline.components.preprocess.rows import Rows
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.survey import Survey
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.trainer.data.manifest import SPLITS
from shardline.trainer.errors import SourceError


def deal_rows(found: Survey, settings: PreprocessSettings, work: WorkDirectory) -> tuple[PlannedShard, ...]:
    """Writes the rows of all shards into the work directory and returns what the shards will be."""
    split_of = plan.SplitCodes(settings.split).splits(found.existing)
    counts = _shard_counts(found, settings, split_of)
    names = {
        split: [plan.shard_name(split, index, count) for index in range(count)]
        for split, count in counts.items()
    }
    hashers = {name: xxhash.xxh3_128() for shards in names.values() for name in shards}
    records = dict.fromkeys(hashers, 0)
    dealt = dict.fromkeys(counts, 0)
    if settings.key == "content":
        _refuse_equal_keys(found, work)
    codes = {split: np.array([each == split for each in split_of]) for split in counts}
    for block in found.buckets:
        if settings.key != "content":
            _refuse_equal_digests(block)
        for split, count in counts.items():
            members = np.flatnonzero(codes[split][block.heads["code"]])
            for name, part in zip(names[split], plan.deal(members, dealt[split], count), strict=True):
                if len(part):
                    hashers[name].update(rows.append(work.rows(name), block.take(part)))
                    records[name] += len(part)
            dealt[split] += len(members)
    return tuple(
        PlannedShard(name, split, records[name], hashers[name].hexdigest())
        for split in counts
        for name in names[split]
    )


def _shard_counts(found: Survey, settings: PreprocessSettings, split_of: Sequence[str]) -> dict[str, int]:
    """Returns the number of shards of each split that has examples."""
    records, sizes = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    for split, count, size in zip(split_of, found.codes, found.sizes, strict=True):
        records[split] += count
        sizes[split] += size
    plan.refuse_empty_splits(records, settings.split)
    shards = settings.shards or plan.shards_for_size(sizes["train"], settings.shard_size)
    return {
        split: plan.shard_count(count, records["train"], readers=settings.readers, shards=shards)
        for split, count in records.items()
        if count
    }


def _refuse_equal_digests(block: Rows) -> None:
    """Refuses keys that occur twice: their rows follow each other."""
    equal = np.ones(max(block.count - 1, 0), bool)
    for half in ("order", "order_low"):
        equal &= block.heads[half][1:] == block.heads[half][:-1]
    if equal.any():
        raise _occurs_twice(block.keys()[int(equal.argmax())])


def _refuse_equal_keys(found: Survey, work: WorkDirectory) -> None:
    """Refuses keys that occur twice, where the digests are of something else."""
    groups = repeated(blocks(work.keys), sum(found.codes), work.scratch)
    equal = {value for hashes, _ in groups for value in hashes.tolist()}
    if not equal:
        return
    seen = set[bytes]()
    for block in found.buckets:
        keys = block.keys()
        for number, value in enumerate(plan.digests(keys, 0)[1].tolist()):
            if value in equal and keys[number] in seen:
                raise _occurs_twice(keys[number])
            if value in equal:
                seen.add(keys[number])


def _occurs_twice(key: bytes) -> SourceError:
    return SourceError(f"key {rows.key_text(key)!r} occurs twice; the key of an example must be unique")
