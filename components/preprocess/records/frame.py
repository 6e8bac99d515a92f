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

# Lengths repeat in small images. In large ones they do not, and then little is lost.
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
def record_start(size: int) -> tuple[bytes, bytes]:
    """Returns the frame before an Example of `size` bytes of features, and the Example's own start."""
    start = b"\x0a" + varint(size)
    length = _LENGTH.pack(len(start) + size)
    return length + mask(google_crc32c.value(length)), start


@lru_cache(_KNOWN_LENGTHS)
def image_start(image: int, tail: int) -> tuple[bytes, bytes, int]:
    """Returns the frame before an Example, the Example up to its image, and the length of the whole record.

    Args:
        image: Length of the image in bytes.
        tail: Length of the features that follow it.
    """
    value = b"\x0a" + varint(image)
    size = len(value) + image
    bytes_list = b"\x0a" + varint(size)
    size += len(bytes_list)
    feature = b"\x12" + varint(size)
    size += len(_IMAGE_NAME) + len(feature)
    entry = b"\x0a" + varint(size)
    frame, example = record_start(len(entry) + size + tail)
    start = b"".join((example, entry, _IMAGE_NAME, feature, bytes_list, value))
    return frame, start, len(frame) + len(start) + image + tail + _CHECKSUM.size


def mask(crc: int) -> bytes:
    """Returns a CRC-32C as TFRecord stores it."""
    return _CHECKSUM.pack(((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
