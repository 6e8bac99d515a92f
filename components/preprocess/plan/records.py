"""Records: the facts about each example between the survey and the writing, in memory and in files.

A record is a fixed head and three texts: the example's key, the path of its image where that does not follow
from the key, and its other features as entries of a tf.train.Example. Heads are one array, which makes
sorting, counting and assigning them to shards cheap; texts are Arrow's, and Python looks at none.

The order and the split of an example follow from digests, salted hashes of its key: it keeps its split when
the source grows. The digest with the seed is its position in the order; the second half of the digest with
the split's salt chooses its split, and that of the digest with 0 is the key hash that identifies it across
datasets. A stratified split follows from the example's rank among all of its class, in the order of those
hashes: a few more examples move few others.

Records are distributed to buckets by the first byte of the digest, and sorted bucket by bucket: of millions
of them, memory holds a 256th. Hashes of 64 bits also find equal contents: among 100 million
different ones two collide once in 3,700 datasets, among a million once in 37 million. More than fit into
memory are partitioned by their first bits.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, repeat, starmap
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import xxhash

from shardline.components.preprocess.lazy import pa, pc
from shardline.trainer.manifest import KEY_BYTES, SPLITS

# Bytes of records that are held before they go to a file, and records and bytes read at a time.
_BYTES_IN_MEMORY, _RECORDS_READ, _BYTES_READ = 4 << 20, 4096, 4 << 20

# Bytes of records sorted and assigned at a time, about, or those of a bucket: each time a shard gets some,
# and millions of records have thousands of shards.
_BYTES_SORTED = 3 << 20

_BUCKETS = 256  # by one byte

Numbers = npt.NDArray[Any]

#: Both halves of the digest, offset and length of the image, its checksum where it was copied, the key hash,
#: label, number of the image's location, lengths of key, path and features in bytes, and split code.
HEAD = np.dtype(
    [
        *((name, "<u8") for name in ("order", "order_low")),
        *((name, "<i8") for name in ("offset", "length")),
        *((name, "<u8") for name in ("checksum", "key_hash")),
        *((name, "<u4") for name in ("label", "location", "keys", "paths", "features")),
        ("code", "u1"),
    ]
)

# Fields by which equal digests are ordered, before the text.
_TIES = (
    "order_low",
    "code",
    "keys",
    "paths",
    "features",
    "label",
    "location",
    "offset",
    "length",
    "checksum",
)

# Fields with the lengths of the texts.
_TEXTS = ("keys", "paths", "features")

# A block of a file: bytes of the heads, keys, paths and features, and then these.
_BLOCK = Struct("<4Q")


class Fields(NamedTuple):
    """Fields of one record that a reader needs.

    `path` is that of the image relative to its location, empty where it is the key; `offset` and `length` say
    where it is in its file, in bytes, with `WHOLE_FILE` for a file of its own.
    """

    key: bytes
    path: bytes
    features: bytes
    label: int
    location: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Records:
    """Some records: an array of `HEAD`, and their keys, paths and features as arrays of large_binary."""

    heads: Numbers
    texts: Sequence[Any]

    @classmethod
    def make(cls, heads: Numbers, *texts: Iterable[bytes]) -> Records:
        """Returns records of their keys, paths and features; none of them may be () for empty ones."""
        columns = [pa.array(each or repeat(b"", len(heads)), pa.large_binary()) for each in texts]
        for name, column in zip(_TEXTS, columns, strict=True):
            heads[name] = pc.binary_length(column)
        return cls(heads, columns)

    @classmethod
    def join(cls, parts: Sequence[Records]) -> Records:
        """Returns the records of several parts, one after the other."""
        if len(parts) == 1:
            return parts[0]
        texts = [pa.concat_arrays(columns) for columns in zip(*(part.texts for part in parts), strict=True)]
        return cls(np.concatenate([part.heads for part in parts], dtype=HEAD), texts)

    @property
    def count(self) -> int:
        """Number of records."""
        return len(self.heads)

    @property
    def sizes(self) -> Numbers:
        """Bytes of the texts of each record."""
        lengths = np.stack([self.heads[name] for name in _TEXTS])
        return cast(Numbers, lengths.sum(axis=0, dtype=np.int64))

    def pieces(self) -> list[memoryview]:
        """Returns the bytes of the heads, keys, paths and features, from which `of_pieces` makes records."""
        found = [self.heads.view(np.uint8).data]
        for texts in self.texts:
            _, ends, data = texts.buffers()
            start, end = np.frombuffer(ends, np.int64)[[texts.offset, texts.offset + len(texts)]].tolist()
            found.append(memoryview(data)[start:end])
        return found

    @classmethod
    def of_pieces(cls, heads: bytes, *texts: bytes) -> Records:
        """Returns records of their bytes."""
        array, columns = np.frombuffer(heads, HEAD), []
        for name, data in zip(_TEXTS, texts, strict=True):
            ends = np.append(0, np.cumsum(array[name], dtype=np.int64))
            buffers = [None, pa.py_buffer(ends), pa.py_buffer(data)]
            columns.append(pa.Array.from_buffers(pa.large_binary(), len(array), buffers))
        return cls(array, columns)

    def __getitem__(self, part: slice) -> Records:
        """Returns the records of a range."""
        return Records(self.heads[part], [column[part] for column in self.texts])

    def take(self, chosen: Numbers) -> Records:
        """Returns the records with these numbers, in their order."""
        return Records(self.heads[chosen], [column.take(chosen) for column in self.texts])

    def sorted(self) -> Records:
        """Returns the records in the order of their digests."""

        def rank(number: int) -> tuple[Any, ...]:
            head = self.heads[number]
            texts = (column[number].as_py() for column in self.texts)
            return (*(int(head[name]) for name in _TIES), *texts)

        order = np.argsort(self.heads["order"], kind="stable")
        first = self.heads["order"][order]
        equal = np.flatnonzero(first[1:] == first[:-1])
        for number in equal.tolist():  # few, but where many have the same content
            if number and first[number - 1] == first[number]:
                continue
            end = int(np.searchsorted(first, first[number], side="right"))
            order[number:end] = sorted(order[number:end].tolist(), key=rank)
        return self.take(order)

    def keys(self) -> list[bytes]:
        """Returns the key of each record."""
        return list(self.texts[0].to_pylist())

    def renamed(self, keys: Sequence[bytes]) -> Records:
        """Returns the records with other keys, and the same image."""
        return Records.make(self.heads.copy(), keys, *self.texts[1:])

    def fields(self) -> Iterator[Fields]:
        """Yields the fields of each record."""
        texts = (column.to_pylist() for column in self.texts)
        numbers = (self.heads[name].tolist() for name in ("label", "location", "offset", "length"))
        return starmap(Fields, zip(*texts, *numbers, strict=True))


def key_text(key: bytes) -> str:
    """Returns a key as text, for messages."""
    return key.decode("utf-8", "surrogateescape")


def key_hash_bytes(heads: Numbers) -> bytes:
    """Returns the key hashes of some heads, `KEY_BYTES` for each."""
    return bytes(heads["key_hash"].astype(f">u{KEY_BYTES}").tobytes())


def append(path: Path, records: Records) -> bytes:
    """Appends records to a file as a block, and returns its bytes."""
    pieces = records.pieces()
    block = b"".join((_BLOCK.pack(*map(len, pieces)), *pieces))
    with path.open("ab") as file:
        file.write(block)
    return block


def read_records(path: Path, together: int = _RECORDS_READ) -> Iterator[Records]:
    """Yields the records of a file in parts of at most `together` records, small blocks joined."""
    parts, held, held_bytes = list[Records](), 0, 0
    with path.open("rb") as file:
        while start := file.read(_BLOCK.size):
            sizes = _BLOCK.unpack(start)
            parts.append(Records.of_pieces(*map(file.read, sizes)))
            held, held_bytes = held + parts[-1].count, held_bytes + sum(sizes)
            if held >= together or held_bytes > _BYTES_READ:
                joined, parts, held, held_bytes = Records.join(parts), [], 0, 0
                for first in range(0, joined.count, together):
                    yield joined[first : first + together]
    if parts:
        yield Records.join(parts)


class Buckets:
    """Records sorted by their digests, added in any order, in files of a directory that processes may share.

    A file has the bytes of each bucket's heads, keys, paths and features, and then these, bucket by bucket.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pending: list[Records] = []
        self._bytes = 0
        directory.mkdir(parents=True, exist_ok=True)

    def append(self, records: Records) -> None:
        """Adds records."""
        self._pending.append(records)
        self._bytes += records.heads.nbytes + int(records.sizes.sum())
        if self._bytes >= _BYTES_IN_MEMORY:
            self.flush()

    def flush(self) -> None:
        """Moves all records from memory to a file."""
        if not self._pending:
            return
        records, self._pending, self._bytes = Records.join(self._pending), [], 0
        records = records.take(np.argsort(records.heads["order"], kind="stable"))
        buckets = (records.heads["order"] >> np.uint64(56)).astype(np.int64)
        sizes = (np.full(records.count, HEAD.itemsize), *(records.heads[name] for name in _TEXTS))
        index = np.stack([np.bincount(buckets, each, _BUCKETS) for each in sizes]).astype("<i8")
        path = self._directory / f"{time.monotonic_ns():020d}-{os.getpid()}.rows"
        with path.open("xb") as file:
            file.writelines((index.tobytes(), *records.pieces()))

    def sizes(self) -> Numbers:
        """Returns the bytes of each bucket."""
        self.flush()
        found = (np.fromfile(path, "<i8", 4 * _BUCKETS) for path in self.files())
        return sum((each.reshape(4, -1).sum(axis=0) for each in found), np.zeros(_BUCKETS, np.int64))

    def read(self, first: int, end: int) -> Records:
        """Returns the records of some buckets, those of one file after those of another."""
        parts = []
        for path in self.files():
            with path.open("rb") as file:
                index = np.frombuffer(file.read(32 * _BUCKETS), "<i8")
                ends = 32 * _BUCKETS + np.append(0, np.cumsum(index))
                pieces = []
                for number in range(0, len(index), _BUCKETS):
                    file.seek(ends[number + first])
                    pieces.append(file.read(ends[number + end] - ends[number + first]))
                parts.append(Records.of_pieces(*pieces))
        return Records.join(parts)

    def files(self) -> list[Path]:
        """Returns the files, in the order in which they were written."""
        return sorted(self._directory.glob("*.rows"))

    def __iter__(self) -> Iterator[Records]:
        """Yields all records, sorted: those of small buckets joined."""
        sizes = self.sizes()
        together = max(_BYTES_SORTED, int(sizes.sum()) // _BUCKETS)
        first, held = 0, 0
        for bucket, size in enumerate([*sizes.tolist(), together + 1]):
            if held and held + size > together:
                yield self.read(first, bucket).sorted()
                first, held = bucket, 0
            held += size


#: Splits that a source may assign to an example.
SOURCE_SPLITS = (None, *SPLITS)

#: Bytes of the hash of one record's key or content in a file of hashes.
HASH_BYTES = 8

_HASH_BLOCK = HASH_BYTES * 4096

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
        self.count = len(self._bounds) * len(SOURCE_SPLITS)

    def codes(self, points: Numbers, own: Sequence[str | None]) -> Numbers:
        """Returns the codes of examples, from the second halves of their digests and their own splits."""
        regions = np.searchsorted(self._numbers, points, side="right") - 1
        own_codes = 0 if set(own) == {None} else np.array(list(map(SOURCE_SPLITS.index, own)))
        return cast(Numbers, (regions * len(SOURCE_SPLITS) + own_codes).astype(np.uint8))

    def splits(self, existing: Collection[str | None]) -> tuple[str, ...]:
        """Returns the split of each code; `existing` are all splits that the source assigns."""
        return tuple(
            choose_split(bound, own, existing, self._shares)
            for bound in self._bounds
            for own in SOURCE_SPLITS
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


def hash_blocks(path: Path, offset: int = 0, length: int = sys.maxsize) -> Iterator[bytes]:
    """Yields a range of a file of hashes, in blocks of whole hashes."""
    with path.open("rb") as file:
        file.seek(offset)
        while length and (block := file.read(min(_HASH_BLOCK, length))):
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
