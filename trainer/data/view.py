"""Examples in memory: those of a worker, decoded once, and those by which a model function adapts layers."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shardline.trainer.data import faults
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.decode import Inputs, Targets, parse_batch
from shardline.trainer.data.features import Feature
from shardline.trainer.data.manifest import DatasetInfo, Manifest
from shardline.trainer.errors import ModelError
from shardline.trainer.tensorflow_internals import untuned

_BATCH = 256

#: Share of the memory that is free in which one process may keep its examples. Replicas may share a machine,
#: and all of them look at the same figure.
_SHARE = 0.125
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Memory:
    """Decoded examples as `Feed.decode` gives a batch, by their position among those that were loaded."""

    inputs: Inputs
    targets: Targets

    def take(self, positions: tf.Tensor) -> tuple[Inputs, Targets]:
        """Returns the inputs and targets at some positions, int64 (batch,)."""

        def take(values: tf.Tensor) -> tf.Tensor:
            return tf.gather(values, positions)

        inputs, targets = tf.nest.map_structure(take, (self.inputs, self.targets))
        return inputs, targets


def decoded_bytes(features: Iterable[Feature], records: int) -> int | None:
    """Returns the size of so many examples of some features, decoded; None where it is not known."""
    total = 0
    for feature in features:
        if feature.dtype == "string" or None in feature.shape:
            return None
        sizes = [size for size in feature.shape if size is not None]
        total += math.prod(sizes) * np.dtype(feature.dtype).itemsize
    return total * records


def room() -> int:
    """Returns how many bytes of examples this process may keep: a share of the machine's free memory."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = (_lines(_CGROUP / name) for name in ("memory.max", "memory.current"))
    if limit and used and limit[0].isdigit():
        free = min(free, int(limit[0]) - int(used[0]))
    return int(max(0, free) * _SHARE)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def load(paths: Sequence[str], manifest: Manifest) -> Memory:
    """Reads and decodes whole shards, one after the other."""
    records = tf.data.TFRecordDataset(
        list(paths), compression_type=manifest.compression.upper(), buffer_size=8 << 20
    )
    decoded = _decoded(records, manifest, manifest.inputs)
    parts = [tf.nest.flatten(batch) for batch in decoded.as_numpy_iterator()]
    with tf.device("CPU:0"):
        whole = [tf.constant(np.concatenate(column)) for column in zip(*parts, strict=True)]
    return Memory(*tf.nest.pack_sequence_as(decoded.element_spec, whole))


def _decoded(records: tf.data.Dataset, manifest: Manifest, inputs: Mapping[str, Feature]) -> tf.data.Dataset:
    def parse(batch: tf.Tensor) -> tuple[Inputs, Targets]:
        return parse_batch(batch, inputs, manifest.labels)

    parsed = records.batch(_BATCH).map(
        tf.autograph.experimental.do_not_convert(parse), num_parallel_calls=tf.data.AUTOTUNE
    )
    return untuned(parsed.prefetch(2))


def describe(directory: Path, known: Manifest | None = None) -> DatasetInfo:
    """Returns what a model function is told about a dataset directory, its training examples with it.

    Args:
        directory: Dataset directory, for a test of a model function of one's own.
        known: Its manifest, where it is read already.
    """
    found = known or manifests.load(directory)
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
    paths = [str(directory / shard.file) for shard in manifest.splits["train"].shards]
    # Record by record from all shards in turn: over them preprocessing has dealt the examples at random.
    records = tf.data.Dataset.from_tensor_slices(paths).interleave(
        lambda path: tf.data.TFRecordDataset(path, compression_type=manifest.compression.upper()),
        cycle_length=len(paths),
    )
    records = records.take(-1 if limit is None else limit)
    try:
        parts = [x for x, _ in _decoded(records, manifest, wanted).as_numpy_iterator()]
    except (tf.errors.OpError, UnicodeDecodeError) as error:
        raise faults.explain(error, directory, manifest) or error from error
    if isinstance(parts[0], dict):
        return {name: np.concatenate([part[name] for part in parts]) for name in wanted}
    return {"image": np.concatenate(parts)}
