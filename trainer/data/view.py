"""View of the training split for model functions: examples by which layers are adapted before training."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shardline.trainer.data import faults, manifest
from shardline.trainer.data.decode import parse_batch
from shardline.trainer.data.manifest import DatasetInfo, Manifest
from shardline.trainer.data.memory import untuned
from shardline.trainer.errors import ModelError

_BATCH = 256


def describe(directory: Path, known: Manifest | None = None) -> DatasetInfo:
    """Returns what a model function is told about a dataset directory, its training examples with it.

    Args:
        directory: Dataset directory, for a test of a model function of one's own.
        known: Its manifest, where it is read already.
    """
    found = known or manifest.load(directory)
    return replace(found.info(), reader=functools.partial(_read, directory, found))


def _read(
    directory: Path, manifest: Manifest, columns: Sequence[str], limit: int | None
) -> dict[str, npt.NDArray[Any]]:
    """Returns the first examples of the training split as `DatasetInfo.training_examples` does.

    Every process reads them for itself: the same records in the same order, whatever the number of replicas,
    so that what is adapted to them is the same on all.
    """
    inputs = manifest.inputs
    for name in columns:
        if name not in inputs:
            raise ModelError(
                f"training_examples: the dataset has no input {name!r}, it has {', '.join(inputs)}"
            )
    wanted = {name: inputs[name] for name in columns or inputs}
    split = manifest.splits["train"]
    paths = [str(directory / shard.file) for shard in split.shards]
    # Record by record from all shards in turn: over them preprocessing has dealt the examples at random.
    records = tf.data.Dataset.from_tensor_slices(paths).interleave(
        lambda path: tf.data.TFRecordDataset(path, compression_type=manifest.compression.upper()),
        cycle_length=len(paths),
    )
    batches = records.take(-1 if limit is None else limit).batch(_BATCH)
    parse = tf.autograph.experimental.do_not_convert(
        lambda batch: parse_batch(batch, wanted, manifest.labels)[0]
    )
    found = _collect(untuned(batches.map(parse).prefetch(2)), directory, manifest)
    return {name: found[name] for name in wanted}  # which TensorFlow has put in alphabetical order


def _collect(batches: tf.data.Dataset, directory: Path, manifest: Manifest) -> dict[str, npt.NDArray[Any]]:
    try:
        parts = list(batches.as_numpy_iterator())
    except (tf.errors.OpError, UnicodeDecodeError) as error:
        raise faults.explain(error, directory, manifest) or error from error
    if isinstance(parts[0], dict):
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return {"image": np.concatenate(parts)}
