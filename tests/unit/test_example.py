"""Serialized examples against TensorFlow's own protobuf messages."""

from __future__ import annotations

import contextlib
import random
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardline.components.preprocess.sources.example import Example, ExampleColumns
from shardline.components.preprocess.tfrecord import NO_IMAGE, decode, encode
from shardline.components.preprocess.write import ShardFile
from shardline.trainer.base.errors import BadRecordError
from shardline.trainer.manifest import Feature, Label

EXAMPLES: list[dict[str, bytes | int | float | str]] = [
    {"image": b"", "key": b"empty", "label": 0},
    {"image": b"\x00" * 127, "key": b"one byte of length", "label": 127},
    {"image": b"\xff" * 128, "key": b"two bytes of length", "label": 128},
    {"image": bytes(range(256)) * 1000, "key": "ä/\n".encode(), "label": 2**63 - 1},
    {"key": b"other kinds", "text": "grün", "weight": 0.1, "below zero": -1, "least": -(2**63)},
    {"key": b"float limits", "big": 3.4028234e38, "small": -1e-45, "inf": float("inf"), "zero": 0.0},
    {"key": b"an undecodable file name", "path": b"\xff.png"},
    {"k" * 200: b"a long name", "key": b"long name"},
]


def theirs(features: dict[str, Any]) -> tf.train.Example:
    """Returns TensorFlow's message with a list, or one value, for each feature."""
    message = tf.train.Example()
    for name, value in features.items():
        feature = message.features.feature[name]
        values = value if isinstance(value, list) else [value]
        for one in values:
            if isinstance(one, str):
                one = one.encode("utf-8", "surrogateescape")
            kind = {bytes: feature.bytes_list, float: feature.float_list, int: feature.int64_list}[type(one)]
            kind.value.append(one)
    return message


def entries(features: dict[str, Any]) -> bytes:
    """Returns the features as they are inside TensorFlow's message."""
    return theirs(features).features.SerializeToString(deterministic=True)


def serialize(features: dict[str, Any]) -> bytes:
    """Returns TensorFlow's message, serialized."""
    return theirs(features).SerializeToString(deterministic=True)


def parse(data: bytes) -> dict[str, tuple[str, list[Any]]]:
    """Returns kind and values of each feature that `decode` finds; the kind of no value is ""."""
    columns, faults = decode([data])
    for fault in faults.values():
        raise ValueError(fault)
    kinds = {pa.int64(): "int64", pa.float32(): "float", pa.binary(): "bytes"}
    values = {name: column[0].as_py() for name, column in columns.items()}
    return {
        name: (kinds[columns[name].type.value_type] if values[name] else "", values[name]) for name in values
    }


def content(message: tf.train.Example) -> dict[str, tuple[str, list[Any]]]:
    """Returns what `parse` should give for TensorFlow's message."""
    found = {}
    for name, feature in message.features.feature.items():
        kind = feature.WhichOneof("kind")
        if kind:
            values = list(getattr(feature, kind).value)
            found[name] = (kind.removesuffix("_list") if values else "", values)
    return found


@pytest.mark.parametrize("features", EXAMPLES, ids=lambda features: features["key"].decode()[:20].strip())
def test_an_example_has_the_bytes_that_tensorflow_writes(features: dict[str, Any]) -> None:
    columns = {name: pa.array([value]) for name, value in features.items()}
    assert encode(columns).to_pylist() == [entries(features)]
    assert parse(serialize(features)) == content(theirs(features))


def test_random_examples_are_read_as_tensorflow_reads_them() -> None:
    rng = random.Random(0)

    def value(kind: str) -> Any:
        if kind == "bytes":
            return rng.randbytes(rng.choice([0, 1, 5, 127, 128, 300, 20_000]))
        if kind == "float":
            return struct.unpack("<f", struct.pack("<f", rng.uniform(-1e6, 1e6)))[0]
        return rng.choice([0, 1, 127, 128, 2**31, 2**63 - 1, -1, -(2**63), rng.randrange(2**40)])

    for _ in range(400):
        features = {}
        for index in range(rng.randrange(8)):
            kind = rng.choice(["bytes", "float", "int64"])
            name = rng.choice(["f", "ä" * 70, "a/b/c"]) + str(index)
            features[name] = [value(kind) for _ in range(rng.choice([0, 1, 1, 1, 2, 9, 200]))]
        message = theirs(features)
        assert parse(message.SerializeToString()) == content(message)


TAILS = st.fixed_dictionaries(
    {
        "key": st.binary(max_size=300),
        "number": st.integers(-(2**63), 2**63 - 1),
        "real": st.floats(width=32, allow_nan=False),
        "text": st.text(max_size=200),
    }
)
SHARDS = st.lists(st.tuples(st.none() | st.integers(0, 40_000), TAILS), max_size=20)


# Around every length at which a number takes one more byte.
LENGTHS = [0, 1, 90, 100, 126, 127, 128, 129, 8192, 16300, 16383, 16384, 16400, 2097100, 2097152]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(SHARDS)
@example([(length, {"key": b"key", "number": 300}) for length in LENGTHS])
def test_random_shards_are_what_tensorflow_writes(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[int | None, dict[str, Any]]]
) -> None:
    path = tmp_path_factory.mktemp("shards") / "shard"
    images = [None if size is None else bytes([size % 256]) * size for size, _ in records]
    with ShardFile(path) as output:
        if records:
            output.add(
                [image or b"" for image in images],
                [NO_IMAGE if image is None else len(image) for image in images],
                [entries(tail) for _, tail in records],
            )
    pairs = zip(images, records, strict=True)
    examples = [tail if image is None else {"image": image, **tail} for image, (_, tail) in pairs]
    plain = Path(f"{path}.plain")
    with tf.io.TFRecordWriter(str(plain)) as writer:
        for example in examples:
            writer.write(theirs(example).SerializeToString(deterministic=True))
    assert path.read_bytes() == plain.read_bytes()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *(("int64", value) for value in (2**63, -(2**63) - 1, 2**64 + 5)),
        *(("float32", value) for value in (1e39, -(10**400))),
        ("string", "\ud800"),
    ],
)
def test_a_value_that_its_type_cannot_hold_is_refused(dtype: str, value: int | float | str) -> None:
    columns = ExampleColumns([Label("label", "class", ("a", "b"))], [Feature("a", dtype)])
    with pytest.raises(BadRecordError, match=rf"'x': feature 'a' is .*, not {dtype}"):
        columns.add(Example("x", 0, features={"a": value}))


KINDS = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1) | st.integers(0, 200),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(width=32, allow_nan=False),
    pa.string(): st.text(max_size=20) | st.text(alphabet="ab", min_size=120, max_size=130),
    pa.binary(): st.binary(max_size=20),
}


@st.composite
def columns(draw: st.DrawFn) -> dict[str, pa.Array]:
    rows, found = draw(st.integers(0, 6)), {}
    for name in draw(st.lists(st.text(min_size=1, max_size=9) | st.just("n" * 130), min_size=1, unique=True)):
        kind, size = draw(st.sampled_from(list(KINDS))), draw(st.integers(1, 3))
        of_row = KINDS[kind] if size == 1 else st.lists(KINDS[kind], min_size=size, max_size=size)
        values = [draw(of_row) for _ in range(rows + 1)]  # and one before them, as in a slice of a batch
        found[name] = pa.array(values, kind if size == 1 else pa.list_(kind, size))[1:]
    return found


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(columns())
def test_columns_are_encoded_as_their_rows_are_and_read_back(columns: dict[str, pa.Array]) -> None:
    rows = pa.RecordBatch.from_pydict(columns).to_pylist()
    found = encode(columns).to_pylist()
    # Of two names, one of which the other begins with, protobuf writes the longer one first.
    assert [sorted(one) for one in found] == [sorted(entries(row)) for row in rows]
    decoded, faults = decode(serialize(row) for row in rows)
    assert not faults
    for name in decoded:
        values = [value if isinstance(value, list) else [value] for value in columns[name].to_pylist()]
        texts = [[v.encode() if isinstance(v, str) else v for v in value] for value in values]
        assert decoded[name].to_pylist() == texts


def test_a_text_of_a_mebibyte_and_a_number_that_is_missing_are_encoded() -> None:
    texts, numbers = ["x" * (1 << 20), "", "y" * 16384], [None, 1.0, float("inf")]
    found = encode({"text": pa.array(texts), "number": pa.array(numbers, pa.float32())}).to_pylist()
    rows = zip(texts, [float("nan"), *numbers[1:]], strict=True)
    assert found == [entries({"text": text, "number": number}) for text, number in rows]


@pytest.mark.parametrize(
    "column",
    [pa.array([1, None]), pa.array(["a", None]), pa.array([[1.0], None], pa.list_(pa.float32(), 1))],
    ids=["number", "text", "list"],
)
def test_a_value_that_is_missing_is_not_encoded(column: pa.Array) -> None:
    with pytest.raises(ValueError, match="column 'a' lacks values"):
        encode({"a": column})


def test_a_record_that_is_wrong_is_a_fault_and_has_no_values() -> None:
    good = serialize({"a": 1, "b": b"text"})
    floats = block(1, block(1, NAME + block(2, block(2, block(1, bytes(5))))))
    sequence = tf.train.SequenceExample()
    sequence.feature_lists.feature_list["step"].feature.add().int64_list.value.append(1)
    empty = theirs({"c": 1})
    empty.features.feature["a"].bytes_list.SetInParent()
    records = [good, good[:-1], floats, sequence.SerializeToString(), serialize({"a": 2.0}), b""]
    found, faults = decode([*records, empty.SerializeToString()])
    assert {number: fault.partition(":")[0] for number, fault in faults.items()} == {
        1: "not a tf.train.Example",
        2: "not a tf.train.Example",
        3: faults[3].partition(":")[0],
        4: "feature 'a' is float, not int64",
    }
    assert "tf.train.SequenceExample" in faults[3]
    gaps = [None] * 5
    assert {name: column.to_pylist() for name, column in found.items()} == {
        "a": [[1], *gaps, []],
        "b": [[b"text"], *gaps, None],
        "c": [None, *gaps, [1]],
    }


def field(number: int, wire_type: int, payload: bytes) -> bytes:
    return bytes([number << 3 | wire_type]) + payload


def block(number: int, payload: bytes) -> bytes:
    """Returns a length-delimited field, its length in two bytes even where one would do."""
    return field(number, 2, bytes([len(payload) & 0x7F | 0x80, len(payload) >> 7]) + payload)


NAME = block(1, b"x")
UNKNOWN = field(9, 0, b"\xff\x01") + field(10, 1, bytes(8)) + field(11, 5, bytes(4)) + block(12, b"what")


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(NAME + block(2, block(3, field(1, 0, b"\7") + field(1, 0, b"\x81\1"))), id="unpacked"),
        pytest.param(NAME + block(2, block(3, block(1, b"\7\x08") + field(1, 0, b"\x09"))), id="both"),
        pytest.param(
            NAME + block(2, block(2, field(1, 5, bytes(4)) + block(1, struct.pack("<2f", 2, 3)))), id="floats"
        ),
        pytest.param(block(2, block(1, block(1, b"value"))) + NAME, id="the name last"),
        pytest.param(NAME + block(2, block(1, b"")), id="an empty list"),
        pytest.param(NAME + block(2, b""), id="no list"),
        pytest.param(block(2, block(1, block(1, b"value"))), id="no name"),
        pytest.param(NAME + block(2, UNKNOWN + block(1, UNKNOWN + block(1, b"v"))), id="unknown fields"),
        pytest.param(NAME + block(2, block(1, block(1, b"v")) + block(3, block(1, b"\x01"))), id="two kinds"),
        pytest.param(b"\x0a\x81\x00x" + block(2, block(1, block(1, b"v"))), id="a length that is too long"),
    ],
)
def test_unusual_wire_formats_are_read_as_tensorflow_reads_them(entry: bytes) -> None:
    data = UNKNOWN + block(1, UNKNOWN + block(1, entry)) + UNKNOWN
    assert parse(data) == content(tf.train.Example.FromString(data))
    twice = data + block(1, block(1, NAME + block(2, block(3, block(1, b"\x2a")))))
    assert parse(twice) == content(tf.train.Example.FromString(twice))


def test_what_is_no_example_is_an_error_and_nothing_else() -> None:
    whole = serialize(EXAMPLES[2])
    for size in range(1, len(whole)):
        with pytest.raises(ValueError, match=r"^not a tf\.train\.Example"):
            parse(whole[:size])
    rng = random.Random(1)
    for _ in range(2000):
        changed = bytearray(whole)
        changed[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        # Many changes leave an example, of other values; no other error may come out.
        with contextlib.suppress(ValueError):
            parse(bytes(changed))
