"""What stands around an image in a shard: the frame of a TFRecord and the head of a tf.train.Example.

TFRecord, of tensorflow/core/lib/io/record_writer.h: per record its length (uint64), the masked CRC-32C of
those 8 bytes (uint32), the data, and the masked CRC-32C of the data (uint32), little-endian.

The entries of a tf.train.Example that follow the image: key, label and further features.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache

import google_crc32c

from shardline.components.preprocess.records.example import serialize
from shardline.trainer.data.manifest import Feature, Scalar
from shardline.trainer.errors import BadRecordError, SourceError

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


_OWN = frozenset({"image", "label", "key"})
_TYPES: Mapping[str, type | tuple[type, ...]] = {"int64": int, "float32": (float, int), "string": str}


def entries(features: Mapping[str, bytes | int | float | str]) -> bytes:
    """Returns features as they stand inside a tf.train.Example, without its first tag and length."""
    data = serialize(features)
    start = 1
    while data[start] > 0x7F:
        start += 1
    return data[start + 1 :]


@lru_cache(1024)
def key_head(length: int) -> bytes:
    """Returns what stands in an Example before a key of `length` bytes."""
    return entries({"key": bytes(length)})[:-length]


class FeatureEntries:
    """Checks and serializes the further features of examples.

    Args:
        declared: What every example has, beside image, label and key.

    Raises:
        SourceError: A declaration cannot be used.
    """

    def __init__(self, declared: Sequence[Feature]) -> None:
        for feature in declared:
            if feature.name in _OWN or feature.dtype not in _TYPES or feature.shape:
                raise SourceError(
                    f"the source declares a feature {feature.name!r} of {feature.dtype} {feature.shape}; "
                    f"expected a scalar of {', '.join(_TYPES)}, "
                    f"and a name other than {', '.join(sorted(_OWN))}"
                )
        self._types = {feature.name: (feature.dtype, _TYPES[feature.dtype]) for feature in declared}

    def of(self, features: Mapping[str, Scalar], name: str) -> bytes:
        """Returns the entries of one example.

        Raises:
            BadRecordError: The values are not those that were declared.
        """
        if features.keys() != self._types.keys():
            raise BadRecordError(
                name, f"has the features {sorted(features)}, the source declares {sorted(self._types)}"
            )
        values = {}
        for feature, (dtype, types) in self._types.items():
            value = features[feature]
            if not isinstance(value, types) or isinstance(value, bool):
                raise BadRecordError(name, f"feature {feature!r} is {value!r}, not {dtype}")
            values[feature] = float(value) if dtype == "float32" else value
        return entries(values)
