"""Examples in memory: decoded once by each worker, so that later epochs neither read nor decode."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf

from shardline.trainer.data.decode import Inputs, Targets, parse_batch
from shardline.trainer.data.features import Feature
from shardline.trainer.data.manifest import Manifest

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


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset without the thread that tunes it, which sleeps up to a minute between two looks.

    Whoever lets go of an iterator waits until it wakes. Without it AUTOTUNE means as many calls as cores.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def load(paths: Sequence[str], manifest: Manifest) -> Memory:
    """Reads and decodes whole shards, one after the other."""
    compression, inputs, labels = manifest.compression.upper(), manifest.inputs, manifest.labels
    records = tf.data.TFRecordDataset(list(paths), compression_type=compression, buffer_size=8 << 20)
    decoded = records.batch(_BATCH).map(
        tf.autograph.experimental.do_not_convert(lambda batch: parse_batch(batch, inputs, labels)),
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    parts = [tf.nest.flatten(batch) for batch in untuned(decoded.prefetch(2)).as_numpy_iterator()]
    with tf.device("CPU:0"):
        whole = [tf.constant(np.concatenate(column)) for column in zip(*parts, strict=True)]
    return Memory(*tf.nest.pack_sequence_as(decoded.element_spec, whole))
