"""Rows: what is known of each example between the survey and the writing, as bytes in files.

A row is a fixed head and the example's key, the path of its image where that does not follow from the key,
and its further features as entries of a tf.train.Example. It begins with the digest that decides the
example's place, so that sorting rows as bytes puts them into the order of the dataset.

Memory does not grow with the number of rows: beyond a limit they are dealt to bucket files by the first
byte of the digest, and sorted bucket by bucket.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import NamedTuple

#: Rows that are held in memory (about 5 MB).
_ROWS_IN_MEMORY = 32_768

BUCKETS = 64

#: digest, split code, length of key, of path and of features, label, place, offset and length of the
#: image there, and its checksum where it was copied.
HEAD = Struct(">16sBIIIIIqqQ")

DIGEST_BYTES = 16

# The lengths alone, which are all that cutting needs; and what a writer needs.
_LENGTHS = Struct(">17xIII")
_FIELDS = Struct(">17xIIIIIqq8x")

_BLOCK = 1 << 18


#: Of a row, what a writer needs: key, path, features, label, place, offset, length; see `Row`.
Fields = tuple[bytes, bytes, bytes, int, int, int, int]


class Row(NamedTuple):
    """One row, taken apart.

    Attributes:
        digest: Salted hash of the key (or content): order, and with `code` the split.
        code: See `plan.split_code`.
        label: Index of the class.
        place: Number of the place that the image is in (`places.Places`).
        offset: Of the image in its file, in bytes.
        length: Of the image in bytes, or `WHOLE_FILE`.
        key: UTF-8.
        path: Of the image relative to its place; empty where it is the key.
        features: Entries of a tf.train.Example, sorted by name.
    """

    digest: bytes
    code: int
    label: int
    place: int
    offset: int
    length: int
    key: bytes
    path: bytes
    features: bytes

    @property
    def name(self) -> str:
        """The key as text, for messages."""
        return self.key.decode("utf-8", "surrogateescape")


def parse(row: bytes) -> Row:
    """Takes one row apart."""
    digest, code, keys, paths, _, label, place, offset, length, _ = HEAD.unpack_from(row)
    path, features = HEAD.size + keys, HEAD.size + keys + paths
    return Row(
        digest, code, label, place, offset, length, row[HEAD.size : path], row[path:features], row[features:]
    )


def cut(blob: bytes) -> tuple[list[bytes], bytes]:
    """Cuts a piece of a file into its rows, and returns what is left of one that is not whole."""
    rows, start, end, unpack, head = [], 0, len(blob), _LENGTHS.unpack_from, HEAD.size
    while start + head <= end:
        keys, paths, features = unpack(blob, start)
        stop = start + head + keys + paths + features
        if stop > end:
            break
        rows.append(blob[start:stop])
        start = stop
    return rows, blob[start:]


def read_fields(path: Path) -> Iterator[list[Fields]]:
    """Yields what a writer needs of the rows of a file, in lists of bounded length."""
    unpack, head = _FIELDS.unpack_from, _FIELDS.size
    with path.open("rb") as file:
        blob = b""
        while block := file.read(_BLOCK):
            blob += block
            fields, start, end = [], 0, len(blob)
            while start + head <= end:
                keys, paths, features, label, place, offset, length = unpack(blob, start)
                key_end = start + head + keys
                path_end = key_end + paths
                stop = path_end + features
                if stop > end:
                    break
                key, where, extra = blob[start + head : key_end], blob[key_end:path_end], blob[path_end:stop]
                fields.append((key, where, extra, label, place, offset, length))
                start = stop
            blob = blob[start:]
            yield fields


def read(path: Path) -> Iterator[bytes]:
    """Yields the rows of a file."""
    with path.open("rb") as file:
        rest = b""
        while block := file.read(_BLOCK):
            rows, rest = cut(rest + block)
            yield from rows


class Buckets:
    """Rows in order of their digests, whatever the order in which they come.

    Args:
        directory: Where the bucket files are, and were left by an earlier instance.
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
            rows = sorted(read(self.path(bucket)))
            yield rows
