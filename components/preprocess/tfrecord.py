"""TFRecord files and the tf.train.Examples in them, without TensorFlow: loading it takes seconds and 600 MB.

A file is framed as in tensorflow/core/lib/io/record_{reader,writer}.h: per record its length (uint64), the
masked CRC-32C of those 8 bytes (uint32), the data, and the masked CRC-32C of the data (uint32),
little-endian; the whole file may be compressed with gzip. Records are numbered from 0.

Examples are as in tensorflow/core/example/{example,feature}.proto: an Example holds Features, a map from name
to Feature, which holds one of BytesList, FloatList and Int64List. Protobuf reads them, and does not write
them: loading it takes a quarter of the time in which a small dataset is written.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain, groupby, islice, starmap
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple

import google_crc32c

from shardline.components.preprocess.lazy import np, pa, pc
from shardline.components.preprocess.process_pool import Report
from shardline.components.storage import as_source_error, open_read
from shardline.trainer.base.errors import BadRecordError, SourceError
from shardline.trainer.manifest import Feature

if TYPE_CHECKING:
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


Kind = Literal["bytes", "float", "int64"]

#: Kind of the values of each type.
KINDS: Mapping[str, Kind] = {"uint8": "bytes", "string": "bytes", "int64": "int64", "float32": "float"}

#: Tags of the first three length-delimited fields of a message, the only ones that are written.
_TAG_1, _TAG_2, _TAG_3 = 0x0A, 0x12, 0x1A

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


# Bytes of rows that are encoded at a time, about, and of the head of a value.
_TOGETHER, _HEAD = 1 << 24, 20


def as_example(entries: bytes) -> bytes:
    """Returns a serialized tf.train.Example of the entries of its features."""
    return _field(_TAG_1, entries)


@lru_cache(4096)
def head(name: str, length: int, tag: int = _TAG_1, *, is_list: bool = False) -> bytes:
    """Returns what precedes the data of a feature in an entry: one text, or numbers.

    Args:
        name: The feature's.
        length: Of the data, in bytes.
        tag: Of the feature's kind of list.
        is_list: Whether the data are many texts, each with a tag and length of its own.
    """
    start = b""
    for each in (tag,) if is_list else (_TAG_1, tag):
        start = bytes((each,)) + varint(length + len(start)) + start
    start = _field(_TAG_1, name.encode()) + bytes((_TAG_2,)) + varint(length + len(start)) + start
    return bytes((_TAG_1,)) + varint(length + len(start)) + start


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


def _parse(data: bytes, names: Iterable[str]) -> dict[str, tuple[Kind, list[Any]]]:
    """Returns kind and values of features of a serialized Example; ValueError if it is not one."""
    example_class, decode_error = _example()
    try:
        example = example_class.FromString(data)
    except decode_error:
        raise ValueError("not a tf.train.Example: it is damaged, or ends too early") from None
    if example.HasField("steps"):
        raise ValueError(_SEQUENCE)
    features = example.features.feature
    found = dict[str, tuple[Kind, list[Any]]]()
    for name in names or features:  # items() takes half as long again
        feature = features[name]
        if kind := feature.WhichOneof("kind"):
            found[name] = kind, getattr(feature, kind).value[:]
    return found


def _field(tag: int, payload: bytes) -> bytes:
    return bytes((tag,)) + varint(len(payload)) + payload


def encode(columns: Mapping[str, Any]) -> Any:
    """Returns the entries of each row in a tf.train.Example's map of features, sorted by name: large_binary.

    Columns are int64, float (stored as float32), string or binary, or FixedSizeList of these; a number that
    a float column lacks is NaN, and no other value may be missing. Python looks at no single value.
    """
    flat = [(name, *_flat(name, columns[name])) for name in sorted(columns)]
    rows = len(flat[0][1]) // flat[0][2]
    size = sum(values.nbytes for _, values, _ in flat) // max(rows, 1) + _HEAD * len(flat)
    together, entries = max(1, _TOGETHER // size), list[Any]()
    for first in range(0, rows, together):
        part = [(name, values[first * n : (first + together) * n], n) for name, values, n in flat]
        entries.append(_join(part).cast(pa.large_binary()))
    return entries[0] if len(entries) == 1 else pa.chunked_array(entries, pa.large_binary()).combine_chunks()


def _join(columns: Sequence[tuple[str, Any, int]]) -> Any:
    parts = list[Any]()
    for is_float, found in groupby(columns, lambda column: pa.types.is_floating(column[1].type)):
        group = list(found)
        parts += [_matrix(group)] if is_float else chain.from_iterable(starmap(_varying, group))
    return concatenate(*parts)


def concatenate(first: Any, *others: Any) -> Any:
    """Returns the texts of several columns, those of each row one behind the other."""
    nothing = pa.scalar(b"", first.type)
    return pc.binary_join_element_wise(first, *others, nothing) if others else first


def _flat(name: str, column: Any) -> tuple[Any, int]:
    """Returns the values of a column as one of float32, int64 and binary, and how many a row has."""
    is_list = pa.types.is_fixed_size_list(column.type)
    values = column.flatten() if is_list else column
    is_float = pa.types.is_floating(values.type)
    if (is_list and column.null_count) or (values.null_count and not is_float):
        raise ValueError(f"column {name!r} lacks values, which an example cannot store")
    kind = pa.float32() if is_float else pa.int64() if pa.types.is_integer(values.type) else pa.binary()
    return values.cast(kind), column.type.list_size if is_list else 1


def _matrix(columns: Sequence[tuple[str, Any, int]]) -> Any:
    """Returns neighbouring entries of floats, whose bytes are at the same places in all rows."""
    rows = len(columns[0][1]) // columns[0][2]
    heads = [head(name, 4 * size, _TAG_2) for name, _, size in columns]
    template = b"".join(start + bytes(4 * size) for start, (*_, size) in zip(heads, columns, strict=True))
    data, place = bytearray(template) * rows, 0
    for start, (_, values, size) in zip(heads, columns, strict=True):
        place += len(start)
        table = np.ndarray((rows, size), "<f4", data, place, (len(template), 4))
        table[:] = values.to_numpy(zero_copy_only=False).reshape(rows, size)
        place += 4 * size
    return _binary(np.arange(rows + 1) * len(template), data)


def _varying(name: str, values: Any, size: int) -> tuple[Any, Any]:
    """Returns the heads and the data of a feature of whole numbers or texts."""
    is_list = False
    if pa.types.is_integer(values.type):
        tag, data = _TAG_3, _varints(values, size)
    elif size == 1:
        tag, data = _TAG_1, values
    else:
        tag, is_list = _TAG_1, True
        starts = by_length(values, lambda length: bytes((_TAG_1,)) + varint(length))
        joined = concatenate(starts, values)
        _, offsets, texts = joined.buffers()
        data = _binary(np.frombuffer(offsets, np.int32)[: len(joined) + 1 : size], texts)
    return by_length(data, lambda length: head(name, length, tag, is_list=is_list)), data


def by_length(values: Any, start: Callable[[int], bytes]) -> Any:
    """Returns what precedes each value, which follows from its length."""
    lengths = pc.binary_length(values).dictionary_encode()
    return pa.array(map(start, lengths.dictionary.to_pylist()), values.type).take(lengths.indices)


def _varints(values: Any, size: int) -> Any:
    """Returns the numbers of each row as `varint` does, `size` of them together."""
    numbers = values.to_numpy().view(np.uint64)
    lengths = 1 + np.searchsorted(1 << np.arange(7, 64, 7, dtype=np.uint64), numbers, "right")
    place = np.arange(lengths.max(initial=1))
    digits = (numbers[:, None] >> (7 * place).astype(np.uint64)).astype(np.uint8)
    left = lengths[:, None] - place
    digits = np.where(left > 1, digits | 0x80, digits & 0x7F)[left > 0]
    return _binary(np.append(0, np.cumsum(lengths))[::size], digits)


def _binary(offsets: npt.NDArray[np.integer], data: Any) -> Any:
    ends = pa.array(offsets, pa.int32())  # refuses what 32 bits cannot hold
    return pa.Array.from_buffers(pa.binary(), len(ends) - 1, [None, ends.buffers()[1], pa.py_buffer(data)])


def decode(
    records: Iterable[bytes], kinds: Mapping[str, Kind] = MappingProxyType({}), names: Collection[str] = ()
) -> tuple[dict[str, Any], dict[int, str]]:
    """Returns the features of serialized Examples as columns, and what is wrong with a record by its number.

    Columns are lists of int64, float32 or binary, null where a record is wrong or lacks the feature; those of
    `kinds` are there in any case. Each has the kind in `kinds`, else the one that most records have, where
    their list is not empty; a record with another is wrong. With `names`, only these features are read, which
    all records have: values that are not wanted cost little.
    """
    rows, faults, found = list[dict[str, tuple[Kind, list[Any]]]](), dict[int, str](), dict(kinds)
    mixed = set[str]()
    for number, record in enumerate(records):
        try:
            row = _parse(record, names)
        except ValueError as error:
            row, faults[number] = {}, str(error)
        rows.append(row)
        for name, (kind, held) in row.items():
            if held and kind != found.setdefault(name, kind):
                mixed.add(name)
    for name in mixed - kinds.keys():
        counts = Counter(row[name][0] for row in rows if name in row and row[name][1])
        found[name] = counts.most_common(1)[0][0]
    for number, row in enumerate(rows if mixed else ()):
        for name in sorted(row.keys() & mixed):
            kind, held = row[name]
            if held and kind != found[name]:
                faults[number], rows[number] = f"feature {name!r} is {kind}, not {found[name]}", {}
                break
    types = {"int64": pa.int64(), "float": pa.float32(), "bytes": pa.binary()}
    return {
        name: pa.array(
            [row[name][1] if name in row else None for row in rows], pa.list_(types[found.get(name, "bytes")])
        )
        for name in dict.fromkeys((*kinds, *chain(*rows)))
    }, faults


# Most records of a batch, and bytes after which it ends.
_ROWS, _ROWS_BYTES = 256, 4 << 20


class ShardBatch(NamedTuple):
    """Successive records of a shard.

    Attributes:
        columns: Values of each feature, as lists of its length, of the records that are as the manifest says.
        rows: Numbers of these in the batch.
        faults: What is wrong with the others, by their numbers.
        bytes: Size of all.
    """

    columns: Mapping[str, Any]
    rows: Sequence[int]
    faults: dict[int, str]
    bytes: int


def read_batches(
    path: Path, features: Sequence[Feature], report: Report | None = None, most: int | None = None
) -> Iterator[ShardBatch]:
    """Yields the records of a shard, or the first `most`.

    Raises SourceError where the rest of the shard cannot be read: it is cut off, or a length is damaged.
    """
    records = islice(read_records(path), most)
    while True:
        found, size, failure = list[Record | BadRecordError](), 0, None
        try:
            while len(found) < _ROWS and size < _ROWS_BYTES and (record := next(records, None)):
                found.append(record)
                size += len(_data(record))
        except SourceError as error:
            failure = error
        if found:
            yield _shard_batch(found, features, size)
        if report:
            report(len(found), size)
        if failure or not found:
            break
    if failure:
        raise failure


def _data(record: Record | BadRecordError) -> bytes:
    return b"" if isinstance(record, BadRecordError) else record.data


def _shard_batch(
    found: Sequence[Record | BadRecordError], features: Sequence[Feature], size: int
) -> ShardBatch:
    kinds = {feature.name: KINDS[feature.dtype] for feature in features}
    columns, faults = decode(list(map(_data, found)), kinds)
    faults |= {row: each.reason for row, each in enumerate(found) if isinstance(each, BadRecordError)}
    for feature in features:
        name, expected = feature.name, width(feature)
        lengths = pc.list_value_length(columns[name]).fill_null(-1).to_numpy()
        for row in np.flatnonzero(lengths != expected).tolist():
            has = f"feature {name!r} has {lengths[row]} values, not {expected}"
            faults.setdefault(row, has if lengths[row] >= 0 else f"has no feature {name!r}")
    for name in sorted(columns.keys() - kinds):
        for row in np.flatnonzero(columns.pop(name).is_valid()).tolist():
            faults.setdefault(row, f"has a feature {name!r} that the manifest does not name")
    rows = [row for row in range(len(found)) if row not in faults]
    sound = pa.array(rows, pa.int64())
    return ShardBatch({name: column.take(sound) for name, column in columns.items()}, rows, faults, size)


def width(feature: Feature) -> int:
    """Returns how many values a feature has in a record."""
    return 1 if feature.encoding else math.prod(side or 1 for side in feature.shape)
