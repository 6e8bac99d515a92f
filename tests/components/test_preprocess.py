"""Preprocessing from end to end: what is in the dataset directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import xxhash
from PIL import Image

from shardline.trainer import manifest as manifests
from shardline.trainer.base import progress
from shardline.trainer.base.errors import DatasetError
from shardline.trainer.manifest import SPLITS, Feature
from tests.helpers.data import real_data
from tests.helpers.preprocessing import REPOSITORY, contents, read, read_all, run, write_images

MANY = """
from shardline.components.preprocess.sources.example import Example

COUNT = 0
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000008000000080800000000e164e1570000001049444154789c6364678000"
    "26068a1800047900175f7fecad0000000049454e44ae426082"
)

class Source:
    class_names = ("even", "odd")

    def __iter__(self):
        for index in range(COUNT):
            yield Example(f"a/rather/long/name/{index:09d}.png", index % 2, PNG)
"""


def test_digits(tmp_path: Path, events: list[progress.Event]) -> None:
    out = tmp_path / "a" / "dataset"
    manifest = run("digits", out, readers=2)
    assert manifests.load(out) == manifest
    assert manifest.info().input_shape == (8, 8, 1)
    examples = read_all(out)
    assert len(examples) == len({example["key"] for example in examples}) == 1797

    from sklearn.datasets import load_digits

    expected = {
        f"digits/{i:04d}".encode(): (d, label)
        for i, (d, label) in enumerate(zip(*load_digits(return_X_y=True), strict=True))
    }
    for example in examples:
        ink, label = expected[example["key"]]
        pixels = tf.io.decode_png(example["image"], channels=1).numpy()
        assert np.array_equal(pixels.ravel(), np.rint(ink * 255 / 16))
        assert example["label"] == label

    records = {name: split.records for name, split in manifest.splits.items()}
    assert [event.text for event in events if event.kind == "line"] == [
        f"1,797 records: train {records['train']:,} in 8 shards, "
        f"validation {records['validation']} in 2, test {records['test']} in 2",
        "label: class of 10: 0, 1, 2, 3, 4, ...",
    ]
    facts = {event.topic: event.value for event in events if event.kind == "fact"}
    assert facts == {"dataset": manifest.fingerprint, "records": 1797}


def test_the_manifest_states_what_the_shards_hold(tmp_path: Path) -> None:
    manifest = run("digits", tmp_path / "out", readers=3)
    files = {shard.file for split in manifest.splits.values() for shard in split.shards}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files | {"manifest.json", "examples.keys"}
    for name, split in manifest.splits.items():
        labels = [example["label"] for example in read(tmp_path / "out", name)]
        assert split.labels["label"].counts == tuple(labels.count(label) for label in range(10))
        sizes = [shard.records for shard in split.shards]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1
        assert len(sizes) % 3 == 0
        for shard in split.shards:
            assert shard.bytes == (tmp_path / "out" / shard.file).stat().st_size


def test_the_fingerprint_depends_on_the_content_and_not_the_path(tmp_path: Path) -> None:
    here, there = write_images(tmp_path / "here"), write_images(tmp_path / "there")
    first = run(f"images:{here}", tmp_path / "1")
    assert run(f"images:{there}", tmp_path / "2", data_dir="elsewhere").fingerprint == first.fingerprint
    assert run(f"images:{here}", tmp_path / "3", seed=1).fingerprint != first.fingerprint
    assert run(f"images:{here}", tmp_path / "4", image_size=6).fingerprint != first.fingerprint
    (here / "cat").rename(here / "lynx")
    assert run(f"images:{here}", tmp_path / "5").fingerprint != first.fingerprint


def test_examples_keep_their_split_when_the_data_grows(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images")

    def split_of(out: Path) -> dict[bytes, str]:
        run(f"images:{images}", out)
        return {example["key"]: split for split in SPLITS for example in read(out, split)}

    before = split_of(tmp_path / "before")
    for index in range(30):
        Image.new("RGB", (8, 8)).save(images / "cat" / f"a{index}.png")
    after = split_of(tmp_path / "after")
    assert len(after) == len(before) + 30
    assert {key: after[key] for key in before} == before


def test_images_keep_their_bytes(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images")
    (images / ".DS_Store").write_text("hidden")
    (images / "dog" / ".hidden").write_text("hidden")
    (images / "dog" / "more é\n").mkdir()
    Image.new("RGB", (8, 8)).save(images / "dog" / "more é\n" / "1.png")
    manifest = run(f"images:{images}", tmp_path / "out")
    assert manifest.class_names == ("cat", "dog")
    examples = read_all(tmp_path / "out")
    assert len(examples) == 51
    for example in examples:
        assert example["image"] == (images / os.fsdecode(example["key"])).read_bytes()
        assert manifest.class_names[example["label"]] == example["key"].decode().split("/")[0]


def test_photos(tmp_path: Path) -> None:
    photos = real_data() / "photos"
    manifest = run(f"images:{photos}", tmp_path / "kept")
    assert manifest.image == Feature("image", "uint8", (None, None, 3), "jpeg")
    with pytest.raises(DatasetError, match="differ in size"):
        manifest.info()
    manifest = run(f"images:{photos}", tmp_path / "small", image_size=96, processes=2)
    assert manifest.image == Feature("image", "uint8", (96, 96, 3), "jpeg", "crop")
    small = read_all(tmp_path / "small")
    assert {tf.io.decode_jpeg(example["image"]).shape for example in small} == {(96, 96, 3)}


FEATURES = """
from shardline.components.preprocess.sources.example import Example
from shardline.trainer.manifest import Feature

class Source:
    class_names = ("no", "yes")
    features = (Feature("age", "int64"), Feature("weight", "float32"), Feature("name", "string"))

    def __iter__(self):
        for index in range(60):
            values = {"age": -index, "weight": index / 8, "name": "\u00e4" * index}
            yield Example(str(index), index % 2, features=values)
"""


def test_examples_without_an_image_but_with_features(source_module: Path) -> None:
    source_module.write_text(FEATURES)
    out = source_module.with_name("out")
    manifest = run("mine:Source", out)
    assert [feature.name for feature in manifest.features] == ["label", "key", "age", "weight", "name"]
    types = {"age": tf.int64, "weight": tf.float32, "name": tf.string, "label": tf.int64, "key": tf.string}
    specification = {name: tf.io.FixedLenFeature([], kind) for name, kind in types.items()}
    seen = 0
    for split in manifest.splits.values():
        for shard in split.shards:
            for record in tf.data.TFRecordDataset(str(out / shard.file)):
                example = tf.io.parse_single_example(record, specification)
                index = int(example["key"].numpy())
                assert (example["age"], example["weight"], example["label"]) == (-index, index / 8, index % 2)
                assert example["name"].numpy().decode() == "\u00e4" * index
                seen += 1
    assert seen == manifest.records_in == 60


def test_what_is_no_setting_of_the_bytes_does_not_change_them(tmp_path: Path) -> None:
    run("digits", tmp_path / "one", readers=2)
    manifest = run("digits", tmp_path / "two", readers=2, processes=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert {"processes", "source", "max_pixels"}.isdisjoint(manifest.settings)
    assert manifest.settings["readers"] == 2


def test_the_split_follows_from_its_salt_and_not_from_the_seed(tmp_path: Path) -> None:
    def split_of(name: str, **settings: int) -> dict[bytes, str]:
        manifest = run("digits", tmp_path / name, **settings)
        return {
            example["key"]: split for split in manifest.splits for example in read(tmp_path / name, split)
        }

    usual, other_seed, salted = split_of("usual"), split_of("seed", seed=1), split_of("salt", split_salt=1)

    assert other_seed == usual
    assert list(other_seed) != list(usual)
    assert sum(salted[key] != split for key, split in usual.items()) > 300


@pytest.mark.parametrize("settings", [{}, {"seed": 3, "split_salt": 2, "key": "content"}])
def test_each_example_has_a_key_hash_that_its_split_and_position_do_not_change(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    def known(name: str, **settings: Any) -> dict[bytes, bytes]:
        manifest = run("digits", tmp_path / name, **settings)
        data = (tmp_path / name / "examples.keys").read_bytes()
        assert manifest.keys
        assert (manifest.keys.bytes, len(data)) == (8 * manifest.records,) * 2
        keys = [example["key"] for example in read_all(tmp_path / name)]
        return {key: data[8 * place :][:8] for place, key in enumerate(keys)}

    key = settings.get("key", "path")
    found = known("found", **settings)
    assert found == known("again", key=key, seed=5, split_salt=6, shards=3, split={"train": 0.5, "test": 0.5})
    assert len(set(found.values())) == 1797
    if key == "path":
        assert found == {name: xxhash.xxh3_128_digest(name)[8:] for name in found}


def test_classes_are_mixed_within_every_shard(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", each=1000, size=4)
    manifest = run(f"images:{images}", tmp_path / "out")
    examples = read(tmp_path / "out", "train")
    for shard in manifest.splits["train"].shards:
        members, examples = examples[: shard.records], examples[shard.records :]
        share = sum(example["label"] for example in members) / len(members)
        assert abs(share - 0.5) < 0.5 * 4 / len(members) ** 0.5  # four standard deviations of a fair draw


def test_writing_loads_no_tensorflow_and_memory_does_not_grow_with_the_data(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(MANY)
    program = (
        "import sys; from pathlib import Path; import mine\n"
        "from shardline.components.preprocess.run import preprocess\n"
        "from shardline.components.preprocess.settings import PreprocessSettings\n"
        "mine.COUNT = int(sys.argv[1])\n"
        "preprocess(PreprocessSettings(source='mine:Source'), Path(f'out{mine.COUNT}'))\n"
        # Not getrusage: its peak is that of the process that started this one, if that was larger.
        "peak = Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0]\n"
        "print(bool({'tensorflow', 'keras', 'tensorflow_datasets', 'kfp'} & set(sys.modules)), peak)\n"
    )
    peaks, environment = [], os.environ | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}"}
    for count in (10_000, 80_000):
        command = [sys.executable, "-c", program, str(count)]
        said = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
        loaded, peak = said.split()[-2:]
        assert loaded == "False"
        peaks.append(int(peak) / 1024)
    # All rows of the larger one would take 30 MB.
    assert peaks[1] < 112
    assert peaks[1] - peaks[0] < 20
