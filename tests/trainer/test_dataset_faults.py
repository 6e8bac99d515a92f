"""Faults of a dataset found in training: one line that names split, shard, record and key."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer import manifest as manifests
from shardline.trainer.base.errors import DatasetError, ModelError
from shardline.trainer.data.examples import explain_read_error
from shardline.trainer.data.pipeline import InputPipeline
from shardline.trainer.manifest import Manifest, Split
from shardline.trainer.sharding import EpochPlan
from tests.helpers.datasets import band_image, encode_png, make_example, write_dataset, write_shard
from tests.helpers.labels import counted
from tests.helpers.parameters import with_matrix
from tests.trainer.test_train import run

IMAGE = encode_png(band_image(0, (12, 12, 3), np.random.default_rng(0)))
JPEG = tf.io.encode_jpeg(np.zeros((12, 12, 3), np.uint8)).numpy()
PLACE = "the train split, shard train-00000-of-00001.tfrecord, record 5, key 'train/5': "


def write_one_bad(directory: Path, bad: tf.train.Example | bytes) -> Manifest:
    """Writes a dataset with a training split of one shard of eight examples, of which number 5 is `bad`."""
    manifest = write_dataset(directory, shards=1)
    records = [make_example(f"train/{p}", IMAGE, p % 3) for p in range(8)]
    records[5] = bad if isinstance(bad, bytes) else bad.SerializeToString()
    shard = write_shard(directory / manifest.splits["train"].shards[0].file, records)
    splits = {**manifest.splits, "train": Split((shard,), counted((3, 3, 2)))}
    manifest = dataclasses.replace(manifest, splits=splits)
    manifests.save(manifest, directory)
    return manifest


def fault_of(directory: Path, manifest: Manifest) -> str:
    """Reads the training split as training does and returns what its error says."""
    with pytest.raises((tf.errors.OpError, UnicodeDecodeError)) as error:
        list(InputPipeline(directory, manifest, "train", EpochPlan(8, 1, 4)).worker_dataset(1, 0, range(1)))
    explained = explain_read_error(error.value, directory, manifest)
    assert isinstance(explained, DatasetError)
    assert explained.exit_code == 2
    assert "\n" not in str(explained)
    return str(explained)


@pytest.mark.parametrize(
    "image",
    with_matrix(
        {
            "start of a PNG": IMAGE[:60],
            "PNG cut off": IMAGE[:-30],
            "no pixels": IMAGE.replace(b"IDAT", b"IDAX"),
            "JPEG cut off": JPEG[:-40],
            "empty": b"",
            "text": b"no image",
        },
        ["start of a PNG", "no pixels", "empty"],
    ),
)
def test_an_image_that_cannot_be_decoded_is_named(tmp_path: Path, image: bytes) -> None:
    manifest = write_one_bad(tmp_path, make_example("train/5", image, 0))
    fault = fault_of(tmp_path, manifest)
    assert fault.startswith(PLACE + "the example cannot be used (")
    assert "Iterator::" not in fault


def test_an_image_of_another_size_is_named(tmp_path: Path) -> None:
    image = encode_png(band_image(0, (9, 12, 3), np.random.default_rng(0)))
    manifest = write_one_bad(tmp_path, make_example("train/5", image, 0))
    assert fault_of(tmp_path, manifest).startswith(PLACE + "the example cannot be used (")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "Feature: label .* is required but could not be found"),
        ([1, 2], "Key: label, .*Number of int64 values != expected.* 2"),
        ([-1], r"the train split has a label outside 0..2:\] \[-1\]"),
    ],
)
def test_an_example_with_a_wrong_label_is_named(tmp_path: Path, values: list[int], message: str) -> None:
    example = tf.train.Example.FromString(make_example("train/5", IMAGE, 0))
    example.features.feature["label"].int64_list.value[:] = values
    if not values:
        del example.features.feature["label"]
    assert re.match(
        PLACE + r"the example cannot be used \(.*" + message,
        fault_of(tmp_path, write_one_bad(tmp_path, example)),
    )


def test_a_record_that_is_no_example_is_named(tmp_path: Path) -> None:
    manifest = write_one_bad(tmp_path, b"\xff" * 40)
    place = PLACE.replace(", key 'train/5'", "")
    assert fault_of(tmp_path, manifest) == (
        f"{place}a record of the dataset is not a tf.train.Example; preprocess the data again"
    )


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    manifest = write_one_bad(tmp_path, make_example("train/5", IMAGE, 0))
    path = tmp_path / manifest.splits["train"].shards[0].file
    content = bytearray(path.read_bytes())
    content[-20] ^= 255
    path.write_bytes(content)
    assert fault_of(tmp_path, manifest) == (
        "the train split, shard train-00000-of-00001.tfrecord, record 7: a shard of the dataset is damaged; "
        "preprocess the data again"
    )


def test_training_ends_with_it(tmp_path: Path) -> None:
    write_one_bad(tmp_path / "data", make_example("train/5", IMAGE[:-30], 0))
    with pytest.raises(DatasetError, match=r"record 5, key 'train/5': the example cannot be used"):
        run(tmp_path / "data", tmp_path / "model", per_replica_batch_size=4)


def test_sys_exit_in_a_model_is_no_success(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data")
    model = "tests.helpers.models:leaving_while_it_trains"
    with pytest.raises(ModelError, match=r"SystemExit: 0 \(models.py, line \d+\)"):
        run(tmp_path / "data", tmp_path / "model", model=model)


def test_an_error_that_says_nothing_of_the_data_is_not_explained(tmp_path: Path) -> None:
    manifest = write_dataset(tmp_path)
    for words in ("incompatible shapes", "Input to reshape is a tensor with 5 values"):
        assert (
            explain_read_error(tf.errors.InvalidArgumentError(None, None, words), tmp_path, manifest) is None
        )
