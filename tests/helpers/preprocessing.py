"""Preprocessing in tests: sources to read, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import Image

from shardline.components.preprocess.run import preprocess
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.tfrecord import read_batches
from shardline.trainer import manifest as manifests
from shardline.trainer.manifest import Manifest

REPOSITORY = Path(__file__).parents[2]

#: Text of a module with a source of 60 examples; {last} is what it does then.
SOURCE = """
import numpy as np
from pathlib import Path
from shardline.components.preprocess.sources.example import BadExample, Example, Span

IMAGE = np.zeros((8, 8, 1), np.uint8)

def example(index, **changes):
    values = dict(key=str(index), label=index % 2, image=IMAGE)
    return Example(**(values | changes))

class Source:
    class_names = ("no", "yes")

    def __iter__(self):
        yield from (example(index) for index in range(60))
        {last}
"""


def run(source: str, out: Path, *, overwrite: bool = False, **settings: Any) -> Manifest:
    """Preprocesses in this process alone, where nothing is said of processes: a second starts for 0.3 s."""
    settings = {"processes": 1} | settings
    return preprocess(PreprocessSettings(source=source, **settings), out, overwrite=overwrite)


def read(out: Path, split: str) -> list[dict[str, Any]]:
    """Returns the examples of a split as TensorFlow alone reads them, shard by shard."""
    specification = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "key": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }
    manifest, found = manifests.load(out), []
    for shard in manifest.splits[split].shards:
        records = tf.data.TFRecordDataset(str(out / shard.file))
        serialized = list(records.as_numpy_iterator())
        columns = tf.io.parse_example(tf.constant(serialized, tf.string), specification)
        rows = zip(*(column.numpy().tolist() for column in columns.values()), strict=True)
        found += [dict(zip(columns, row, strict=True)) for row in rows]
    return found


def read_all(out: Path) -> list[dict[str, Any]]:
    """Returns the examples of all splits."""
    return [example for split in manifests.load(out).splits for example in read(out, split)]


def stored(out: Path, feature: str) -> dict[str, list[Any]]:
    """Returns the values of a feature, one of each example, by split."""
    manifest = manifests.load(out)
    return {
        name: [
            value
            for shard in split.shards
            for batch in read_batches(out / shard.file, manifest.features)
            for value in batch.columns[feature].flatten().to_pylist()
        ]
        for name, split in manifest.splits.items()
    }


def contents(out: Path) -> dict[str, bytes]:
    """Returns the files of a directory."""
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def write_images(
    root: Path, *, classes: Sequence[str] = ("cat", "dog"), each: int = 25, size: int = 8
) -> Path:
    """Writes a folder of different PNG images per class."""
    rng = np.random.default_rng(0)
    for name in classes:
        (root / name).mkdir(parents=True)
        for index in range(each):
            pixels = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{index:03d}.png")
    return root
