"""Records: the facts about each example between the survey and the writing, in memory and in files.

A record is a fixed head and a text: the example's key, the path of its image where that does not follow from
the key, and its other features as entries of a tf.train.Example. Heads are one array, which makes sorting,
counting and assigning them to shards cheap.

They are distributed to bucket files by the first byte of the digest, and sorted bucket by bucket: of millions
of records, memory holds a 256th.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap
from pathlib import Path
from struct import Struct, iter_unpack
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardline.trainer.data.manifest import KEY_BYTES

# Records held in memory before they go to buckets (about 5 MB), and records read at a time.
_RECORDS_IN_MEMORY, _RECORDS_READ = 32_768, 4096

# Records sorted and assigned at a time, about (10 MB), or those of a bucket: each time a shard gets some, and
# millions of records have thousands of shards.
_RECORDS_SORTED = 32_768

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

# A block of a file: number of records, bytes of the texts, the heads, the texts.
_BLOCK = Struct("<QQ")


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
    """Some records: an array of `HEAD`, and their texts."""

    heads: Numbers
    texts: Sequence[bytes]

    @classmethod
    def join(cls, parts: Sequence[Records]) -> Records:
        """Returns the records of several parts, one after the other."""
        if len(parts) == 1:
            return parts[0]
        heads = np.concatenate([np.empty(0, HEAD), *(part.heads for part in parts)])
        return cls(heads, [text for part in parts for text in part.texts])

    @property
    def count(self) -> int:
        """Number of records."""
        return len(self.heads)

    def take(self, chosen: Numbers) -> Records:
        """Returns the records with these numbers, in their order."""
        return Records(self.heads[chosen], list(map(self.texts.__getitem__, chosen.tolist())))

    def sorted(self) -> Records:
        """Returns the records in the order of their digests."""

        def rank(number: int) -> tuple[Any, ...]:
            head = self.heads[number]
            return (*(int(head[name]) for name in _TIES), self.texts[number])

        order = np.argsort(self.heads["order"], kind="stable")
        first = self.heads["order"][order]
        equal = np.flatnonzero(first[1:] == first[:-1])
        for number in equal.tolist():  # few, but where many have the same content
            if number and first[number - 1] == first[number]:
                continue
            end = int(np.searchsorted(first, first[number], side="right"))
            order[number:end] = sorted(order[number:end].tolist(), key=rank)
        return self.take(order)

    def keys(self) -> Sequence[bytes]:
        """Returns the key of each record."""
        if not self.heads["paths"].any() and not self.heads["features"].any():
            return self.texts
        return [text[:end] for text, end in zip(self.texts, self.heads["keys"].tolist(), strict=True)]

    def renamed(self, keys: Sequence[bytes]) -> Records:
        """Returns the records with other keys, and the same image."""
        heads, ends = self.heads.copy(), self.heads["keys"].tolist()
        heads["keys"] = list(map(len, keys))
        return Records(
            heads, [new + text[end:] for new, text, end in zip(keys, self.texts, ends, strict=True)]
        )

    def _texts(self, start: Numbers, lengths: str) -> Sequence[bytes]:
        if not self.heads[lengths].any():
            return [b""] * self.count
        ends = np.stack([start, start + self.heads[lengths]], 1).tolist()
        return [text[start:end] for text, (start, end) in zip(self.texts, ends, strict=True)]

    def paths(self) -> Sequence[bytes]:
        """Returns the path of each record."""
        return self._texts(self.heads["keys"], "paths")

    def features(self) -> Sequence[bytes]:
        """Returns the other features of each record."""
        return self._texts(self.heads["keys"] + self.heads["paths"], "features")

    def fields(self) -> Iterator[Fields]:
        """Yields the fields of each record."""
        numbers = (self.heads[name].tolist() for name in ("label", "location", "offset", "length"))
        return starmap(Fields, zip(self.keys(), self.paths(), self.features(), *numbers, strict=True))

    def to_bytes(self) -> bytes:
        """Returns the records as a block of a file."""
        texts = b"".join(self.texts)
        return b"".join((_BLOCK.pack(self.count, len(texts)), self.heads.tobytes(), texts))


def key_text(key: bytes) -> str:
    """Returns a key as text, for messages."""
    return key.decode("utf-8", "surrogateescape")


def key_hash_bytes(heads: Numbers) -> bytes:
    """Returns the key hashes of some heads, `KEY_BYTES` for each."""
    return bytes(heads["key_hash"].astype(f">u{KEY_BYTES}").tobytes())


def append(path: Path, records: Records) -> bytes:
    """Appends records to a file, and returns the bytes that were written."""
    block = records.to_bytes()
    with path.open("ab") as file:
        file.write(block)
    return block


def read(path: Path, together: int = _RECORDS_READ) -> Iterator[Records]:
    """Yields the records of a file in parts of at most `together` records, small blocks joined."""
    parts: list[Records] = []
    with path.open("rb") as file:
        while start := file.read(_BLOCK.size):
            count, size = _BLOCK.unpack(start)
            heads = np.frombuffer(file.read(count * HEAD.itemsize), HEAD)
            parts.append(Records(heads, _split_texts(file.read(size), heads)))
            if sum(part.count for part in parts) >= together:
                joined, parts = Records.join(parts), []
                for first in range(0, joined.count, together):
                    part = slice(first, first + together)
                    yield Records(joined.heads[part], joined.texts[part])
    if parts:
        yield Records.join(parts)


def _split_texts(texts: bytes, heads: Numbers) -> list[bytes]:
    lengths = heads["keys"].astype(np.int64) + heads["paths"] + heads["features"]
    if len(heads) and (lengths == lengths[0]).all():
        return [text for (text,) in iter_unpack(f"{lengths[0]}s", texts)]
    ends = np.cumsum(lengths).tolist()
    return [texts[start:end] for start, end in pairwise([0, *ends])]


class Buckets:
    """Records sorted by their digests, added in any order, in files of a new directory."""

    def __init__(self, directory: Path) -> None:
        self.paths = [directory / f"{bucket:03d}.rows" for bucket in range(_BUCKETS)]
        self._pending: list[Records] = []
        self._count = 0
        directory.mkdir(parents=True)
        for path in self.paths:
            path.touch()

    def append(self, records: Records) -> None:
        """Adds records."""
        self._pending.append(records)
        self._count += records.count
        if self._count >= _RECORDS_IN_MEMORY:
            self.flush()

    def flush(self) -> None:
        """Moves all records from memory to the bucket files."""
        records, self._pending, self._count = Records.join(self._pending), [], 0
        numbers = (records.heads["order"] >> np.uint64(56)).astype(np.uint8)
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], np.arange(_BUCKETS + 1)).tolist()
        for path, (start, end) in zip(self.paths, pairwise(bounds), strict=True):
            if start < end:
                append(path, records.take(order[start:end]))

    def __iter__(self) -> Iterator[Records]:
        """Yields all records, sorted: those of small buckets joined."""
        self.flush()
        together = max(_RECORDS_SORTED, sum(map(_count, self.paths)) // _BUCKETS)
        waiting: list[Records] = []
        for path in self.paths:
            count = _count(path)
            if waiting and sum(records.count for records in waiting) + count > together:
                yield Records.join(waiting)
                waiting = []
            if count:
                waiting.append(Records.join(list(read(path))).sorted())
        if waiting:
            yield Records.join(waiting)


def _count(path: Path) -> int:
    count = 0
    with path.open("rb") as file:
        while start := file.read(_BLOCK.size):
            records, size = _BLOCK.unpack(start)
            count += records
            file.seek(records * HEAD.itemsize + size, os.SEEK_CUR)
    return count
