"""Some examples of a dataset, for trying out what was exported."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

from shardline.trainer.data.manifest import Manifest
from shardline.trainer.errors import DatasetError

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
