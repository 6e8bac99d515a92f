"""Rows: what is known of each example between the survey and the writing, as bytes in files.

A row is a fixed head and the example's key, the path of its image where that does not follow from the key,
and its further features as entries of a tf.train.Example. It begins with the digest that decides the
example's position, so that sorting rows as bytes puts them into the order of the dataset.

Memory does not grow with the number of rows: beyond a limit they are distributed to bucket files by the
first byte of the digest, and sorted bucket by bucket.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import Struct

from shardline.trainer.data.manifest import KEY_BYTES

#: Rows that are held in memory (about 5 MB).
_ROWS_IN_MEMORY = 32_768

BUCKETS = 64

#: digest, split code, length of key, of path and of features, label, place, offset and length of the
#: image there, its checksum where it was copied, and what the example is known by in other datasets.
HEAD = Struct(">16sBIIIIIqqQ8s")

DIGEST_BYTES = 16

# What an example is known by in other datasets: a hash that neither seed nor salt changes.
_IDENTITY = slice(HEAD.size - KEY_BYTES, HEAD.size)

# The lengths alone, which are all that cutting needs; and the fields that a writer needs.
_LENGTHS = Struct(">17xIII")
_FIELDS = Struct(">17xIIIIIqq16x")

_BLOCK = 1 << 18

#: What a writer needs of a row: the key (UTF-8), the path of the image relative to its place (empty where it
#: is the key), further features, index of the class, number of the place, offset of the image in its file
#: in bytes, and its length, which is `WHOLE_FILE` for a file of its own.
Fields = tuple[bytes, bytes, bytes, int, int, int, int]


def fields(row: bytes) -> Fields:
    """Returns the fields of a row."""
    keys, paths, _, label, place, offset, length = _FIELDS.unpack_from(row)
    key, path = HEAD.size + keys, HEAD.size + keys + paths
    return row[HEAD.size : key], row[key:path], row[path:], label, place, offset, length


def identity(row: bytes) -> bytes:
    """Returns what the example of a row is known by in other datasets."""
    return row[_IDENTITY]


def key_text(key: bytes) -> str:
    """Returns a key as text, for messages."""
    return key.decode("utf-8", "surrogateescape")


def read(path: Path) -> Iterator[bytes]:
    """Yields the rows of a file."""
    unpack, head = _LENGTHS.unpack_from, HEAD.size
    with path.open("rb") as file:
        blob = b""
        while block := file.read(_BLOCK):
            blob += block
            start, end = 0, len(blob)
            while start + head <= end:
                stop = start + head + sum(unpack(blob, start))
                if stop > end:
                    break
                yield blob[start:stop]
                start = stop
            blob = blob[start:]


def read_fields(path: Path) -> Iterator[list[Fields]]:
    """Yields the fields of the rows of a file, in lists of bounded length."""
    unpack, head = _FIELDS.unpack_from, HEAD.size
    with path.open("rb") as file:
        blob = b""
        while block := file.read(_BLOCK):
            blob += block
            found, start, end = [], 0, len(blob)
            while start + head <= end:
                keys, paths, features, label, place, offset, length = unpack(blob, start)
                key_end = start + head + keys
                path_end = key_end + paths
                stop = path_end + features
                if stop > end:
                    break
                key, where, extra = blob[start + head : key_end], blob[key_end:path_end], blob[path_end:stop]
                found.append((key, where, extra, label, place, offset, length))
                start = stop
            blob = blob[start:]
            yield found


class Buckets:
    """Rows in order of their digests, whatever the order in which they come.

    The directory may hold bucket files that an earlier instance left.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pending: list[bytes] = []
        self._in_files = False

    def append(self, row: bytes) -> None:
        """Takes one row."""
        self._pending.append(row)
        if len(self._pending) >= _ROWS_IN_MEMORY:
            self.flush()

    def flush(self) -> None:
        """Moves all rows from memory to the bucket files."""
        rows, self._pending, self._in_files = self._pending, [], True
        rows.sort()
        self._directory.mkdir(exist_ok=True)
        starts = [bisect_left(rows, bytes([bucket])) for bucket in range(0, 256, 256 // BUCKETS)]
        for bucket, (start, stop) in enumerate(zip(starts, [*starts[1:], len(rows)], strict=True)):
            with self.path(bucket).open("ab") as file:
                file.write(b"".join(rows[start:stop]))

    def path(self, bucket: int) -> Path:
        """Returns the file of a bucket."""
        return self._directory / f"{bucket:02d}.rows"

    def __iter__(self) -> Iterator[Sequence[bytes]]:
        """Yields all rows, sorted, in lists of bounded length."""
        if not self._in_files:
            self._pending.sort()
            yield self._pending
            return
        if self._pending:
            self.flush()
        for bucket in range(BUCKETS):
            yield sorted(read(self.path(bucket)))
