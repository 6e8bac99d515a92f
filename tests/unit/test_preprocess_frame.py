"""Frames and heads: the bytes that TensorFlow's own writers give."""

from __future__ import annotations

from pathlib import Path

import google_crc32c
import pytest
import tensorflow as tf

from shardline.components.preprocess.example import entries, key_head, varint
from shardline.components.preprocess.tfrecord import image_start, mask

# Around every length at which a number takes one more byte.
LENGTHS = [0, 1, 90, 100, 126, 127, 128, 129, 8192, 16300, 16383, 16384, 16400, 2097100, 2097152]


def _record(image: bytes, tail: bytes) -> bytes:
    frame, start, size = image_start(len(image), len(tail))
    record = start + image + tail
    whole = frame + record + mask(google_crc32c.value(record))
    assert len(whole) == size
    return whole


@pytest.mark.parametrize("length", LENGTHS)
def test_a_record_is_the_one_that_tensorflow_writes(tmp_path: Path, length: int) -> None:
    image, key = bytes(length), b"key"
    theirs = tf.train.Example()
    theirs.features.feature["image"].bytes_list.value.append(image)
    theirs.features.feature["key"].bytes_list.value.append(key)
    theirs.features.feature["label"].int64_list.value.append(300)
    with tf.io.TFRecordWriter(str(tmp_path / "theirs")) as writer:
        writer.write(theirs.SerializeToString(deterministic=True))
    ours = _record(image, key_head(len(key)) + key + entries({"label": 300}))
    assert ours == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("value", [0, 127, 128, 2**14 - 1, 2**14, 2**21 - 1, 2**21, 2**40])
def test_varint(value: int) -> None:
    assert sum((byte & 0x7F) << 7 * place for place, byte in enumerate(varint(value))) == value
    assert all(byte >> 7 for byte in varint(value)[:-1])
    assert not varint(value)[-1] >> 7
