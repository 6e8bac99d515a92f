"""Small datasets that a tiny model can learn, written as the manifest's contract says."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import tensorflow as tf
from PIL import Image

from shardline.trainer import manifest as manifests
from shardline.trainer.manifest import DatasetInfo, Feature, Label, Manifest, Shard, Split
from shardline.trainer.models.interface import probe_inputs
from tests.helpers.labels import LABELLED, class_label, counted, label_values, tally

#: A class is the third of the image that is bright.
CLASS_NAMES = ("top", "middle", "bottom")

#: Of a table.
COLUMNS = (Feature("year", "int64"), Feature("income", "float32"), Feature("city", "string"))

RECORDS = {"train": 96, "validation": 24, "test": 30}


def write_dataset(
    directory: Path,
    *,
    records: Mapping[str, int] = RECORDS,
    shape: tuple[int, int, int] = (12, 12, 3),
    shards: int = 2,
    seed: int = 0,
    encoding: str = "png",
    classes: int = len(CLASS_NAMES),
) -> Manifest:
    """Writes a dataset directory of noisy images with one bright band, and its manifest.

    Record p of a split lies in shard p % shards at position p // shards; every shard mixes the classes.

    Args:
        directory: Made if it is not there.
        records: Number of examples per split; a split with 0 is left out.
        shape: (height, width, channels) of the images; channels is 1 or 3.
        shards: Number of shards of every split.
        seed: Of the noise. The same arguments give the same bytes.
        encoding: "png" or "raw".
        classes: Number of classes, 2 or 3.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    encode = encode_png if encoding == "png" else np.ndarray.tobytes
    splits = {
        name: _write_split(directory, name, total, shape, shards, rng, encode, classes)
        for name, total in records.items()
        if total
    }
    labels, image = (class_label(CLASS_NAMES[:classes]),), Feature("image", "uint8", shape, encoding)
    features = (image, Feature("label", "int64"), Feature("key", "string"))
    settings = {"seed": seed, "image_size": shape[0]}
    return _save(directory, "bands", settings, labels, features, splits)


def _save(directory: Path, source: str, settings: Any, labels: Any, features: Any, splits: Any) -> Manifest:
    checksums = [shard.crc32c for split in splits.values() for shard in split.shards]
    fingerprint = "sha256:" + hashlib.sha256("".join(checksums).encode()).hexdigest()
    manifest = Manifest(fingerprint, source, settings, labels, features, splits)
    manifests.save(manifest, directory)
    return manifest


def example_batch(dataset: DatasetInfo) -> tuple[Any, tf.Tensor]:
    """Returns (x, y) of two made-up examples."""
    return probe_inputs(dataset), tf.zeros(2, tf.int64)


def write_table(directory: Path, *, records: Mapping[str, int] = RECORDS, shards: int = 2) -> Manifest:
    """Writes a table of three classes, which no column alone tells apart; arguments as of `write_dataset`."""
    directory.mkdir(parents=True, exist_ok=True)
    rng, splits = np.random.default_rng(0), {}

    def row(key: str, label: int) -> bytes:
        year, income = 2000 + 10 * (label == 0) + rng.integers(0, 3), float(rng.normal(5e6, 1e3))
        city = "Ulm" if label == 1 else str(rng.choice(["Bern", "Rom"]))
        columns = {"year": year, "income": income, "city": city.encode()}
        return serialize({"label": label, "key": key.encode(), **columns})

    for name, total in records.items():
        rows = [row(f"{name}/{p:05d}", p % 3) for p in range(total)]
        counts = np.bincount(np.arange(total) % 3, minlength=3).tolist()
        splits[name] = Split(_write_shards(directory, name, rows, shards), counted(counts))
    features = (Feature("label", "int64"), Feature("key", "string"), *COLUMNS)
    return _save(directory, "table:rows.csv", {"seed": 0}, (class_label(CLASS_NAMES),), features, splits)


def write_labelled(
    directory: Path,
    labels: str | Sequence[Label],
    *,
    images: bool = False,
    records: Mapping[str, int] = RECORDS,
    shards: int = 2,
    seed: int = 0,
    cities: Sequence[str] = ("Ulm", "Bern", "Rom"),
) -> Manifest:
    """Writes a dataset directory with labels of any kind, which a tiny model can learn from its inputs.

    Args as of `write_dataset`, and:
        labels: What is to be predicted, or the name of it in `tests.helpers.labels.LABELLED`.
        images: Whether the inputs are noisy images of 12 x 12 pixels with one bright band; else a table:
            year int64, income float32, city string.
        cities: Names of the cities of a table; the first is that of one class.
    """
    directory.mkdir(parents=True, exist_ok=True)
    wanted = LABELLED[labels] if isinstance(labels, str) else tuple(labels)
    rng = np.random.default_rng(seed)
    splits = {}
    for name, total in records.items():
        # As in `_write_split`, so that every shard mixes them.
        kinds = (np.arange(total) % shards + np.arange(total) // shards) % len(CLASS_NAMES)
        sizes = rng.uniform(size=total)
        inputs = _images(kinds, sizes, rng) if images else _rows(kinds, sizes, rng, cities)
        values = {label.name: label_values(label, kinds, sizes) for label in wanted}
        examples = [
            serialize(
                {
                    **{column: one[p] for column, one in inputs.items()},
                    **{label: one[p] for label, one in values.items()},
                    "key": f"{name}/{p:05d}".encode(),
                }
            )
            for p in range(total)
        ]
        tallies = {label.name: tally(label, values[label.name]) for label in wanted}
        splits[name] = Split(_write_shards(directory, name, examples, shards), tallies)
    columns = (Feature("image", "uint8", (12, 12, 3), "png"),) if images else COLUMNS
    features = (*(label.feature for label in wanted), Feature("key", "string"), *columns)
    return _save(directory, "labelled", {"seed": seed}, wanted, features, splits)


def _images(kinds: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> dict[str, list[bytes]]:
    """Returns images whose bright third tells the kind, and how bright it is the size."""
    shape = (12, 12, 3)
    images = []
    for kind, size in zip(kinds, sizes, strict=True):
        pixels = rng.integers(0, 40, shape, dtype=np.uint8)
        pixels[4 * kind : 4 * kind + 4] += 60 + int(150 * size)
        images.append(encode_png(pixels))
    return {"image": images}


def _rows(
    kinds: np.ndarray, sizes: np.ndarray, rng: np.random.Generator, cities: Sequence[str]
) -> dict[str, Any]:
    """Returns columns: year and city together tell the kind, income the size."""
    first, *others = (city.encode() for city in cities)
    found = np.where(kinds == 1, first, rng.choice(others, len(kinds)))
    return {
        "year": 2000 + 10 * (kinds == 0) + rng.integers(0, 3, len(kinds)),
        "income": (5e6 + 1e3 * sizes).astype(np.float32),
        "city": [bytes(city) for city in found],
    }


def serialize(values: Mapping[str, Any]) -> bytes:
    """Returns a tf.train.Example of texts, whole numbers and floats, and of arrays of them."""
    features = {}
    for name, value in values.items():
        value = value.encode() if isinstance(value, str) else value
        if isinstance(value, bytes):
            features[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        elif np.issubdtype(np.asarray(value).dtype, np.integer):
            features[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=np.atleast_1d(value)))
        else:
            features[name] = tf.train.Feature(float_list=tf.train.FloatList(value=np.atleast_1d(value)))
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def read_examples(directory: Path, split: str) -> Iterator[tuple[str, bytes, int]]:
    """Yields (key, encoded image, label) of every example of a split, shard by shard."""
    manifest = manifests.load(directory)
    for shard in manifest.splits[split].shards:
        path = str(directory / shard.file)
        for record in tf.data.TFRecordDataset(path):
            features = tf.train.Example.FromString(record.numpy()).features.feature
            yield (
                features["key"].bytes_list.value[0].decode(),
                features["image"].bytes_list.value[0],
                features["label"].int64_list.value[0],
            )


def band_image(label: int, shape: tuple[int, int, int], rng: np.random.Generator) -> np.ndarray:
    """Returns a uint8 image of dark noise whose third number `label` is bright."""
    height = shape[0]
    pixels = rng.integers(0, 100, shape, dtype=np.uint8)
    band = slice(height * label // len(CLASS_NAMES), height * (label + 1) // len(CLASS_NAMES))
    pixels[band] += 120
    return pixels


def encode_png(pixels: np.ndarray) -> bytes:
    """Returns a uint8 (height, width, channels) image as PNG; 1 channel is grey, 3 are RGB."""
    buffer = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_shard(path: Path, examples: list[bytes]) -> Shard:
    """Writes serialized examples to a TFRecord file and describes it for a manifest."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for example in examples:
            writer.write(example)
    content = path.read_bytes()
    return Shard(path.name, len(examples), len(content), f"{google_crc32c.value(content):08x}")


def make_example(key: str, image: bytes, label: int) -> bytes:
    """Returns a serialized tf.train.Example as datasets hold it."""
    return serialize({"image": image, "label": label, "key": key.encode()})


def _write_shards(directory: Path, split: str, examples: list[bytes], shards: int) -> tuple[Shard, ...]:
    names = [f"{split}-{i:05d}-of-{shards:05d}.tfrecord" for i in range(shards)]
    return tuple(write_shard(directory / name, examples[i::shards]) for i, name in enumerate(names))


def _write_split(
    directory: Path,
    name: str,
    total: int,
    shape: tuple[int, int, int],
    shards: int,
    rng: np.random.Generator,
    encode: Callable[[np.ndarray], bytes],
    classes: int,
) -> Split:
    # A plain p % 3 would leave one class to a shard where the shards are a multiple of three.
    labels = [(p % shards + p // shards) % classes for p in range(total)]
    examples = [
        make_example(f"{name}/{p:05d}", encode(band_image(label, shape, rng)), label)
        for p, label in enumerate(labels)
    ]
    return Split(
        shards=_write_shards(directory, name, examples, shards),
        labels=counted([labels.count(label) for label in range(classes)]),
    )
