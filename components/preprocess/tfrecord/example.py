"""tf.train.Example without TensorFlow, which takes seconds and 600 MB to load for this.

The wire format is that of tensorflow/core/example/{example,feature}.proto: an Example holds Features, a map
from name to Feature, which holds one of BytesList, FloatList and Int64List. Protobuf reads it; it is written
by hand, as loading protobuf takes a quarter of the time in which a small dataset is written.
"""

from __future__ import annotations

import functools
import reprlib
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from shardline.trainer.base.errors import BadRecordError, SourceError
from shardline.trainer.data.features import Feature, Label, Scalar

Kind = Literal["bytes", "float", "int64"]
Value = bytes | float | int
#: The value of a feature, or its numbers, all of them whole or all of them floats.
Stored = bytes | int | float | str | list[int] | list[float] | list[str]

#: Tags of the first three length-delimited fields of a message.
_TAG_1, _TAG_2, _TAG_3 = 0x0A, 0x12, 0x1A
_MASK_64 = (1 << 64) - 1

_FITTING = {"int64": struct.Struct("<q"), "float32": struct.Struct("<f")}

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


def parse_entries(found: bytes) -> dict[str, tuple[Kind, list[Value]]]:
    """Returns kind and values of features inside a tf.train.Example, as `parse`."""
    return parse(_field(_TAG_1, found))


def varint(value: int) -> bytes:
    """Returns a whole number as protobuf writes it, seven bits per byte."""
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    return bytes((value & 0x7F | 0x80,)) + varint(value >> 7)


def parse(data: bytes) -> dict[str, tuple[Kind, list[Value]]]:
    """Returns kind and values of every feature of a serialized Example; ValueError if it is not one."""
    from google.protobuf.message import DecodeError

    try:
        example = _example_type().FromString(data)
    except DecodeError:
        raise ValueError("not a tf.train.Example: it ends too early, or is damaged") from None
    if example.steps:
        raise ValueError(_SEQUENCE)
    return {
        name: (kind, list(getattr(feature, kind).value))
        for name, feature in example.features.feature.items()
        if (kind := feature.WhichOneof("kind"))
    }


@functools.cache
def _example_type() -> Any:
    """Returns the class of the message, apart from TensorFlow's own; `steps` are a SequenceExample's."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="shardline", syntax="proto3")
    fields = descriptor_pb2.FieldDescriptorProto

    def add(parent: Any, name: str, types: Mapping[str, Any], *, repeated: bool = False) -> Any:
        message = parent.add(name=name)
        label = fields.LABEL_REPEATED if repeated else fields.LABEL_OPTIONAL
        for number, (field, kind) in enumerate(types.items(), 1):
            named = {"type_name": f".shardline.{kind}"} if isinstance(kind, str) else {"type": kind}
            message.field.add(name=field, number=number, label=label, **named)
        return message

    add(file.message_type, "Bytes", {"value": fields.TYPE_BYTES}, repeated=True)
    add(file.message_type, "Float", {"value": fields.TYPE_FLOAT}, repeated=True)
    add(file.message_type, "Int64", {"value": fields.TYPE_INT64}, repeated=True)
    feature = add(file.message_type, "Feature", {"bytes": "Bytes", "float": "Float", "int64": "Int64"})
    feature.oneof_decl.add(name="kind")
    for field in feature.field:
        field.oneof_index = 0
    features = add(file.message_type, "Features", {"feature": "Features.FeatureEntry"}, repeated=True)
    entry = add(features.nested_type, "FeatureEntry", {"key": fields.TYPE_STRING, "value": "Feature"})
    entry.options.map_entry = True
    add(file.message_type, "Example", {"features": "Features", "steps": fields.TYPE_BYTES})
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shardline.Example"))


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
