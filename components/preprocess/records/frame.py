"""What stands around an image in a shard: the frame of a TFRecord and the head of a tf.train.Example.

TFRecord, of tensorflow/core/lib/io/record_writer.h: per record its length (uint64), the masked CRC-32C of
those 8 bytes (uint32), the data, and the masked CRC-32C of the data (uint32), little-endian.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import google_crc32c

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_IMAGE_NAME = b"\x0a\x05image"

# Lengths repeat in small images. In large ones they do not, and then nothing is lost.
_KNOWN_LENGTHS = 4096


def varint(value: int) -> bytes:
    """Returns a whole number as protobuf writes it, seven bits per byte."""
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    if value < 0x200000:
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14))
    return bytes((value & 0x7F | 0x80,)) + varint(value >> 7)


@lru_cache(_KNOWN_LENGTHS)
def image_head(length: int) -> tuple[bytes, int]:
    """Returns what stands in an Example before an image of `length` bytes, and the length of both."""
    value = b"\x0a" + varint(length)
    size = len(value) + length
    bytes_list = b"\x0a" + varint(size)
    size += len(bytes_list)
    feature = b"\x12" + varint(size)
    size += len(_IMAGE_NAME) + len(feature)
    entry = b"\x0a" + varint(size)
    head = b"".join((entry, _IMAGE_NAME, feature, bytes_list, value))
    return head, len(head) + length


@lru_cache(_KNOWN_LENGTHS)
def record_start(size: int) -> tuple[bytes, bytes]:
    """Returns the frame before an Example of `size` bytes of features, and the Example's own start."""
    start = b"\x0a" + varint(size)
    length = _LENGTH.pack(len(start) + size)
    return length + mask(google_crc32c.value(length)), start


def mask(crc: int) -> bytes:
    """Returns a CRC-32C as TFRecord stores it."""
    return _CHECKSUM.pack(((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
