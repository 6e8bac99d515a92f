"""Serialized tf.train.Examples, without TensorFlow: loading it takes seconds and 600 MB.

They are as in tensorflow/core/example/{example,feature}.proto: an Example holds Features, a map from name to
Feature, which holds one of BytesList, FloatList and Int64List. Protobuf reads them, and does not write them:
loading it takes a quarter of the time in which a small dataset is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain, groupby, starmap
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

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

#: Names that a source's feature cannot have.
OWN_FEATURES = frozenset({"image", "label", "key"})


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


def encode(columns: Mapping[str, Any]) -> list[bytes]:
    """Returns the entries of each row in a tf.train.Example's map of features, sorted by name.

    Columns are int64, float (stored as float32), string or binary, or FixedSizeList of these; a number that
    a float column lacks is NaN, and no other value may be missing. Python looks at no single value.
    """
    flat = [(name, *_flat(name, columns[name])) for name in sorted(columns)]
    rows = len(flat[0][1]) // flat[0][2]
    size = sum(values.nbytes for _, values, _ in flat) // max(rows, 1) + _HEAD * len(flat)
    together, entries = max(1, _TOGETHER // size), list[bytes]()
    for first in range(0, rows, together):
        part = [(name, values[first * n : (first + together) * n], n) for name, values, n in flat]
        entries += _join(part).to_pylist()
    return entries


def _join(columns: Sequence[tuple[str, Any, int]]) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    parts = list[Any]()
    for is_float, found in groupby(columns, lambda column: pa.types.is_floating(column[1].type)):
        group = list(found)
        parts += [_matrix(group)] if is_float else chain.from_iterable(starmap(_varying, group))
    return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.binary()))


def _flat(name: str, column: Any) -> tuple[Any, int]:
    """Returns the values of a column as one of float32, int64 and binary, and how many a row has."""
    import pyarrow as pa

    is_list = pa.types.is_fixed_size_list(column.type)
    values = column.flatten() if is_list else column
    is_float = pa.types.is_floating(values.type)
    if (is_list and column.null_count) or (values.null_count and not is_float):
        raise ValueError(f"column {name!r} lacks values, which an example cannot store")
    kind = pa.float32() if is_float else pa.int64() if pa.types.is_integer(values.type) else pa.binary()
    return values.cast(kind), column.type.list_size if is_list else 1


def _matrix(columns: Sequence[tuple[str, Any, int]]) -> Any:
    """Returns neighbouring entries of floats, whose bytes are at the same places in all rows."""
    import numpy as np

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


def _varying(name: str, values: Any, size: int) -> tuple[Any, pa.Array]:
    """Returns the heads and the data of a feature of whole numbers or texts."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    is_list = False
    if pa.types.is_integer(values.type):
        tag, data = _TAG_3, _varints(values, size)
    elif size == 1:
        tag, data = _TAG_1, values
    else:
        tag, is_list = _TAG_1, True
        starts = _by_length(values, lambda length: bytes((_TAG_1,)) + varint(length))
        joined = pc.binary_join_element_wise(starts, values, pa.scalar(b"", pa.binary()))
        _, offsets, texts = joined.buffers()
        data = _binary(np.frombuffer(offsets, np.int32)[: len(joined) + 1 : size], texts)
    return _by_length(data, lambda length: head(name, length, tag, is_list=is_list)), data


def _by_length(values: Any, start: Callable[[int], bytes]) -> Any:
    """Returns what precedes each value, which follows from its length."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths = pc.binary_length(values).dictionary_encode()
    return pa.array(map(start, lengths.dictionary.to_pylist()), pa.binary()).take(lengths.indices)


def _varints(values: Any, size: int) -> Any:
    """Returns the numbers of each row as `varint` does, `size` of them together."""
    import numpy as np

    numbers = values.to_numpy().view(np.uint64)
    lengths = 1 + np.searchsorted(1 << np.arange(7, 64, 7, dtype=np.uint64), numbers, "right")
    place = np.arange(lengths.max(initial=1))
    digits = (numbers[:, None] >> (7 * place).astype(np.uint64)).astype(np.uint8)
    left = lengths[:, None] - place
    digits = np.where(left > 1, digits | 0x80, digits & 0x7F)[left > 0]
    return _binary(np.append(0, np.cumsum(lengths))[::size], digits)


def _binary(offsets: npt.NDArray[np.integer], data: Any) -> Any:
    import pyarrow as pa

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
    import pyarrow as pa

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
            [row[name][1] if name in row else None for row in rows],
            pa.list_(types[found.get(name, "bytes")]),
        )
        for name in dict.fromkeys((*kinds, *chain(*rows)))
    }, faults
