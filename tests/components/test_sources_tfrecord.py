"""Files of tf.train.Example as a source: those of TFDS and of tf.io.TFRecordWriter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from shardline.components.preprocess.inspect import verify
from shardline.components.preprocess.plan import records as rows
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import open_source
from shardline.components.preprocess.sources.example import BadExample, Example, Span
from shardline.components.validate.export.signatures import (
    DEFAULT,
    EXAMPLE,
    EXAMPLES,
    make_requests,
    make_signatures,
)
from shardline.trainer.base.errors import SourceError
from shardline.trainer.data import describe_dataset
from shardline.trainer.data.examples import parse_batch
from shardline.trainer.loop.build import build, create_variables
from shardline.trainer.manifest import Feature
from tests.helpers import sources
from tests.helpers.data import payload, real_data
from tests.helpers.preprocessing import read_all, run, write_images
from tests.helpers.sources import bad, read


def opened(pattern: Path | str, **features: str) -> Any:
    return sources.opened(f"tfrecord:{pattern}", **features)


def message(features: Mapping[str, Any]) -> bytes:
    """Returns a serialized example with a value or a list of values per feature."""
    example = tf.train.Example()
    for name, value in features.items():
        values = value if isinstance(value, list) else [value]
        feature = example.features.feature[name]
        if value in (None, []):
            continue
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


def test_features_are_sorted_whatever_protobuf_says(tmp_path: Path) -> None:
    rows = [{"label": i % 2} | {f"x{n}": float(i) for n in range(9)} for i in range(4)]
    names = [feature.name for feature in opened(write(tmp_path / "x.tfrecord", rows)).features]
    assert names == [f"x{n}" for n in range(9)]


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
    assert source.labels[0].outputs == tuple("0123456789")
    # The number of each digit in MNIST is well known.
    assert [labels[digit] for digit in range(3)] == [6903, 7877, 6990]
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
    assert source.labels[0].outputs == ("0", "1", "2")


def test_keys_follow_from_the_content_alone(tmp_path: Path) -> None:
    write(tmp_path / "a", records(6))
    before = {example.key: payload(example.image) for example in read(opened(tmp_path / "a"))}
    write(tmp_path / "b", records(9)[::-1])
    after = {example.key: payload(example.image) for example in read(opened(tmp_path / "b"))}
    assert len(after) == 9
    assert before.items() <= after.items()


@pytest.mark.parametrize(("key", "in_memory"), [("path", 1000), ("content", 2)])
def test_equal_records_have_different_keys(
    tmp_path: Path, key: str, in_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_BYTES_IN_MEMORY", in_memory)
    png = (write_images(tmp_path / "images", each=1) / "cat" / "000.png").read_bytes()
    equal, others = {"image": png, "label": 0}, [{"image": png, "label": label} for label in range(1, 20)]
    write(tmp_path / "a", [*others[:5], equal, equal, *others[5:], equal])
    run(f"tfrecord:{tmp_path / 'a'}", tmp_path / "out", split={"train": 1.0}, key=key, label="class:label")
    keys = [example["key"].decode() for example in read_all(tmp_path / "out")]
    (first,) = {name.partition("#")[0] for name in keys if "#" in name}
    assert sorted(name for name in keys if name.startswith(first)) == [first, f"{first}#2", f"{first}#3"]
    assert len(set(keys)) == 22


def test_features_have_other_names_and_there_are_more(tmp_path: Path) -> None:
    rows = [
        {"image/encoded": bytes([i]), "image/class/label": i, "id": f"ä{i}".encode(), "w": 0.5 * i, "n": -i}
        for i in range(3)
    ]
    write(tmp_path / "x", [row | {"text": "tä".encode(), "shape": [1, 2, 3]} for row in rows])
    ours = {"image": "image/encoded", "label": "image/class/label", "key": "id", "weight": "w"}
    source = opened(tmp_path / "x", **ours, number="n", text="text")
    examples = read(source)
    assert [(example.key, example.label) for example in examples] == [("ä0", 0), ("ä1", 1), ("ä2", 2)]
    assert examples[2].features == {"weight": 1.0, "number": -2, "text": "tä"}
    assert {*source.features} == {
        Feature("number", "int64"),
        Feature("text", "string"),
        Feature("weight", "float32"),
    }


def test_labels_that_are_names(tmp_path: Path) -> None:
    rows = [{"image": b"1", "label": b"dog"}, {"image": b"2", "label": "Kätzchen".encode()}]
    source = opened(write(tmp_path / "x", rows))
    assert source.labels[0].outputs == ("Kätzchen", "dog")
    assert [example.label for example in read(source)] == [1, 0]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"image": b"x", "label": b"cat"}, "feature 'label' is bytes, not int64"),
        ({"image": b"x", "lable": 1}, "has no value in column 'label'"),
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
    assert source.labels[0].outputs == opened(path).labels[0].outputs == ("0", "1", "2")


def test_a_file_that_is_cut_off_ends_the_run(tmp_path: Path) -> None:
    path = write(tmp_path / "x", records(3))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SourceError, match="x' is damaged at record 2: the file ends in the middle of it"):
        list(opened(path))


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"image": "photo"}, "no column 'photo' for image, it has .*picture"),
        ({"image": "weight"}, "column 'weight' .* is float32; as image, bytes is needed"),
        ({"image": "label"}, "column 'label' .* is what is to be predicted"),
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


def test_examples_without_images_are_rows_as_tensorflow_reads_them(tmp_path: Path) -> None:
    """As TFX writes them: an empty feature has no list, or is not there; vectors have one length."""
    rows: list[dict[str, Any]] = [
        {
            "tips": 0.1 * i,
            "company": None if i % 3 == 0 else f"taxi ä{i % 4}".encode(),
            "miles": 1.5 * i,
            "seconds": 2**40 + i,
            "place": [0.5, float(i)],
            "codes": [i, -i, 7],
            "words": [b"a", str(i).encode()],
        }
        for i in range(40)
    ]
    del rows[5]["miles"], rows[6]["place"], rows[7]["words"]
    write(tmp_path / "a-0.gz", rows[:15], "GZIP")
    write(tmp_path / "a-1.gz", rows[15:], "GZIP")
    source = open_source(PreprocessSettings(source=f"tfrecord:{tmp_path}/a-*", label="regression:tips"))
    found = {feature.name: feature for feature in source.features}  # type: ignore[attr-defined]
    assert found == {
        "company": Feature("company", "string"),
        "miles": Feature("miles", "float32"),
        "seconds": Feature("seconds", "int64"),
        "place": Feature("place", "float32", (2,)),
        "codes": Feature("codes", "int64", (3,)),
        "words": Feature("words", "string", (2,)),
    }
    examples = read(source)
    assert len({example.key for example in examples}) == 40
    missing = {"string": "", "float32": float("nan"), "int64": 0}
    spec = {
        name: tf.io.FixedLenFeature(one.shape, one.dtype, np.full(one.shape, missing[one.dtype]).tolist())
        for name, one in found.items()
    }
    parsed = tf.io.parse_example([message(row) for row in rows], spec)
    for name, one in found.items():
        ours = tf.constant([example.features[name] for example in examples], one.dtype)
        np.testing.assert_array_equal(ours, parsed[name], name)
    np.testing.assert_array_equal([one.label for one in examples], np.float32([row["tips"] for row in rows]))


def test_vectors_become_a_dataset_that_tensorflow_reads(tmp_path: Path) -> None:
    rows = [
        {"label": i % 2, "v": [0.5 * i, -1.0], "t": [b"x", b"y%d" % i], "id": b"k%d" % i} for i in range(9)
    ]
    source = f"tfrecord:{write(tmp_path / 'x', rows)}"
    manifest = run(source, tmp_path / "out", split={"train": 1.0}, features={"key": "id"})
    assert dict(manifest.info().inputs) == {
        "v": Feature("v", "float32", (2,)),
        "t": Feature("t", "string", (2,)),
    }
    shards = [str(tmp_path / "out" / shard.file) for shard in manifest.splits["train"].shards]
    stored = [*tf.data.TFRecordDataset(shards)]
    x, y = parse_batch(tf.stack(stored), manifest.inputs, manifest.labels)
    found = zip(x["v"].numpy().tolist(), x["t"].numpy().tolist(), y.numpy(), strict=True)
    assert sorted(found) == [(row["v"], row["t"], row["label"]) for row in rows]
    assert verify(tmp_path / "out", processes=1).damages == ()

    model = build("mlp", describe_dataset(tmp_path / "out", manifest), {"units": 4})
    create_variables(model, train_step=(x, y))
    model.save(tmp_path / "model.keras")
    model = keras.models.load_model(tmp_path / "model.keras", safe_mode=True)
    signatures = make_signatures(model, manifest, {"label": "probabilities"})
    requests = make_requests(manifest, tf.stack(stored), x)
    served = signatures[DEFAULT](requests[DEFAULT])
    parsed = signatures[EXAMPLE](requests[EXAMPLE][EXAMPLES])
    for name in served:
        np.testing.assert_array_equal(served[name], parsed[name])


@pytest.mark.parametrize(
    ("splits", "image"),
    [
        ({"train": "train", "eval": "test"}, True),
        ({"train": "train", "eval": "validation", "test": "test"}, False),
        ({"train": "train", "val": "validation"}, True),
        ({"eval": None}, False),
    ],
)
def test_folders_of_tfx_are_splits(tmp_path: Path, splits: Mapping[str, str | None], image: bool) -> None:
    for folder in splits:
        (tmp_path / f"Split-{folder}").mkdir()
        rows = records(4, origin=folder.encode(), **({} if image else {"image": None}))
        write(tmp_path / f"Split-{folder}" / "data-0.gz", rows, "GZIP")
    examples = read(opened(tmp_path / "Split-*" / "*", origin="origin"))
    assert {example.features["origin"]: example.split for example in examples} == splits
    assert len(examples) == 4 * len(splits)


def test_a_folder_of_no_known_split_is_refused(tmp_path: Path) -> None:
    for folder in ("train", "old"):
        (tmp_path / f"Split-{folder}").mkdir()
        write(tmp_path / f"Split-{folder}" / "data", records())
    with pytest.raises(SourceError, match="Split-old/data' is in none of the folders Split-train, "):
        opened(tmp_path / "Split-*" / "*")


def test_images_with_a_label_of_another_kind_are_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "x", [row | {"age": 0.5 * i, "n": [1] * i} for i, row in enumerate(records())])
    label = "class:label;regression:age"
    examples = read(open_source(PreprocessSettings(source=f"tfrecord:{path}", label=label)))
    assert [payload(one.image) for one in examples] == [f"image {i}".encode() for i in range(6)]
    assert examples[3].label == {"label": 0, "age": 1.5}
    assert not any(one.features for one in examples)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"x": [1.0]}, {"x": [1.0, 2.0]}], "column 'x' .* is lists of 1 to 2 values .pad them"),
        ([{"x": [1, 2]}, {"x": None}], "column 'x' .* is lists of whole numbers that some examples lack"),
    ],
)
def test_features_that_are_no_columns_are_named(
    tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    labelled = [row | {"label": label} for row, label in zip(rows, (b"a", b"b"), strict=True)]
    with pytest.raises(SourceError, match=message):
        opened(write(tmp_path / "x", labelled))


def test_lists_of_names_are_labels(tmp_path: Path) -> None:
    tags = [[b"a", b"b"], [b"b"], [b"-"], [b"a", b"c", b"b"]]
    path = write(tmp_path / "x", [{"tags": one, "x": i} for i, one in enumerate(tags)])
    source = open_source(PreprocessSettings(source=f"tfrecord:{path}", label="multilabel:tags"))
    assert source.labels[0].outputs == ("-", "a", "b", "c")
    assert [one.label for one in read(source)] == [[0, 1, 1, 0], [0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 1, 1]]


def test_a_bad_record_among_rows_is_named(tmp_path: Path) -> None:
    rows = [{"label": b"ab"[i % 2 : i % 2 + 1], "text": b"t %d" % i} for i in range(5)]
    rows[1]["text"] = b"t\xff"
    path = write(tmp_path / "x", rows)
    path.write_bytes(path.read_bytes().replace(b"t 3", b"t 4"))
    assert bad(opened(path)) == [
        BadExample(f"{path} record 1", "feature 'text' is [b't\\xff'], not printable text in UTF-8"),
        BadExample(f"{path} record 3", "the data do not match their checksum"),
    ]


@pytest.mark.parametrize("wrong", [0, 1024])
def test_a_record_of_another_type_is_named_wherever_it_is(tmp_path: Path, wrong: int) -> None:
    """Also the first of those that are read together, or one that is alone."""
    rows = [{"label": b"ab"[i % 2 : i % 2 + 1], "x": i, "y": 0.5} for i in range(1025)]
    rows[wrong] |= {"x": 2.5, "y": 1}
    path = write(tmp_path / "x", rows)
    source = opened(path)
    assert bad(source) == [BadExample(f"{path} record {wrong}", "feature 'x' is float, not int64")]
    sound = [one.features["x"] for one in source if isinstance(one, Example)]
    assert sound == [i for i in range(1025) if i != wrong]


@pytest.mark.parametrize(("key", "more"), [(b"a\nb", {}), (b"\xff", {"image": None})])
def test_a_key_that_is_no_printable_text_is_a_bad_record(tmp_path: Path, key: bytes, more: Any) -> None:
    rows = [row | {"id": b"%d" % i} for i, row in enumerate(records(**more))]
    rows[2]["id"] = key
    path = write(tmp_path / "x", rows)
    assert [one.name for one in bad(opened(path, key="id"))] == [f"{path} record 2"]


def test_other_files_are_named_with_a_way_out(tmp_path: Path) -> None:
    steps = tf.train.SequenceExample()
    steps.context.feature["label"].int64_list.value.append(1)
    steps.feature_lists.feature_list["words"].feature.add().bytes_list.value.append(b"a")
    with tf.io.TFRecordWriter(str(tmp_path / "x")) as writer:
        writer.write(steps.SerializeToString())
    with pytest.raises(SourceError, match=r"SequenceExample, .*; write an Example of each step, or read it "):
        opened(tmp_path / "x")
    (tmp_path / "y").write_bytes(b"Obj\x01\x04\x14avro.codec")
    with pytest.raises(SourceError, match="y' is an Avro file; write it as Parquet"):
        opened(tmp_path / "y")


def test_whole_numbers_with_gaps_stay_whole(tmp_path: Path) -> None:
    tracts = [17_031_320_100 + number for number in range(5)]
    rows = [{"tract": tract, "few": 7, "label": 0} for tract in tracts]
    path = write(tmp_path / "a.tfrecord", [*rows, {"tract": [], "few": [], "label": 1}])

    found = read(opened(path))
    types = {"few": "text", "tract": "number"}
    said = read(open_source(PreprocessSettings(source=f"tfrecord:{path}", columns=types)))

    assert [one.features["tract"] for one in found] == [*map(str, tracts), ""]
    assert [one.features["few"] for one in found[:-1]] == [7.0] * 5
    assert np.isnan(found[-1].features["few"])
    assert [one.features["few"] for one in said] == ["7"] * 5 + [""]
    assert said[0].features["tract"] == float(tracts[0])
