"""Equal hashes among many: which examples repeat another one, and whether they are in two splits.

The hashes are files of 16 bytes per example. They are looked through in parts that each fit into memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from pathlib import Path

from components.preprocess.planning import rows
from components.preprocess.planning.plan_file import Plan
from components.preprocess.writing.work_directory import WorkDirectory
from trainer.data.manifest import Duplicates

_BYTES = rows.DIGEST_BYTES

# Hashes that are in memory together (about 16 MB).
_TOGETHER = 131_072

# More than any hash.
_END = b"\xff" * (_BYTES + 1)

#: Groups of equal examples that are named in the manifest, and the most keys of one of them.
_NAMED, _NAMED_KEYS = 20, 10


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


def find(plan: Plan, work: WorkDirectory) -> Duplicates:
    """Finds the examples of a dataset whose stored content is the same to the byte."""
    repeats, found = repeated((work.digests(shard.file) for shard in plan.shards), plan.records)
    if not repeats:
        return Duplicates()
    splits: dict[bytes, set[str]] = {each: set() for each in found}
    members: dict[bytes, list[tuple[str, str, int]]] = {}
    for shard in plan.shards:
        for position, each in enumerate(_read(work.digests(shard.file))):
            if each in splits:
                splits[each].add(shard.split)
                places = members.setdefault(each, [])
                if len(places) < _NAMED_KEYS:
                    places.append((shard.split, shard.file, position))
    straddling = sum(len(where) > 1 for where in splits.values())
    # Those that straddle splits first: they are what must be looked at.
    first = sorted(members, key=lambda each: (-len(splits[each]), members[each]))[:_NAMED]
    return Duplicates(
        examples=repeats,
        straddling=straddling,
        named=tuple(tuple(f"{s}: {_key(work, f, p)}" for s, f, p in members[each]) for each in first),
    )


def _key(work: WorkDirectory, shard: str, position: int) -> str:
    row = next(islice(rows.read(work.rows(shard)), position, None))
    name = rows.parse(row).name
    return name.encode("utf-8", "backslashreplace").decode()


def _read(path: Path) -> Iterator[bytes]:
    for block in _blocks(path):
        for (each,) in block:
            yield each


def _blocks(path: Path) -> Iterator[Iterator[tuple[bytes]]]:
    with path.open("rb") as file:
        while block := file.read(_BYTES * 4096):
            yield struct.iter_unpack(f"{_BYTES}s", block)
