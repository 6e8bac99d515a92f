"""Duplicates: which of many hashes repeat another one, and the examples of a dataset with equal content.

Hashes are in files, 16 bytes for each example, which are looked through in parts that each fit into memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from pathlib import Path

from shardline.components.preprocess import rows
from shardline.components.preprocess.plan import Plan
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.trainer.data.manifest import Duplicates

# Hashes that are in memory together (about 16 MB).
_TOGETHER = 131_072

# More than any hash.
_END = b"\xff" * (rows.DIGEST_BYTES + 1)

#: Groups of equal examples that are named in the manifest, and the most keys of one of them.
_NAMED, _NAMED_KEYS = 20, 10


def repeated(paths: Iterable[Path], records: int) -> tuple[int, set[bytes]]:
    """Returns how many of the `records` hashes in some files repeat an earlier one, and which do."""
    files, parts = list(paths), records // _TOGETHER + 1
    repeats, found = 0, set[bytes]()
    bounds = [*(((part << 16) // parts).to_bytes(2) for part in range(parts)), _END]
    for least, end in pairwise(bounds):
        seen: set[bytes] = set()
        for block in (block for path in files for block in _blocks(path)):
            hashes = [each for (each,) in block if least <= each < end]
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


def find_duplicates(plan: Plan, work: WorkDirectory) -> Duplicates:
    """Finds the examples of a dataset whose stored content is the same to the byte."""
    repeats, found = repeated((work.digests(shard.file) for shard in plan.shards), plan.records)
    splits: dict[bytes, set[str]] = {each: set() for each in found}
    members: dict[bytes, list[tuple[str, str, int]]] = {each: [] for each in found}
    for shard in plan.shards if repeats else ():
        hashes = (each for block in _blocks(work.digests(shard.file)) for (each,) in block)
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


def _blocks(path: Path) -> Iterator[Iterator[tuple[bytes]]]:
    with path.open("rb") as file:
        while block := file.read(rows.DIGEST_BYTES * 4096):
            yield struct.iter_unpack(f"{rows.DIGEST_BYTES}s", block)
