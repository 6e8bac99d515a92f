"""Writing one shard: TFRecord framing with masked CRC-32C, whole or not at all.

The format is that of tensorflow/core/lib/io/record_writer.h: per record its length (uint64), the masked
checksum of those 8 bytes (uint32), the data, and the masked checksum of the data (uint32), little-endian.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path

import google_crc32c

from trainer.data.manifest import Shard

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")


def write_shard(path: Path, records: Iterable[bytes]) -> Shard:
    """Writes the records into one TFRecord file: temporary name, fsync, rename.

    Args:
        path: The file, in an existing directory.
        records: Serialized examples, in order.

    Returns:
        What the manifest says of the file.

    Raises:
        OSError: The file cannot be written; nothing of it is left.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    count = size = checksum = 0
    try:
        with temporary.open("wb") as file:
            for record in records:
                framed = frame(record)
                file.write(framed)
                count += 1
                size += len(framed)
                checksum = google_crc32c.extend(checksum, framed)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return Shard(file=path.name, records=count, bytes=size, crc32c=f"{checksum:08x}")


def frame(record: bytes) -> bytes:
    """Returns a record as it stands in a TFRecord file."""
    length = _LENGTH.pack(len(record))
    return b"".join((length, _masked_crc32c(length), record, _masked_crc32c(record)))


def _masked_crc32c(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return _CHECKSUM.pack(((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
