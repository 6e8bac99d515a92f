"""Rows: what is known of each example between the survey and the writing, in memory and in files.

A row is a fixed head and a text: the example's key, the path of its image where that does not follow from the
key, and its further features as entries of a tf.train.Example. Heads are one array, so that sorting, counting
and dealing cost little for each.

Memory does not grow with the number of rows: they are distributed to bucket files by the first bits of the
digest, and sorted bucket by bucket; a bucket that is too large for that is distributed again.
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

# Rows that are held in memory before they go to buckets (about 5 MB), and that are read at a time.
_ROWS_IN_MEMORY, _ROWS_READ = 32_768, 4096

# Rows that are sorted, and dealt, together at most (about 10 MB), or this part of all: each time every shard
# gets some, and of millions of rows there are thousands of shards.
_ROWS_TOGETHER, _PARTS = 32_768, 512

_BUCKETS = 64

Numbers = npt.NDArray[Any]

#: Both halves of the digest, offset and length of the image in its place, its checksum where it was copied,
#: what the example is known by in other datasets, label, number of the place, lengths of key, path and
#: features in bytes, and the code of the split.
HEAD = np.dtype(
    [
        *((name, "<u8") for name in ("order", "order_low")),
        *((name, "<i8") for name in ("offset", "length")),
        *((name, "<u8") for name in ("checksum", "known")),
        *((name, "<u4") for name in ("label", "place", "keys", "paths", "features")),
        ("code", "u1"),
    ]
)

# What equal digests are ordered by, before the text.
_TIES = ("order_low", "code", "keys", "paths", "features", "label", "place", "offset", "length", "checksum")

# A block of a file: number of rows, bytes of the texts, the heads, the texts.
_BLOCK = Struct("<QQ")


class Fields(NamedTuple):
    """What a reader needs of one row.

    Attributes:
        path: Path of the image relative to its place, empty where it is the key.
        label: Index of the class.
        place: Number of the place of the image.
        offset, length: Where the image is in its file, in bytes; `WHOLE_FILE` for a file of its own.
    """

    key: bytes
    path: bytes
    features: bytes
    label: int
    place: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Records:
    """Some rows: an array of `HEAD`, and their texts."""

    heads: Numbers
    texts: Sequence[bytes]

    @classmethod
    def join(cls, parts: Sequence[Records]) -> Records:
        """Returns the rows of several, one behind the other."""
        if len(parts) == 1:
            return parts[0]
        heads = np.concatenate([np.empty(0, HEAD), *(part.heads for part in parts)])
        return cls(heads, [text for part in parts for text in part.texts])

    @property
    def count(self) -> int:
        """Number of the rows."""
        return len(self.heads)

    def take(self, chosen: Numbers) -> Records:
        """Returns the rows with these numbers, in their order."""
        return Records(self.heads[chosen], list(map(self.texts.__getitem__, chosen.tolist())))

    def sorted(self) -> Records:
        """Returns the rows in the order of their digests."""

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
        """Returns the key of each row."""
        if not self.heads["paths"].any() and not self.heads["features"].any():
            return self.texts
        return [text[:end] for text, end in zip(self.texts, self.heads["keys"].tolist(), strict=True)]

    def renamed(self, keys: Sequence[bytes]) -> Records:
        """Returns the rows with other keys, and the same image."""
        heads, ends = self.heads.copy(), self.heads["keys"].tolist()
        heads["keys"] = list(map(len, keys))
        return Records(
            heads, [new + text[end:] for new, text, end in zip(keys, self.texts, ends, strict=True)]
        )

    def _texts(self, start: Numbers, lengths: str) -> Sequence[bytes]:
        """Returns a part of the text of each row."""
        if not self.heads[lengths].any():
            return [b""] * self.count
        ends = np.stack([start, start + self.heads[lengths]], 1).tolist()
        return [text[start:end] for text, (start, end) in zip(self.texts, ends, strict=True)]

    def paths(self) -> Sequence[bytes]:
        """Returns the path of each row."""
        return self._texts(self.heads["keys"], "paths")

    def features(self) -> Sequence[bytes]:
        """Returns the further features of each row."""
        return self._texts(self.heads["keys"] + self.heads["paths"], "features")

    def fields(self) -> Iterator[Fields]:
        """Yields the fields of each row."""
        numbers = (self.heads[name].tolist() for name in ("label", "place", "offset", "length"))
        return starmap(Fields, zip(self.keys(), self.paths(), self.features(), *numbers, strict=True))

    def to_bytes(self) -> bytes:
        """Returns the rows as a block of a file."""
        texts = b"".join(self.texts)
        return b"".join((_BLOCK.pack(self.count, len(texts)), self.heads.tobytes(), texts))


def key_text(key: bytes) -> str:
    """Returns a key as text, for messages."""
    return key.decode("utf-8", "surrogateescape")


def known_bytes(heads: Numbers) -> bytes:
    """Returns what the examples of some heads are known by in other datasets, `KEY_BYTES` for each."""
    return bytes(heads["known"].astype(f">u{KEY_BYTES}").tobytes())


def append(path: Path, rows: Records) -> bytes:
    """Writes rows behind those of a file, and returns what was written."""
    block = rows.to_bytes()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        rest = memoryview(block)
        while rest:
            rest = rest[os.write(file, rest) :]
    finally:
        os.close(file)
    return block


def read(path: Path, together: int = _ROWS_READ) -> Iterator[Records]:
    """Yields the rows of a file, at most so many together, and not a few where there are more."""
    parts: list[Records] = []
    with path.open("rb") as file:
        while start := file.read(_BLOCK.size):
            count, size = _BLOCK.unpack(start)
            heads = np.frombuffer(file.read(count * HEAD.itemsize), HEAD)
            parts.append(Records(heads, _cut(file.read(size), heads)))
            if sum(part.count for part in parts) >= together:
                rows, parts = Records.join(parts), []
                for first in range(0, rows.count, together):
                    part = slice(first, first + together)
                    yield Records(rows.heads[part], rows.texts[part])
    if parts:
        yield Records.join(parts)


def _cut(texts: bytes, heads: Numbers) -> list[bytes]:
    """Returns the text of each row."""
    lengths = heads["keys"].astype(np.int64) + heads["paths"] + heads["features"]
    if len(heads) and (lengths == lengths[0]).all():
        return [text for (text,) in iter_unpack(f"{lengths[0]}s", texts)]
    ends = np.cumsum(lengths).tolist()
    return [texts[start:end] for start, end in pairwise([0, *ends])]


class Buckets:
    """Rows in order of their digests, whatever the order in which they come, in files of a new directory."""

    def __init__(self, directory: Path) -> None:
        self.paths = [directory / f"{bucket:02d}.rows" for bucket in range(_BUCKETS)]
        self._pending: list[Records] = []
        self._count = 0
        directory.mkdir(parents=True)
        for path in self.paths:
            path.touch()

    def append(self, rows: Records) -> None:
        """Takes rows."""
        self._pending.append(rows)
        self._count += rows.count
        if self._count >= _ROWS_IN_MEMORY:
            self.flush()

    def flush(self) -> None:
        """Moves all rows from memory to the bucket files."""
        rows, self._pending, self._count = Records.join(self._pending), [], 0
        _distribute(rows, 1, _BUCKETS, self.paths)

    def __iter__(self) -> Iterator[Records]:
        """Yields all rows, sorted, in parts of bounded size."""
        self.flush()
        together = max(_ROWS_TOGETHER, sum(map(_count, self.paths)) // _PARTS)
        yield from _in_order(self.paths, _BUCKETS, together)


def _in_order(paths: Sequence[Path], parts: int, together: int) -> Iterator[Records]:
    """Yields the rows of bucket files, sorted: those of several small ones `together`.

    `parts` says into how many the digests were divided so that they came into these files.
    """
    waiting: list[Records] = []
    for path in paths:
        count = _count(path)
        if waiting and sum(rows.count for rows in waiting) + count > together:
            yield Records.join(waiting)
            waiting = []
        if count > together and parts < 1 << 32:
            yield from _divided(path, parts, together)
        elif count:
            waiting.append(Records.join(list(read(path))).sorted())
    if waiting:
        yield Records.join(waiting)


def _divided(path: Path, parts: int, together: int) -> Iterator[Records]:
    """Yields the rows of a bucket that is too large, sorted, by way of smaller ones beside it."""
    times = 1 << (2 * _count(path) // together).bit_length()
    paths = [path.with_name(f"{path.stem}-{number}.rows") for number in range(times)]
    try:
        for rows in read(path, _ROWS_IN_MEMORY):
            _distribute(rows, parts, times, paths)
        yield from _in_order([each for each in paths if each.exists()], parts * times, together)
    finally:
        for each in paths:
            each.unlink(missing_ok=True)


def _distribute(rows: Records, parts: int, times: int, paths: Sequence[Path]) -> None:
    """Appends rows to one file for each value of the bits of the digest that come behind those of `parts`."""
    known, more = parts.bit_length() - 1, times.bit_length() - 1
    numbers = (rows.heads["order"] >> np.uint64(64 - known - more)) & np.uint64(times - 1)
    order = np.argsort(numbers.astype(np.uint16 if times > 256 else np.uint8), kind="stable")
    bounds = np.searchsorted(numbers[order], np.arange(times + 1)).tolist()
    for path, (start, end) in zip(paths, pairwise(bounds), strict=True):
        if start < end:
            append(path, rows.take(order[start:end]))


def _count(path: Path) -> int:
    """Returns the number of rows in a file."""
    count = 0
    with path.open("rb") as file:
        while start := file.read(_BLOCK.size):
            rows, size = _BLOCK.unpack(start)
            count += rows
            file.seek(rows * HEAD.itemsize + size, os.SEEK_CUR)
    return count
