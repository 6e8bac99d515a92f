"""One tf.train.Example as bytes, written by hand: TensorFlow takes seconds and 600 MB to load for this.

The wire format is that of tensorflow/core/example/{example,feature}.proto: an Example holds Features,
which hold a map from name to Feature, which holds one of BytesList, FloatList and Int64List.
"""

from __future__ import annotations

from collections.abc import Mapping

_LENGTH_DELIMITED = 2
_EXAMPLE_FEATURES = _MAP_ENTRY = _ENTRY_NAME = _LIST_VALUES = _FEATURE_BYTES_LIST = 1
_ENTRY_FEATURE = 2
_FEATURE_INT64_LIST = 3


def serialize(features: Mapping[str, bytes | int]) -> bytes:
    """Returns a serialized tf.train.Example, the same bytes for the same features.

    Args:
        features: One value by name: bytes, or an int in 0..2**63-1, which becomes an int64.
    """
    entries = b"".join(
        _field(
            _MAP_ENTRY, _field(_ENTRY_NAME, name.encode()) + _field(_ENTRY_FEATURE, _feature(features[name]))
        )
        for name in sorted(features)
    )
    return _field(_EXAMPLE_FEATURES, entries)


def _feature(value: bytes | int) -> bytes:
    if isinstance(value, bytes):
        return _field(_FEATURE_BYTES_LIST, _field(_LIST_VALUES, value))
    return _field(_FEATURE_INT64_LIST, _field(_LIST_VALUES, _varint(value)))


def _field(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
