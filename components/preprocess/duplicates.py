"""Duplicates: which of many hashes repeat another one, and the examples of a dataset with equal content.

Hashes are in files, 16 bytes for each example, which are looked through in parts that each fit into memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, pairwise

from shardline.components.preprocess import rows
from shardline.components.preprocess.marks import HASH_BYTES, Found
from shardline.components.preprocess.plan import Plan
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.trainer.data.manifest import Duplicates

# Hashes that are in memory together (about 16 MB).
_TOGETHER = 131_072

# More than any hash.
_END = b"\xff" * (HASH_BYTES + 1)

#: Groups of equal examples that are named in the manifest, and the most keys of one of them.
_NAMED, _NAMED_KEYS = 20, 10


def repeated(blocks: Callable[[], Iterable[bytes]], records: int) -> tuple[int, set[bytes]]:
    """Returns how many of the `records` hashes in some blocks repeat an earlier one, and which do."""
    parts = records // _TOGETHER + 1
    repeats, found = 0, set[bytes]()
    bounds = [*(((part << 16) // parts).to_bytes(2) for part in range(parts)), _END]
    for least, end in pairwise(bounds):
        seen: set[bytes] = set()
        for block in blocks():
            hashes = [each for (each,) in _hashes(block) if least <= each < end]
            different = set(hashes)
            if len(different) == len(hashes) and seen.isdisjoint(different):
                seen |= different
                continue
            for each in hashes:
                if each in seen:
                    repeats += 1
                    found.add(each)
                seen.add(each)
    return repeats, found


def find_duplicates(plan: Plan, work: WorkDirectory, done: Mapping[str, Found]) -> Duplicates:
    """Finds the examples of a dataset whose stored content is the same to the byte."""
    repeats, found = repeated(
        lambda: (block for shard in plan.shards for block in done[shard.file].hashes()), plan.records
    )
    splits: dict[bytes, set[str]] = {each: set() for each in found}
    members: dict[bytes, list[tuple[str, str, int]]] = {each: [] for each in found}
    for shard in plan.shards if repeats else ():
        hashes = (each for block in done[shard.file].hashes() for (each,) in _hashes(block))
        for position, each in enumerate(hashes):
            if each in splits:
                splits[each].add(shard.split)
                if len(members[each]) < _NAMED_KEYS:
                    members[each].append((shard.split, shard.file, position))
    # Those that straddle splits first: they are what must be looked at.
    first = sorted(members, key=lambda each: (-len(splits[each]), members[each]))[:_NAMED]
    return Duplicates(
        examples=repeats,
        straddling=sum(len(where) > 1 for where in splits.values()),
        named=tuple(tuple(f"{s}: {_key(work, f, p)}" for s, f, p in members[each]) for each in first),
    )


def _key(work: WorkDirectory, shard: str, position: int) -> str:
    row = next(islice(rows.read(work.rows(shard)), position, None))
    return rows.key_text(rows.fields(row)[0]).encode("utf-8", "backslashreplace").decode()


def _hashes(block: bytes) -> Iterator[tuple[bytes]]:
    return struct.iter_unpack(f"{HASH_BYTES}s", block)
