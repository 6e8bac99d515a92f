"""Duplicates: which of many hashes occur more than once, and the examples of a dataset with equal content.

A hash has 64 bits: among 100 million different contents two are confused once in 3,700 datasets, among a
million once in 37 million. More hashes than fit into memory are divided by their first bits, in files.
"""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from shardline.components.preprocess import rows
from shardline.components.preprocess.marks import Found
from shardline.components.preprocess.plan import Plan
from shardline.components.preprocess.rows import Numbers
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.trainer.data.manifest import SPLITS, Duplicates

# Hashes that are in memory together (about 10 MB with what finding them takes).
_TOGETHER = 262_144

#: Groups of equal examples that are named in the manifest, and the most keys of one of them.
_NAMED, _NAMED_KEYS = 20, 10


def repeated(blocks: Iterable[bytes], records: int, scratch: Path) -> Iterator[tuple[Numbers, Numbers]]:
    """Yields hashes that occur more than once, and the number of the record of each, group by group.

    `blocks` are the hashes of so many records, from number 0 on, 8 bytes each.
    """
    for hashes, numbers in _divided(blocks, records, scratch):
        in_order = np.sort(hashes)
        values = in_order[1:][in_order[1:] == in_order[:-1]]
        if len(values):
            where = np.flatnonzero(np.isin(hashes, values))
            order = where[np.lexsort((numbers[where], hashes[where]))]
            yield hashes[order], numbers[order]


def find_duplicates(plan: Plan, work: WorkDirectory, done: Mapping[str, Found]) -> Duplicates:
    """Finds the examples of a dataset whose stored content is the same to the byte."""
    shards = plan.shards
    starts = np.array([0, *accumulate(shard.records for shard in shards)])
    by_name = sorted(range(len(shards)), key=lambda number: (shards[number].split, shards[number].file))
    places = np.argsort(by_name)
    split_bits = np.array([1 << SPLITS.index(shard.split) for shard in shards], np.uint8)
    blocks = (block for shard in shards for block in done[shard.file].hashes())
    repeats = straddling = 0
    named: list[tuple[int, int, int, list[int]]] = []
    for hashes, numbers in repeated(blocks, plan.records, work.scratch):
        begins = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]]))
        repeats += len(hashes) - len(begins)
        of_shard = np.searchsorted(starts, numbers, side="right") - 1
        there = np.bitwise_or.reduceat(split_bits[of_shard], begins).astype(np.int64)
        splits = (there & 1) + (there >> 1 & 1) + (there >> 2)
        straddling += int((splits > 1).sum())
        # Those that straddle splits first: they are what must be looked at.
        place, ends = places[of_shard[begins]], np.append(begins[1:], len(hashes))
        for group in np.lexsort((numbers[begins], place, -splits))[:_NAMED].tolist():
            members = numbers[begins[group] : min(ends[group], begins[group] + _NAMED_KEYS)].tolist()
            named.append((-int(splits[group]), int(place[group]), members[0], members))
        named = heapq.nsmallest(_NAMED, named)
    where = [[_find(number, starts) for number in members] for *_, members in named]
    return Duplicates(
        examples=repeats,
        straddling=straddling,
        named=tuple(
            tuple(f"{shards[s].split}: {_key(work, shards[s].file, p)}" for s, p in each) for each in where
        ),
    )


def _find(number: int, starts: Numbers) -> tuple[int, int]:
    """Returns the number of the shard of a record, and its position there."""
    shard = int(np.searchsorted(starts, number, side="right")) - 1
    return shard, number - int(starts[shard])


def _key(work: WorkDirectory, shard: str, position: int) -> str:
    for block in rows.read(work.rows(shard)):
        if position < block.count:
            return rows.key_text(block.keys()[position]).encode("utf-8", "backslashreplace").decode()
        position -= block.count
    raise IndexError(position)


def _divided(blocks: Iterable[bytes], records: int, scratch: Path) -> Iterator[tuple[Numbers, Numbers]]:
    """Yields all hashes and the numbers of their records, in parts that have no hash in common."""
    bits = (records // _TOGETHER).bit_length()
    if not bits:
        hashes = np.frombuffer(b"".join(blocks), "<u8")
        yield hashes, np.arange(len(hashes))
        return
    with tempfile.TemporaryDirectory(prefix="hashes-", dir=scratch) as directory:
        paths = [Path(directory, str(part)) for part in range(1 << bits)]
        for first, hashes in _collected(blocks):
            parts = (hashes >> np.uint64(64 - bits)).astype(np.uint16)
            order = np.argsort(parts, kind="stable")
            pairs = np.stack([hashes[order], order.astype(np.uint64) + np.uint64(first)], 1)
            bounds = np.searchsorted(parts[order], np.arange(len(paths) + 1)).tolist()
            for path, (start, end) in zip(paths, pairwise(bounds), strict=True):
                with path.open("ab") as file:
                    file.write(pairs[start:end].tobytes())
        for path in paths:
            pairs = np.fromfile(path, "<u8").reshape(-1, 2)
            path.unlink()
            yield pairs[:, 0], pairs[:, 1].astype(np.int64)


def _collected(blocks: Iterable[bytes]) -> Iterator[tuple[int, Numbers]]:
    """Yields the number of the first record and the hashes of many blocks together."""
    first, waiting, size = 0, list[bytes](), 0
    for block in blocks:
        waiting.append(block)
        size += len(block)
        if size >= 8 * _TOGETHER:
            yield first, np.frombuffer(b"".join(waiting), "<u8")
            first, waiting, size = first + size // 8, [], 0
    if waiting:
        yield first, np.frombuffer(b"".join(waiting), "<u8")
