"""TFRecord files, without TensorFlow: loading it takes seconds and 600 MB.

A file is framed as in tensorflow/core/lib/io/record_{reader,writer}.h: per record its length (uint64), the
masked CRC-32C of those 8 bytes (uint32), the data, and the masked CRC-32C of the data (uint32),
little-endian; the whole file may be compressed with gzip. Records are numbered from 0.
"""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import google_crc32c

from shardline.components.preprocess.example import head, varint
from shardline.components.storage import as_source_error, open_read
from shardline.trainer.base.errors import BadRecordError, SourceError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_LENGTH, _CHECKSUM = struct.Struct("<Q"), struct.Struct("<I")
_MASK = 0xA282EAD8
_HEADER_BYTES = _LENGTH.size + _CHECKSUM.size

#: Length of the image of an example without one.
NO_IMAGE = -1

# Lengths of small images repeat. Those of large images do not, where the cache costs little.
_KNOWN_LENGTHS = 4096

_BLOCK, _PART = 1 << 20, 1 << 24
_GZIP_MAGIC, _AVRO_MAGIC = b"\x1f\x8b", b"Obj\x01"

#: Most bytes of a record. An image of 100 million pixels has 300 MB; 2 MB of gzip may decompress to 2 GiB.
_LARGEST_RECORD = 1 << 29


def mask(crc: int) -> bytes:
    """Returns a CRC-32C as TFRecord stores it."""
    return _CHECKSUM.pack((crc >> 15 | crc << 17) + _MASK & 0xFFFFFFFF)


def masks(crcs: npt.NDArray[np.uint32]) -> bytes:
    """Returns CRC-32Cs as `mask` does, one behind the other."""
    return ((crcs >> 15 | crcs << 17) + _MASK).astype("<u4").tobytes()


@lru_cache(_KNOWN_LENGTHS)
def image_start(image: int, tail: int) -> tuple[bytes, bytes, int]:
    """Returns the frame before an Example, the Example up to its image, and the length of the whole record.

    `image` and `tail` are the lengths of the image and of the features after it, in bytes; `image` is
    `NO_IMAGE` where there are features alone.
    """
    start = b"" if image == NO_IMAGE else head("image", image)
    size = max(image, 0) + len(start)
    example = b"\x0a" + varint(size + tail)
    length = _LENGTH.pack(len(example) + size + tail)
    frame = length + mask(google_crc32c.value(length))
    return frame, example + start, len(frame) + len(example) + size + tail + _CHECKSUM.size


class Record(NamedTuple):
    """One record of a file: offset of its data in the uncompressed file, the data, and its number from 0."""

    offset: int
    data: bytes
    number: int


def detect_compression(path: str | os.PathLike[str]) -> str:
    """Returns "gzip" or "" from the first bytes of a TFRecord file; SourceError if it is neither."""
    name = os.fspath(path)
    with as_source_error(name), open_read(name) as file:
        start = file.read(_HEADER_BYTES)
    if not start or start[8:] == mask(google_crc32c.value(start[:8])):
        return ""
    if start.startswith(_GZIP_MAGIC):
        return "gzip"
    if start.startswith(_AVRO_MAGIC):
        raise SourceError(f"{name!r} is an Avro file; write it as Parquet, which table:PATH reads")
    raise SourceError(f"{name!r} is not a TFRecord file: it does not start with a record")


def read_records(path: str | os.PathLike[str], *, compression: str = "") -> Iterator[Record | BadRecordError]:
    """Yields all records of a file in order, or an error for one that cannot be used.

    Raises SourceError where no later record can be found: the file is cut off, or a length is damaged.
    """
    name = os.fspath(path)
    with as_source_error(name), open_read(name) as file:
        stream = gzip.GzipFile(fileobj=file, mode="rb") if compression == "gzip" else file
        try:
            yield from _records(stream, name)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise SourceError(f"{name!r} is damaged or not a gzip file: {error}") from None


def _records(stream: BinaryIO | gzip.GzipFile, name: str) -> Iterator[Record | BadRecordError]:
    unpack_checksum, checksum = _CHECKSUM.unpack_from, google_crc32c.value
    rest, number, wanted, offset = b"", 0, _BLOCK, 0  # offset: of `buffer` in the file
    while block := _read(stream, wanted):
        buffer = rest + block
        size, position, wanted = len(buffer), 0, _BLOCK
        while size - position >= _HEADER_BYTES:
            start = position + _HEADER_BYTES
            length = _record_length(buffer[position:start])
            if length < 0:
                raise _damaged(name, number, "its length does not match its checksum")
            if length > _LARGEST_RECORD:
                most = f"more than {_LARGEST_RECORD >> 20} MiB, which no example has"
                raise _damaged(name, number, f"it claims {length:,} bytes, {most}")
            end = start + length
            if end + 4 > size:
                wanted = max(_BLOCK, end + 4 - size)
                break
            data = buffer[start:end]
            position = end + 4
            crc = checksum(data)
            if unpack_checksum(buffer, end)[0] == (crc >> 15 | crc << 17) + _MASK & 0xFFFFFFFF:
                yield Record(offset + start, data, number)
            else:
                yield BadRecordError(f"{name} record {number}", "the data do not match their checksum")
            number += 1
        rest = buffer[position:]
        offset += position
    if rest:
        raise _damaged(name, number, "the file ends in the middle of it")


@lru_cache(_KNOWN_LENGTHS)
def _record_length(header: bytes) -> int:
    """Returns the length that a record's header states, -1 if that does not match its checksum."""
    length = header[: _LENGTH.size]
    return _LENGTH.unpack(length)[0] if header[_LENGTH.size :] == mask(google_crc32c.value(length)) else -1


def _read(stream: BinaryIO | gzip.GzipFile, wanted: int) -> bytes:
    """Reads `wanted` bytes, or what there is; memory is not allocated for what a damaged length claims."""
    parts = []
    while wanted and (part := stream.read(min(wanted, _PART))):
        parts.append(part)
        wanted -= len(part)
    return b"".join(parts)


def _damaged(name: str, number: int, how: str) -> SourceError:
    return SourceError(
        f"{name!r} is damaged at record {number}: {how}; nothing after it can be read, copy the file again"
    )
