"""Reading TFRecord files of any writer: framing, both checksums, plain or gzip.

The format is that of tensorflow/core/lib/io/record_reader.h: per record its length (uint64), the masked
CRC-32C of those 8 bytes (uint32), the data, and the masked CRC-32C of the data (uint32), little-endian.
Records are numbered from 0.
"""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

import google_crc32c

from shardline.components.preprocess import storage
from shardline.trainer.errors import BadRecordError, SourceError

_BLOCK = 1 << 20
_HEADER = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_GZIP_MAGIC = b"\x1f\x8b"

#: A protobuf message has at most 2 GiB, and so has a record.
_LARGEST_RECORD = 1 << 31


class Record(NamedTuple):
    """One record of a file.

    Attributes:
        offset: Of the data in the uncompressed file, in bytes.
        data: A serialized tf.train.Example, if it is one.
        number: Of the record in the file, from 0.
    """

    offset: int
    data: bytes
    number: int


def detect_compression(path: str | os.PathLike[str]) -> str:
    """Returns "gzip" or "" from the first bytes of a TFRecord file, whatever its name is.

    Raises:
        SourceError: The file cannot be read, or is neither.
    """
    name = os.fspath(path)
    with storage.one_line(name), storage.open_read(name) as file:
        start = file.read(_HEADER.size)
    if not start or (len(start) == _HEADER.size and _is_header(start)):
        return ""
    if start.startswith(_GZIP_MAGIC):
        return "gzip"
    raise SourceError(f"{name!r} is not a TFRecord file: it does not start with a record")


def read_records(
    path: str | os.PathLike[str],
    *,
    compression: str = "",
    on_damage: Callable[[BadRecordError], None] | None = None,
) -> Iterator[Record]:
    """Yields all records of a file from the first to the last, checked.

    Args:
        path: A local file or a URL.
        compression: Of the whole file, "" or "gzip".
        on_damage: Called with a record whose data do not match their checksum, which is then left out;
            without it the record's error is raised.

    Raises:
        BadRecordError: A record's data do not match their checksum.
        SourceError: The file cannot be read, is not compressed as it should be, is cut off in the middle, or
            has a damaged length, so that nothing behind it can be found.
    """
    name = os.fspath(path)
    with storage.one_line(name), storage.open_read(name) as file:
        stream = gzip.GzipFile(fileobj=file, mode="rb") if compression == "gzip" else file
        try:
            yield from _records(stream, name, on_damage)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise SourceError(f"{name!r} is damaged or not a gzip file: {error}") from None


def _records(
    stream: BinaryIO | gzip.GzipFile, name: str, on_damage: Callable[[BadRecordError], None] | None
) -> Iterator[Record]:
    unpack_header, checksum = _HEADER.unpack_from, google_crc32c.value
    unpack_checksum = _CHECKSUM.unpack_from
    rest, number, wanted, offset = b"", 0, _BLOCK, 0  # offset: of `buffer` in the file
    while block := stream.read(wanted):
        buffer = rest + block
        size, position, wanted = len(buffer), 0, _BLOCK
        while size - position >= 12:
            length, expected = unpack_header(buffer, position)
            crc = checksum(buffer[position : position + 8])
            if ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF != expected or length > _LARGEST_RECORD:
                raise SourceError(_damaged(name, number, "its length does not match its checksum"))
            start = position + 12
            end = start + length
            if end + 4 > size:
                wanted = max(_BLOCK, end + 4 - size)
                break
            data = buffer[start:end]
            crc = checksum(data)
            position = end + 4
            if ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF == unpack_checksum(buffer, end)[0]:
                yield Record(offset + start, data, number)
            else:
                damage = BadRecordError(f"{name} record {number}", "the data do not match their checksum")
                if on_damage is None:
                    raise damage
                on_damage(damage)
            number += 1
        rest = buffer[position:]
        offset += position
    if rest:
        raise SourceError(_damaged(name, number, "the file ends in the middle of it"))


def _is_header(start: bytes) -> bool:
    crc = google_crc32c.value(start[:8])
    return bool((((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF) == _CHECKSUM.unpack_from(start, 8)[0])


def _damaged(name: str, number: int, how: str) -> str:
    return (
        f"{name!r} is damaged at record {number}: {how}; nothing behind it can be read, copy the file again"
    )
