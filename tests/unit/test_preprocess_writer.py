"""Examples and shards, read back by TensorFlow's own readers."""

from __future__ import annotations

from pathlib import Path

import google_crc32c
import pytest
import tensorflow as tf

from components.preprocess.example import serialize
from components.preprocess.writer import write_shard

EXAMPLES = [
    {"image": b"", "key": b"empty", "label": 0},
    {"image": b"\x00" * 127, "key": b"one byte of length", "label": 127},
    {"image": b"\xff" * 128, "key": b"two bytes of length", "label": 128},
    {"image": bytes(range(256)) * 1000, "key": "ä/\n".encode(), "label": 2**63 - 1},
]


@pytest.mark.parametrize("features", EXAMPLES, ids=lambda features: features["key"].decode()[:20].strip())
def test_an_example_has_the_bytes_that_tensorflow_writes(features: dict[str, bytes | int]) -> None:
    theirs = tf.train.Example()
    for name, value in features.items():
        if isinstance(value, bytes):
            theirs.features.feature[name].bytes_list.value.append(value)
        else:
            theirs.features.feature[name].int64_list.value.append(value)
    assert serialize(features) == theirs.SerializeToString(deterministic=True)


def test_a_shard_is_read_by_tensorflow(tmp_path: Path) -> None:
    path = tmp_path / "train-00000-of-00001.tfrecord"
    shard = write_shard(path, map(serialize, EXAMPLES))
    specification = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "key": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }
    read = [
        {name: value.numpy() for name, value in tf.io.parse_single_example(record, specification).items()}
        for record in tf.data.TFRecordDataset(str(path))
    ]
    assert read == EXAMPLES
    assert (shard.file, shard.records, shard.bytes) == (path.name, len(EXAMPLES), path.stat().st_size)
    assert int(shard.crc32c, 16) == google_crc32c.value(path.read_bytes())
    assert len(shard.crc32c) == 8


def test_a_shard_has_the_bytes_that_tensorflow_writes(tmp_path: Path) -> None:
    records = list(map(serialize, EXAMPLES))
    write_shard(tmp_path / "ours", records)
    with tf.io.TFRecordWriter(str(tmp_path / "theirs")) as writer:
        for record in records:
            writer.write(record)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_nothing_is_left_of_a_shard_that_fails(tmp_path: Path) -> None:
    def records() -> list[bytes]:
        yield b"first"
        raise ValueError("the second cannot be read")

    (tmp_path / "shard").write_bytes(b"before")
    with pytest.raises(ValueError, match="second"):
        write_shard(tmp_path / "shard", records())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"shard": b"before"}
