"""Dealing of a survey's examples: the rows of every shard, in order, in a file of their own.

Files of hashes, 16 bytes for each example, tell which of many hashes repeat another one; they are looked
through in parts that each fit into memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import xxhash

from shardline.components.preprocess import plan, rows
from shardline.components.preprocess.plan_file import PlannedShard
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.survey import Survey
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.trainer.data.manifest import SPLITS
from shardline.trainer.errors import SourceError

_BYTES = rows.DIGEST_BYTES

# Hashes that are in memory together (about 16 MB).
_TOGETHER = 131_072

# More than any hash.
_END = b"\xff" * (_BYTES + 1)


def repeated(paths: Iterable[Path], records: int) -> tuple[int, set[bytes]]:
    """Returns how many hashes repeat an earlier one, and which do.

    Args:
        paths: Files of hashes.
        records: Number of hashes in all of them.
    """
    files, parts = list(paths), records // _TOGETHER + 1
    repeats, found = 0, set()
    bounds = [*(((part << 16) // parts).to_bytes(2) for part in range(parts)), _END]
    for least, end in pairwise(bounds):
        seen: set[bytes] = set()
        for path in files:
            for block in _blocks(path):
                hashes = [each for (each,) in block if least <= each < end]
                before = len(seen)
                if not seen.isdisjoint(hashes) or len(set(hashes)) < len(hashes):
                    for each in hashes:
                        if each in seen:
                            found.add(each)
                        seen.add(each)
                else:
                    seen.update(hashes)
                repeats += len(hashes) - (len(seen) - before)
    return repeats, found


def read(path: Path) -> Iterator[bytes]:
    """Yields the hashes of one file, in order."""
    for block in _blocks(path):
        for (each,) in block:
            yield each


def _blocks(path: Path) -> Iterator[Iterator[tuple[bytes]]]:
    with path.open("rb") as file:
        while block := file.read(_BYTES * 4096):
            yield struct.iter_unpack(f"{_BYTES}s", block)


_DIGEST = rows.DIGEST_BYTES


def deal_rows(found: Survey, settings: PreprocessSettings, work: WorkDirectory) -> tuple[PlannedShard, ...]:
    """Writes the rows of all shards into the work directory and returns what the shards will be.

    Raises:
        SourceError: A split has no example, or a key occurs twice.
    """
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
        appends[row[_DIGEST]](row)
    return {split: rows for split, rows in members.items() if rows}


def _refuse_equal_digests(block: Sequence[bytes]) -> None:
    """Refuses keys that occur twice: their rows follow each other."""
    if len({row[:_DIGEST] for row in block}) == len(block):
        return
    before = b""
    for row in block:
        if row[:_DIGEST] == before:
            raise _occurs_twice(rows.parse(row).name)
        before = row[:_DIGEST]


def _refuse_equal_keys(found: Survey, work: WorkDirectory) -> None:
    """Refuses keys that occur twice, where the digests are of something else."""
    _, equal = repeated([work.keys], sum(found.codes))
    if equal:
        named = (rows.parse(row) for block in found.buckets for row in block)
        raise _occurs_twice(next(row.name for row in named if plan.digest(row.key, 0) in equal))


def _occurs_twice(key: str) -> SourceError:
    return SourceError(f"key {key!r} occurs twice; the key of an example must be unique")
