"""Every example of one split, once and in order, straight from the shards that the manifest names.

Some examples of a dataset, for trying out what was exported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shardline.trainer.data.decode import encode_stored
from shardline.trainer.data.manifest import Manifest, Split
from shardline.trainer.errors import DatasetError

# What a feature is stored as, where it is no text and no image.
_STORED = {"int64": tf.int64, "float32": tf.float32}


@dataclass(frozen=True)
class Batch:
    """Some examples, as they are stored.

    Attributes:
        images: Encoded images, a string tensor of shape [n]; raw pixels were made a PNG. None for a table.
        labels: int64 [n].
        keys: One per example.
        records: Serialized tf.train.Example, a string tensor of shape [n].
        columns: Every further feature of one value, by name, each [n]; text as str.
    """

    images: tf.Tensor | None
    labels: npt.NDArray[np.int64]
    keys: tuple[str, ...]
    records: tf.Tensor
    columns: Mapping[str, npt.NDArray[np.generic]]


def find_split(manifest: Manifest, directory: Path, name: str) -> Split:
    """Returns a split of a dataset after a look at its files.

    Raises:
        DatasetError: When the split is missing or empty, or one of its shards is missing or of another
            size than the manifest says.
    """
    split = manifest.splits.get(name)
    if split is None or split.records == 0:
        raise DatasetError(
            f"the dataset {directory} has no examples in its {name} split, there is nothing to evaluate on; "
            f"its splits: {', '.join(manifest.splits) or 'none'}"
        )
    for shard in split.shards:
        try:
            size = (directory / shard.file).stat().st_size
        except OSError as error:
            raise DatasetError(
                f"cannot read shard {directory / shard.file}: {error.strerror}; preprocess the data again"
            ) from None
        if size != shard.bytes:
            raise DatasetError(
                f"shard {directory / shard.file} has {size:,} bytes, the manifest says {shard.bytes:,}; "
                "preprocess the data again"
            )
    return split


def read_batches(manifest: Manifest, split: Split, directory: Path, batch_size: int) -> Iterator[Batch]:
    """Yields every example of one of a dataset's splits once, in the order of its shards.

    Raises:
        DatasetError: When a shard is damaged, a label is no class of the dataset, or the number of examples
            is not the manifest's.
    """
    paths = [str(directory / shard.file) for shard in split.shards]
    records = tf.data.TFRecordDataset(paths, compression_type=manifest.compression.upper())
    batches = records.batch(batch_size).map(lambda some: (some, _parse(some, manifest))).prefetch(2)
    seen = 0
    try:
        for serialized, parsed in batches:
            batch = Batch(
                images=parsed.pop("image", None),
                labels=parsed.pop("label").numpy(),
                keys=tuple(_text(parsed.pop("key").numpy()).tolist()),
                records=serialized,
                columns={name: _text(column.numpy()) for name, column in parsed.items()},
            )
            _check_labels(batch, len(manifest.class_names))
            seen += len(batch.keys)
            yield batch
    except (tf.errors.DataLossError, tf.errors.InvalidArgumentError) as error:
        raise DatasetError(
            f"a shard in {directory} is damaged after {seen:,} examples: {_first_line(error)}; "
            "preprocess the data again"
        ) from None
    if seen != split.records:
        raise DatasetError(
            f"the shards in {directory} hold {seen:,} examples, the manifest says {split.records:,}; "
            "preprocess the data again"
        )


def _parse(records: tf.Tensor, manifest: Manifest) -> Any:
    single = [feature for feature in manifest.features if feature.name == "image" or not feature.shape]
    parsed = tf.io.parse_example(
        records,
        {item.name: tf.io.FixedLenFeature([], _STORED.get(item.dtype, tf.string)) for item in single},
    )
    if "image" in parsed and manifest.image.encoding == "raw":  # the model is served files
        parsed["image"] = tf.map_fn(
            lambda stored: encode_stored(stored, manifest.image),
            parsed["image"],
            fn_output_signature=tf.string,
        )
    return parsed


def _text(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns a column with text in place of bytes."""
    if column.dtype != object:
        return column
    return np.array([value.decode("utf-8", "replace") for value in column], dtype=np.str_)


def _check_labels(batch: Batch, classes: int) -> None:
    wrong = np.flatnonzero((batch.labels < 0) | (batch.labels >= classes))
    if wrong.size:
        first = int(wrong[0])
        raise DatasetError(
            f"example {batch.keys[first]!r} has label {batch.labels[first]}, the dataset has classes "
            f"0..{classes - 1}; preprocess the data again"
        )


def _first_line(error: tf.errors.OpError) -> str:
    return str(error.message).strip().partition("\n")[0]


#: How many examples an export is compared with its model on.
MOST = 256

# The examples that a model has not seen come first.
_ORDER = ("test", "validation", "train")


def take_samples(manifest: Manifest, directory: Path, count: int = MOST) -> tuple[bytes, ...]:
    """Returns the first serialized tf.train.Example of the test split, then of the others.

    Args:
        manifest: Of the dataset.
        directory: The dataset directory.
        count: How many; a smaller dataset gives all of its examples.

    Raises:
        DatasetError: When a shard cannot be read.
    """
    splits = [manifest.splits[name] for name in _ORDER if name in manifest.splits]
    paths = [str(directory / shard.file) for split in splits for shard in split.shards]
    records = tf.data.TFRecordDataset(paths, compression_type=manifest.compression.upper())
    try:
        return tuple(records.take(count).as_numpy_iterator())
    except (tf.errors.DataLossError, tf.errors.NotFoundError) as error:
        reason = str(error.message).strip().partition("\n")[0]
        raise DatasetError(
            f"a shard in {directory} is damaged: {reason}; preprocess the data again"
        ) from None
