"""Dealing of a survey's examples: the rows of every shard, in order, in a file of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import xxhash

from shardline.components.preprocess import plan, rows
from shardline.components.preprocess.duplicates import repeated
from shardline.components.preprocess.marks import blocks
from shardline.components.preprocess.plan import PlannedShard
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
    for block in found.buckets:
        if settings.key != "content":
            _refuse_equal_digests(block)
        for split, members in _by_split(block, split_of).items():
            for name, part in zip(names[split], plan.deal(members, dealt[split], counts[split]), strict=True):
                data = b"".join(part)
                with work.rows(name).open("ab") as file:
                    file.write(data)
                hashers[name].update(data)
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


def _by_split(block: Sequence[bytes], split_of: Sequence[str]) -> Mapping[str, list[bytes]]:
    members: dict[str, list[bytes]] = {split: [] for split in SPLITS}
    appends = [members[split].append for split in split_of]
    for row in block:
        appends[row[rows.DIGEST_BYTES]](row)
    return {split: found for split, found in members.items() if found}


def _refuse_equal_digests(block: Sequence[bytes]) -> None:
    """Refuses keys that occur twice: their rows follow each other."""
    if len({row[: rows.DIGEST_BYTES] for row in block}) == len(block):
        return
    before = b""
    for row in block:
        if row[: rows.DIGEST_BYTES] == before:
            raise _occurs_twice(rows.fields(row)[0])
        before = row[: rows.DIGEST_BYTES]


def _refuse_equal_keys(found: Survey, work: WorkDirectory) -> None:
    """Refuses keys that occur twice, where the digests are of something else."""
    _, equal = repeated(lambda: blocks(work.keys), sum(found.codes))
    if equal:
        keys = (rows.fields(row)[0] for block in found.buckets for row in block)
        raise _occurs_twice(next(key for key in keys if plan.digest(key, 0) in equal))


def _occurs_twice(key: bytes) -> SourceError:
    return SourceError(f"key {rows.key_text(key)!r} occurs twice; the key of an example must be unique")
