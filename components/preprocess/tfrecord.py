"""TFRecord files of tf.train.Examples, without TensorFlow: loading it takes seconds and 600 MB.

A file is framed as in tensorflow/core/lib/io/record_{reader,writer}.h: per record its length (uint64), the
masked CRC-32C of those 8 bytes (uint32), the data, and the masked CRC-32C of the data (uint32),
little-endian; the whole file may be compressed with gzip. Records are numbered from 0.

The data are as in tensorflow/core/example/{example,feature}.proto: an Example holds Features, a map from name
to Feature, which holds one of BytesList, FloatList and Int64List. Protobuf reads them, and does not write
them: loading it takes a quarter of the time in which a small dataset is written.
"""

from __future__ import annotations

import gzip
import os
import reprlib
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, BinaryIO, Literal, NamedTuple

import google_crc32c

from shardline.components.storage import remote_files
from shardline.trainer.base.errors import BadRecordError, SourceError
from shardline.trainer.data.features import Feature, Label, Scalar

Kind = Literal["bytes", "float", "int64"]
Value = bytes | float | int
#: The value of a feature, or its numbers, all of them whole or all of them floats.
Stored = bytes | int | float | str | list[int] | list[float] | list[str]
#: Kind and values of each feature of an Example, by name.
Features = dict[str, tuple[Kind, list[Value]]]

#: Tags of the first three length-delimited fields of a message, the only ones that are written.
_TAG_1, _TAG_2, _TAG_3 = 0x0A, 0x12, 0x1A
_MASK_64 = (1 << 64) - 1

_FITTING = {"int64": struct.Struct("<q"), "float32": struct.Struct("<f")}

# tensorflow/core/example/{example,feature}.proto, with the names of `Kind` for a Feature's fields, and the
# field that only a tf.train.SequenceExample has.
_PROTO = """
name: "shardline/example.proto" package: "shardline" syntax: "proto3"
message_type { name: "Any" }
message_type { name: "Bytes" field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
message_type { name: "Floats" field { name: "value" number: 1 type: TYPE_FLOAT label: LABEL_REPEATED } }
message_type { name: "Int64s" field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes" number: 1 type: TYPE_MESSAGE type_name: ".shardline.Bytes" oneof_index: 0 }
  field { name: "float" number: 2 type: TYPE_MESSAGE type_name: ".shardline.Floats" oneof_index: 0 }
  field { name: "int64" number: 3 type: TYPE_MESSAGE type_name: ".shardline.Int64s" oneof_index: 0 } }
message_type { name: "Features"
  nested_type { name: "Entry" options { map_entry: true } field { name: "key" number: 1 type: TYPE_STRING }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".shardline.Feature" } }
  field { name: "feature" number: 1 type: TYPE_MESSAGE type_name: ".shardline.Features.Entry"
    label: LABEL_REPEATED } }
message_type { name: "Example"
  field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".shardline.Features" }
  field { name: "steps" number: 2 type: TYPE_MESSAGE type_name: ".shardline.Any" } }
"""

_SEQUENCE = (
    "it is a tf.train.SequenceExample, whose steps are no columns; write an Example of each step, or read it "
    "with a source of your own, pkg.module:Source"
)


#: Names that a source's feature cannot have.
OWN_FEATURES = frozenset({"image", "label", "key"})


class FeatureEntries:
    """Checks and serializes the features that a source declares in addition to image, labels and key."""

    _TYPES: Mapping[str, type | tuple[type, ...]] = {"int64": int, "float32": (float, int), "string": str}

    def __init__(self, declared: Sequence[Feature], labels: Sequence[Label]) -> None:
        own = OWN_FEATURES | {label.name for label in labels}
        for feature in declared:
            is_wrong = len(feature.shape) > 1 or not all(feature.shape) or not feature.name.isprintable()
            if feature.name in own or feature.dtype not in self._TYPES or is_wrong:
                raise SourceError(
                    f"the source declares a feature {feature.name!r} of {feature.dtype} {feature.shape}; "
                    f"expected {', '.join(self._TYPES)} of shape () or (n,), "
                    f"and a printable name other than {', '.join(sorted(own))}"
                )
        self._types = {
            feature.name: (feature.dtype, self._TYPES[feature.dtype], feature.shape) for feature in declared
        }

    def serialize(self, features: Mapping[str, Scalar | Sequence[Scalar]], name: str) -> bytes:
        """Returns the entries of one example; BadRecordError if the values are not those declared."""
        if features.keys() != self._types.keys():
            raise BadRecordError(
                name, f"has the features {sorted(features)}, the source declares {sorted(self._types)}"
            )
        values = {}
        for feature, (dtype, types, shape) in self._types.items():
            value: Any = features[feature]
            if shape and (not isinstance(value, list) or len(value) != shape[0]):
                raise BadRecordError(
                    name, f"feature {feature!r} is {reprlib.repr(value)}, not a list of {shape[0]}"
                )
            for item in value if shape else (value,):
                try:  # a number that fits its type, a text without lone surrogates
                    fits = isinstance(item, types) and not isinstance(item, bool)
                    item.encode("utf-8", "surrogateescape") if isinstance(item, str) else _FITTING[
                        dtype
                    ].pack(item)
                except (KeyError, OverflowError, struct.error, UnicodeEncodeError):
                    fits = False
                if not fits:
                    raise BadRecordError(name, f"feature {feature!r} is {item!r}, not {dtype}")
            if dtype == "float32":
                value = list(map(float, value)) if shape else float(value)
            values[feature] = value
        return entries(values)


def serialize(features: Mapping[str, Stored]) -> bytes:
    """Returns a serialized tf.train.Example, the same bytes for the same features."""
    return _field(_TAG_1, entries(features))


def entries(features: Mapping[str, Stored]) -> bytes:
    """Returns features as inside a tf.train.Example, without its first tag and length."""
    return b"".join(
        _field(_TAG_1, _field(_TAG_1, name.encode()) + _field(_TAG_2, _feature(features[name])))
        for name in sorted(features)
    )


@lru_cache(1024)
def key_head(length: int) -> bytes:
    """Returns the bytes of an Example before a key of `length` bytes."""
    return entries({"key": bytes(length)})[:-length]


def parse_entries(found: bytes) -> Features:
    """Returns kind and values of features inside a tf.train.Example, as `parse`."""
    return parse(_field(_TAG_1, found))


def varint(value: int) -> bytes:
    """Returns a whole number as protobuf writes it, seven bits per byte."""
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    return bytes((value & 0x7F | 0x80,)) + varint(value >> 7)


@cache
def _example() -> tuple[Any, type[Exception]]:
    """Returns protobuf's class of tf.train.Example, and its error for other data."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory, text_format

    file = text_format.Parse(_PROTO, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    example = message_factory.GetMessageClass(pool.FindMessageTypeByName("shardline.Example"))
    return example, message.DecodeError


def parse(data: bytes) -> Features:
    """Returns kind and values of every feature of a serialized Example; ValueError if it is not one."""
    example_class, decode_error = _example()
    try:
        example = example_class.FromString(data)
    except decode_error:
        raise ValueError("not a tf.train.Example: it is damaged, or ends too early") from None
    if example.HasField("steps"):
        raise ValueError(_SEQUENCE)
    features = example.features.feature
    kinds = ((name, features[name].WhichOneof("kind")) for name in features)
    return {name: (kind, getattr(features[name], kind).value[:]) for name, kind in kinds if kind}


def only_value(features: Features, name: str, kind: Kind | None = None) -> Value:
    """Returns the value of a feature that has one, of a `kind`; ValueError, worded to follow "the record"."""
    if name not in features:
        raise ValueError(f"has no feature {name!r}")
    found, values = features[name]
    if found != (kind or found):
        raise ValueError(f"feature {name!r} is {found}, not {kind}")
    if len(values) != 1:
        raise ValueError(f"feature {name!r} has {len(values)} values, one is needed")
    return values[0]


def _feature(value: Stored) -> bytes:
    values = value if isinstance(value, list) else [value]
    if isinstance(values[0], str | bytes):
        texts = (
            text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text for text in values
        )
        return _field(_TAG_1, b"".join(_field(_TAG_1, text) for text in texts))  # type: ignore[arg-type]
    if isinstance(values[0], float):
        return _field(_TAG_2, _field(_TAG_1, struct.pack(f"<{len(values)}f", *values)))
    return _field(_TAG_3, _field(_TAG_1, b"".join(varint(int(number) & _MASK_64) for number in values)))


def _field(tag: int, payload: bytes) -> bytes:
    return bytes((tag,)) + varint(len(payload)) + payload


_LENGTH, _CHECKSUM = struct.Struct("<Q"), struct.Struct("<I")
_MASK = 0xA282EAD8
_HEADER_BYTES = _LENGTH.size + _CHECKSUM.size
_IMAGE_NAME = b"\x0a\x05image"

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


@lru_cache(_KNOWN_LENGTHS)
def image_start(image: int, tail: int) -> tuple[bytes, bytes, int]:
    """Returns the frame before an Example, the Example up to its image, and the length of the whole record.

    `image` and `tail` are the lengths of the image and of the features after it, in bytes; `image` is
    `NO_IMAGE` where there are features alone.
    """
    start, size = b"", image
    for tag in (b"\x0a", b"\x0a", _IMAGE_NAME + b"\x12", b"\x0a"):  # value, list, feature, entry
        start = tag + varint(size) + start if image != NO_IMAGE else b""
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
    with remote_files.as_source_error(name), remote_files.open_read(name) as file:
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
    with remote_files.as_source_error(name), remote_files.open_read(name) as file:
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
