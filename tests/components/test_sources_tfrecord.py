"""Files of tf.train.Example as a source: those of TFDS and of tf.io.TFRecordWriter."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import tensorflow as tf

from shardline.components.preprocess import rows
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import BadExample, Example, Seen, Source, Span, open_source
from shardline.components.preprocess.tfrecord import mask, read_records
from shardline.trainer.data.features import Feature
from shardline.trainer.errors import SourceError
from tests.helpers.data import payload, real_data
from tests.helpers.preprocessing import read_all, run, write_images


def opened(pattern: Path | str, **features: str) -> Source:
    return open_source(PreprocessSettings(source=f"tfrecord:{pattern}", features=features))


def message(features: Mapping[str, Any]) -> bytes:
    """Returns a serialized example with a value or a list of values per feature."""
    example = tf.train.Example()
    for name, value in features.items():
        values = value if isinstance(value, list) else [value]
        feature = example.features.feature[name]
        kind = {bytes: feature.bytes_list, float: feature.float_list, int: feature.int64_list}[
            type(values[0])
        ]
        kind.value.extend(values)
    return example.SerializeToString()


def write(path: Path, records: Sequence[Mapping[str, Any]], compression: str = "") -> Path:
    with tf.io.TFRecordWriter(str(path), options=compression) as writer:
        for record in records:
            writer.write(message(record))
    return path


def records(count: int = 6, **more: Any) -> list[dict[str, Any]]:
    return [{"image": f"image {i}".encode(), "label": i % 3} | more for i in range(count)]


def read(source: Source) -> list[Example]:
    """Returns all examples; none may be bad."""
    examples = []
    for example in source:
        assert isinstance(example, Example), example
        examples.append(example)
    return examples


def bad(source: Source) -> list[BadExample]:
    return [example for example in source if isinstance(example, BadExample)]


def test_mnist_as_tfds_wrote_it() -> None:
    source = opened(real_data() / "tfds" / "mnist" / "3.0.1" / "*.tfrecord-*")
    labels: Counter[int] = Counter()
    keys = set()
    for example in source:
        assert isinstance(example, Example)
        assert isinstance(example.image, Span)
        labels[example.label] += 1
        keys.add(example.key)
    assert labels.total() == len(keys) == 70_000
    assert source.class_names == tuple("0123456789")
    # The number of each digit in MNIST is well known.
    assert [labels[digit] for digit in range(10)] == [
        6903,
        7877,
        6990,
        7141,
        6824,
        6313,
        6876,
        7293,
        6825,
        6958,
    ]
    image = tf.io.decode_png(payload(example.image))
    assert image.shape == (28, 28, 1)


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_files_of_tensorflows_writer(tmp_path: Path, compression: str) -> None:
    write(tmp_path / "b-1", records(8)[5:], compression)
    write(tmp_path / "b-0", records(5), compression)
    source = opened(tmp_path / "b-*")
    examples = read(source)
    assert [payload(example.image) for example in examples] == [f"image {i}".encode() for i in range(8)]
    assert [example.label for example in examples] == [i % 3 for i in range(8)]
    assert {type(example.image) for example in examples} == {bytes if compression else Span}
    assert source.class_names == ("0", "1", "2")


def test_the_classes_are_the_same_before_and_after_an_iteration(tmp_path: Path) -> None:
    path = write(tmp_path / "x", records())
    after = opened(path)
    read(after)
    assert after.class_names == opened(path).class_names == ("0", "1", "2")


def test_keys_follow_from_the_content_alone(tmp_path: Path) -> None:
    write(tmp_path / "a", records(6))
    before = {example.key: payload(example.image) for example in read(opened(tmp_path / "a"))}
    write(tmp_path / "b", records(9)[::-1])
    after = {example.key: payload(example.image) for example in read(opened(tmp_path / "b"))}
    assert len(after) == 9
    assert before.items() <= after.items()


@pytest.mark.parametrize("in_memory", [2, 1000])
@pytest.mark.parametrize("key", ["path", "content"])
def test_equal_records_have_different_keys(
    tmp_path: Path, key: str, in_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_ROWS_IN_MEMORY", in_memory)
    png = (write_images(tmp_path / "images", each=1) / "cat" / "000.png").read_bytes()
    equal, others = {"image": png, "label": 0}, [{"image": png, "label": label} for label in range(1, 20)]
    write(tmp_path / "a", [*others[:5], equal, equal, *others[5:], equal])
    run(f"tfrecord:{tmp_path / 'a'}", tmp_path / "out", split={"train": 1.0}, key=key)
    keys = [example["key"].decode() for example in read_all(tmp_path / "out")]
    (first,) = {name.partition("#")[0] for name in keys if "#" in name}
    assert sorted(name for name in keys if name.startswith(first)) == [first, f"{first}#2", f"{first}#3"]
    assert len(set(keys)) == 22


def test_features_have_other_names_and_there_are_more(tmp_path: Path) -> None:
    rows = [
        {"image/encoded": bytes([i]), "image/class/label": i, "id": f"ä{i}".encode(), "w": 0.5 * i, "n": -i}
        for i in range(3)
    ]
    write(tmp_path / "x", [row | {"text": b"t\xff", "shape": [1, 2, 3]} for row in rows])
    source = opened(
        tmp_path / "x",
        image="image/encoded",
        label="image/class/label",
        key="id",
        weight="w",
        number="n",
        text="text",
    )
    examples = read(source)
    assert [(example.key, example.label) for example in examples] == [("ä0", 0), ("ä1", 1), ("ä2", 2)]
    assert examples[2].features == {"weight": 1.0, "number": -2, "text": "t\udcff"}
    assert source.features == (  # type: ignore[attr-defined]
        Feature("number", "int64"),
        Feature("text", "string"),
        Feature("weight", "float32"),
    )


def test_labels_that_are_names(tmp_path: Path) -> None:
    rows = [{"image": b"1", "label": b"dog"}, {"image": b"2", "label": "Kätzchen".encode()}]
    source = opened(write(tmp_path / "x", rows))
    assert source.class_names == ("Kätzchen", "dog")
    assert [example.label for example in read(source)] == [1, 0]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"image": b"x", "label": 100_000}, "label 100000 is out of range 0..99,999"),
        ({"image": b"x", "label": -1}, "label -1 is out of range 0..99,999"),
        ({"image": b"x", "label": b"cat"}, "feature 'label' is bytes, not int64"),
        ({"image": b"x", "label": [1, 2]}, "feature 'label' has 2 values, one is needed"),
        ({"image": b"x", "lable": 1}, "has no feature 'label'"),
        ({"image": 3, "label": 1}, "feature 'image' is int64, not bytes"),
        ({"label": 1}, "has no feature 'image'"),
        ({"image": [b"x", b"y"], "label": 1}, "feature 'image' has 2 values, one is needed"),
    ],
)
def test_a_bad_record_is_named_and_the_next_one_read(
    tmp_path: Path, record: dict[str, Any], reason: str
) -> None:
    path = write(tmp_path / "x", [*records(4), record, *records(1, more=b"")])
    source = opened(path)
    assert bad(source) == [BadExample(f"{path} record 4", reason)]
    assert len(list(source)) == 6
    assert source.class_names == opened(path).class_names == ("0", "1", "2")


def test_records_that_are_something_else(tmp_path: Path) -> None:
    with tf.io.TFRecordWriter(str(tmp_path / "x")) as writer:
        writer.write(message(records(1)[0]))
        writer.write(b"a line of text")
    (found,) = bad(opened(tmp_path / "x"))
    assert found.name == f"{tmp_path}/x record 1"
    assert found.reason.startswith("not a tf.train.Example")


def test_a_damaged_record_is_named_and_the_next_one_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x", records(3))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"image 1", b"image 7"))
    assert bad(opened(path)) == [BadExample(f"{path} record 1", "the data do not match their checksum")]
    assert len(list(opened(path))) == 3


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("claimed", "message"),
    [
        (1 << 31, "record 1: it claims 2,147,483,648 bytes, more than 512 MiB"),
        (1 << 62, "record 1: it claims 4,611,686,018,427,387,904 bytes, more than 512 MiB"),
        (400 << 20, "record 1: the file ends in the middle of it"),
    ],
)
def test_what_a_length_claims_is_not_taken_from_the_memory(
    tmp_path: Path, compressed: bool, claimed: int, message: str
) -> None:
    path = tmp_path / "x"
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(b"sound")
    length = struct.pack("<Q", claimed)
    content = path.read_bytes() + length + mask(google_crc32c.value(length)) + bytes(5000)
    path.write_bytes(gzip.compress(content) if compressed else content)
    tracemalloc.start()
    with pytest.raises(SourceError, match=message):
        list(read_records(path, compression="gzip" if compressed else ""))
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


def test_a_million_labels_of_one_example_are_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x", [*records(2), {"image": b"image", "label": [1] * 1_000_000}])
    assert [each.reason for each in bad(opened(path))] == ["feature 'label' has many values, one is needed"]


def test_a_file_that_is_cut_off_ends_the_run(tmp_path: Path) -> None:
    path = write(tmp_path / "x", records(3))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SourceError, match="x' is damaged at record 2: the file ends in the middle of it"):
        list(opened(path))


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({}, "x': the first record: has no feature 'image'; it has 'label' .*, 'picture' .bytes, 1.,"),
        ({"image": "label"}, "the first record: feature 'label' is int64, not bytes"),
        ({"image": "picture", "label": "weight"}, "label 0.5 is neither a class index nor a class name"),
        ({"image": "picture", "size": "sizes"}, "feature 'sizes' has 2 values, one is needed"),
    ],
)
def test_wrong_features_are_refused_at_once(tmp_path: Path, features: dict[str, str], message: str) -> None:
    rows = [{"picture": b"x", "label": 1, "weight": 0.5, "sizes": [1, 2]}]
    with pytest.raises(SourceError, match=message):
        opened(write(tmp_path / "x", rows), **features)


def test_patterns_that_match_nothing_of_use(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no file matches '.*/\*\.tfrecord'"):
        opened(tmp_path / "*.tfrecord")
    with pytest.raises(SourceError, match=r"is a directory; give a pattern such as .*/\*\.tfrecord"):
        opened(tmp_path)
    write(tmp_path / "empty", [])
    with pytest.raises(SourceError, match=r"there is no record in '.*empty'"):
        opened(tmp_path / "empty")
    (tmp_path / "text").write_text("path,label\n1.jpg,cat\n")
    with pytest.raises(SourceError, match="text' is not a TFRecord file"):
        opened(tmp_path / "*")


def test_names_with_brackets_are_names(tmp_path: Path) -> None:
    assert len(read(opened(write(tmp_path / "x[1].tfrecord", records())))) == 6


def test_many_keys_are_told_apart() -> None:
    seen = Seen()
    values = [0] + [value * 0x9E3779B97F4A7C15 % 2**64 for value in range(1, 100_000)]
    assert all(map(seen.add, values))
    assert not any(map(seen.add, values))
