"""Digests: salted hashes of the keys of examples, from which their order and their split follow.

An example keeps its split when the source grows. The digest with the seed is its position in the order; the
second half of the digest with the split's salt chooses its split, and that of the digest with 0 is the key
hash that identifies it across datasets. A stratified split follows from the example's rank among all of its
class, in the order of those hashes: a few more examples move few others.

Hashes of 64 bits also find equal contents: among 100 million different ones two collide once in 3,700
datasets, among a million once in 37 million. More than fit into memory are partitioned by their first bits.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise, repeat
from pathlib import Path
from struct import iter_unpack
from typing import Any, cast

import numpy as np
import xxhash

from shardline.components.preprocess.plan.records import Numbers
from shardline.trainer.data.manifest import KEY_BYTES, SPLITS

# Splits that a source may assign to an example.
_SOURCE_SPLITS = (None, *SPLITS)

#: Bytes of the hash of one record's key or content in a file of hashes.
HASH_BYTES = 8

_BLOCK = HASH_BYTES * 4096

# Other rows with which a row with copies may share a value of its own.
_FEW_OTHERS = 2

# Hashes that are compared in memory at a time (about 10 MB with temporary arrays).
_HASHES_IN_MEMORY = 262_144


def digests(keys: Iterable[bytes], seed: int) -> tuple[Numbers, Numbers]:
    """Returns both halves of the digest of each key; those of two seeds are independent of each other."""
    found = b"".join(map(xxhash.xxh3_128_digest, keys, repeat(seed % 2**64)))
    halves = np.frombuffer(found, ">u8").astype("<u8")
    return halves[::2], halves[1::2]


def choose_split(
    point: float, own: str | None, existing: Collection[str | None], shares: Mapping[str, float]
) -> str:
    """Returns the split of one example, whose hash is `point` (0 <= point < 1).

    An example keeps the split that its source assigns. Where the source has splits but no validation or test
    split, the missing one takes its share out of training. `existing` are all splits of the source.
    """
    if own in ("validation", "test"):
        return own
    reached = 0.0
    for split in ("validation", "test"):
        if own is None or split not in existing:
            reached += shares.get(split, 0.0)
            if point < reached:
                return split
    return "train"


class SplitCodes:
    """One byte per example: its hash's region between the bounds of the shares, and its own split."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._shares = shares
        validation, test = shares.get("validation", 0.0), shares.get("test", 0.0)
        self._bounds = [0.0, *sorted({validation, test, validation + test} - {0.0})]
        self._numbers = np.array([min(round(each * 2**64), 2**64 - 1) for each in self._bounds], np.uint64)
        self.count = len(self._bounds) * len(_SOURCE_SPLITS)

    def codes(self, points: Numbers, own: Sequence[str | None]) -> Numbers:
        """Returns the codes of examples, from the second halves of their digests and their own splits."""
        regions = np.searchsorted(self._numbers, points, side="right") - 1
        own_codes = 0 if set(own) == {None} else np.array(list(map(_SOURCE_SPLITS.index, own)))
        return cast(Numbers, (regions * len(_SOURCE_SPLITS) + own_codes).astype(np.uint8))

    def splits(self, existing: Collection[str | None]) -> tuple[str, ...]:
        """Returns the split of each code; `existing` are all splits that the source assigns."""
        return tuple(
            choose_split(bound, own, existing, self._shares)
            for bound in self._bounds
            for own in _SOURCE_SPLITS
        )


class StratifiedSplit:
    """Splits of some examples, as indices into `SPLITS`, and the `counts` of each.

    Examples of equal points are duplicates: they share a split, and count for the first of their classes.
    """

    def __init__(self, points: Numbers, labels: Numbers, shares: Mapping[str, float]) -> None:
        order = np.lexsort((labels, points))
        points, labels = points[order], labels[order]
        starts = np.flatnonzero(np.append(True, points[1:] != points[:-1])[: len(points)])
        sizes = np.diff(np.append(starts, len(points)))
        self._points, classes = points[starts], labels[starts]
        by_class = np.argsort(classes, kind="stable")
        bounds = np.flatnonzero(np.diff(classes[by_class], prepend=-1, append=-1))
        self._codes = np.empty(len(starts), np.uint8)
        for start, end in pairwise(bounds.tolist()):
            members = by_class[start:end]
            self._codes[members] = assign_splits(sizes[members], shares)
        self.counts = np.bincount(self._codes, sizes, len(SPLITS)).astype(np.int64)

    def codes(self, points: Numbers) -> Numbers:
        """Returns the splits of examples with these points."""
        return self._codes[np.searchsorted(self._points, points)]


def assign_splits(sizes: Numbers, shares: Mapping[str, float]) -> Numbers:
    """Returns the splits of groups of duplicates of these sizes; each split gets one if there are enough."""
    reached = np.append(0, np.cumsum(sizes))
    wanted = [split for split in ("validation", "test") if split in shares]
    least = int(len(sizes) > len(wanted))
    codes = np.full(len(sizes), SPLITS.index("train"), np.uint8)
    start, share = 0, 0.0
    for rest, split in zip(range(len(wanted), 0, -1), wanted, strict=True):
        share += shares[split]
        nearest = int(np.abs(reached - share * reached[-1]).argmin())
        most = len(sizes) - (rest if least else 1)
        end = max(start, min(max(nearest, start + least), most))
        codes[start:end] = SPLITS.index(split)
        start = end
    return codes


def are_rows_alike(columns: Iterable[Counter[Any]], rows: int) -> bool:
    """Whether a row shares its value of each column with many others, so that chance makes whole rows equal.

    Of a column with many values, a row shares its own with the row's copies alone. `columns` has the counts
    of the values of each, in all rows or a sample of them.
    """
    return all(
        sum(count * (count - 1) for count in counts.values()) * (rows - 1)
        > _FEW_OTHERS * counts.total() * (counts.total() - 1)
        for counts in columns
    )


def points_from_key_hashes(hashes: bytes, salt: int) -> Numbers:
    """Returns the points of examples from their key hashes, `KEY_BYTES` for each."""
    identities = (identity for (identity,) in iter_unpack(f"{KEY_BYTES}s", hashes))
    return digests(identities, salt)[1]


def blocks(path: Path, offset: int = 0, length: int = sys.maxsize) -> Iterator[bytes]:
    """Yields a range of a file of hashes, in blocks of whole hashes."""
    with path.open("rb") as file:
        file.seek(offset)
        while length and (block := file.read(min(_BLOCK, length))):
            yield block
            length -= len(block)


def find_repeated(blocks: Iterable[bytes], records: int, scratch: Path) -> Iterator[tuple[Numbers, Numbers]]:
    """Yields the hashes that occur more than once, and the record number of each, group by group."""
    for hashes, numbers in _partitioned(blocks, records, scratch):
        in_order = np.sort(hashes)
        values = in_order[1:][in_order[1:] == in_order[:-1]]
        if len(values):
            where = np.flatnonzero(np.isin(hashes, values))
            order = where[np.lexsort((numbers[where], hashes[where]))]
            yield hashes[order], numbers[order]


def _partitioned(blocks: Iterable[bytes], records: int, scratch: Path) -> Iterator[tuple[Numbers, Numbers]]:
    """Yields all hashes and their record numbers, in partitions that have no hash in common."""
    bits = (records // _HASHES_IN_MEMORY).bit_length()
    if not bits:
        hashes = np.frombuffer(b"".join(blocks), "<u8")
        yield hashes, np.arange(len(hashes))
        return
    with tempfile.TemporaryDirectory(prefix="hashes-", dir=scratch) as directory:
        paths = [Path(directory, str(part)) for part in range(1 << bits)]
        first, waiting = 0, bytearray()
        for block in chain(blocks, [None]):  # None: the end
            waiting += block or b""
            if block is not None and len(waiting) < HASH_BYTES * _HASHES_IN_MEMORY:
                continue
            hashes = np.frombuffer(bytes(waiting), "<u8")
            parts = (hashes >> np.uint64(64 - bits)).astype(np.uint16)
            order = np.argsort(parts, kind="stable")
            pairs = np.stack([hashes[order], order.astype(np.uint64) + np.uint64(first)], 1)
            bounds = np.searchsorted(parts[order], np.arange(len(paths) + 1)).tolist()
            for path, (start, end) in zip(paths, pairwise(bounds), strict=True):
                with path.open("ab") as file:
                    file.write(pairs[start:end].tobytes())
            first, waiting = first + len(hashes), bytearray()
        for path in paths:
            pairs = np.fromfile(path, "<u8").reshape(-1, 2)
            path.unlink()
            yield pairs[:, 0], pairs[:, 1].astype(np.int64)
