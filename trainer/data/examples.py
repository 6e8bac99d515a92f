"""Examples of a dataset: in the memory of a worker, for a model function, and the one that an error is about.

An error of TensorFlow about an unreadable example becomes one line that names the example.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shardline.trainer.base.errors import DatasetError, ModelError
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.decode import Inputs, Targets, parse_batch
from shardline.trainer.data.features import CLASS, REGRESSION, Feature, Label
from shardline.trainer.data.manifest import DatasetInfo, Manifest
from shardline.trainer.keras_compat.datasets import no_autograph
from shardline.trainer.keras_compat.tensorflow_internals import short_error, without_autotuning

_BATCH_SIZE = 256
_CGROUP = Path("/sys/fs/cgroup")

# Errors of TensorFlow that only a dataset can cause: of `check_targets`, ParseExample, decoders.
_DATA_ERROR = re.compile(
    r"the \w+ split has a (?:label|value of)|is required but could not be found|Number of \w+ values !="
    r"|Could not parse example input|Decode(?:Image|Png|Jpeg)|Unknown image file format|Invalid (?:PNG|JPEG)"
)
# Errors about an image of another size, which a model's own code may raise too.
_SIZE_ERROR = re.compile(r"Shape of tensor|Input to reshape|inconsistent shapes")

#: Errors that TensorFlow raises; the second if its message quotes bytes of a record.
Raised: TypeAlias = "tf.errors.OpError | UnicodeDecodeError"

#: Decoded examples, inputs and targets, by their position among those that were loaded.
Memory: TypeAlias = tuple[Inputs, Targets]


def memory_budget() -> int:
    """Returns the bytes of examples that this process may keep: an eighth of the machine's free memory."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, LookupError, ValueError):
        known = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(known["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):  # no control group, or "max"
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    return int(max(0, free) * 0.125)  # replicas may share a machine, and all of them read the same number


def load(paths: Sequence[str], manifest: Manifest) -> Memory:
    """Reads and decodes whole shards, one after the other."""
    records = tf.data.TFRecordDataset(list(paths), buffer_size=8 << 20)
    decoded = _decode(records, manifest, manifest.inputs)
    parts = [tf.nest.flatten(batch) for batch in decoded.as_numpy_iterator()]
    with tf.device("CPU:0"):
        whole = [tf.constant(np.concatenate(column)) for column in zip(*parts, strict=True)]
    inputs, targets = tf.nest.pack_sequence_as(decoded.element_spec, whole)
    return inputs, targets


def _decode(records: tf.data.Dataset, manifest: Manifest, inputs: Mapping[str, Feature]) -> tf.data.Dataset:
    def parse(batch: tf.Tensor) -> tuple[Inputs, Targets]:
        return parse_batch(batch, inputs, manifest.labels)

    parsed = records.batch(_BATCH_SIZE).map(no_autograph(parse), num_parallel_calls=tf.data.AUTOTUNE)
    return without_autotuning(parsed.prefetch(2))


def describe(directory: Path, known: Manifest | None = None) -> DatasetInfo:
    """Returns the argument of a model function for a dataset directory, with its training examples.

    `known` is its manifest, if it is loaded already.
    """
    manifest = known or manifests.load(directory)
    return replace(manifest.info(), reader=functools.partial(_read_training_examples, directory, manifest))


def _read_training_examples(
    directory: Path, manifest: Manifest, columns: Sequence[str], limit: int | None
) -> dict[str, npt.NDArray[Any]]:
    inputs = manifest.inputs
    for name in columns:
        if name not in inputs:
            raise ModelError(
                f"training_examples: the dataset has no input {name!r}, it has {', '.join(inputs)}"
            )
    wanted = {name: inputs[name] for name in columns or inputs}
    paths = [str(directory / shard.file) for shard in manifest.splits["train"].shards]
    # Record by record from all shards in turn, to which preprocessing has assigned the examples at random.
    records = tf.data.Dataset.from_tensor_slices(paths).interleave(
        tf.data.TFRecordDataset, cycle_length=manifest.streams("train")
    )
    records = records.take(-1 if limit is None else limit)
    try:
        parts = [x for x, _ in _decode(records, manifest, wanted).as_numpy_iterator()]
    except (tf.errors.OpError, UnicodeDecodeError) as error:
        raise explain(error, directory, manifest) or error from error
    if isinstance(parts[0], dict):
        return {name: np.concatenate([part[name] for part in parts]) for name in wanted}
    return {"image": np.concatenate(parts)}


def check_targets(targets: Targets, labels: Sequence[Label], split: str) -> Targets:
    """Returns targets of `parse_batch`; reading them fails if one is not a valid value of its label."""
    if isinstance(targets, dict):
        return {label.name: check_targets(targets[label.name], [label], split) for label in labels}
    target, label = targets, labels[0]
    if label.kind == REGRESSION:
        outside = tf.boolean_mask(target, ~tf.math.is_finite(target))
        message = f"the {split} split has a value of {label.name!r} that is no finite number:"
    else:
        classes = len(label.outputs) if label.kind == CLASS else 2
        outside = tf.boolean_mask(target, (target < 0) | (target >= classes))
        message = f"the {split} split has a label outside 0..{classes - 1}:"
    with tf.control_dependencies([tf.debugging.Assert(tf.equal(tf.size(outside), 0), [message, outside])]):
        return tf.identity(target)


def explain(error: Raised, directory: Path, manifest: Manifest) -> DatasetError | None:
    """Returns an error of TensorFlow as an error of a dataset, with split, shard and key of the example.

    None if it is not about the dataset.
    """
    text = str(error)
    is_damage = isinstance(error, tf.errors.DataLossError) or bool(_DATA_ERROR.search(" ".join(text.split())))
    if not is_damage and not isinstance(error, UnicodeDecodeError) and not _SIZE_ERROR.search(text):
        return None
    location, found = _find_bad_example(directory, manifest)
    if not location and not is_damage:
        return None
    location = (
        location or f"in {directory}, where 'shardline dataset verify {directory} --deep' names all damage"
    )
    cause = found or error
    message = short_error(cause)
    what = f"the example cannot be used ({message})"
    if isinstance(cause, UnicodeDecodeError) or "Could not parse example input" in message:
        what = "a record of the dataset is not a tf.train.Example"
    elif isinstance(cause, tf.errors.DataLossError):
        what = "a shard of the dataset is damaged"
    return DatasetError(f"{location}: {what}; preprocess the data again")


def _find_bad_example(directory: Path, manifest: Manifest) -> tuple[str, Raised | None]:
    """Reads a dataset, for a minute, up to an unreadable example; returns where it is, and the error."""
    deadline = time.monotonic() + 60.0
    for split, content in manifest.splits.items():

        def check(record: tf.Tensor, split: str = split) -> Targets:
            inputs, targets = parse_batch(record[tf.newaxis], manifest.inputs, manifest.labels)
            with tf.control_dependencies(tf.nest.flatten(inputs)):  # or they would not be computed
                return check_targets(targets, manifest.labels, split)

        for shard in content.shards:
            path = str(directory / shard.file)
            records, number = tf.data.TFRecordDataset(path), 0
            checked = records.map(no_autograph(check), num_parallel_calls=tf.data.AUTOTUNE)
            try:
                for _ in without_autotuning(checked).as_numpy_iterator():
                    number += 1
                    if time.monotonic() > deadline:
                        return "", None
            except (tf.errors.OpError, UnicodeDecodeError) as error:
                location, wanted = f"record {number:,}", {"key": tf.io.FixedLenFeature([], tf.string, "")}
                with contextlib.suppress(tf.errors.OpError, UnicodeDecodeError):
                    for record in records.skip(number).take(1):
                        if key := tf.io.parse_single_example(record, wanted)["key"].numpy():
                            location += f", key {key.decode('utf-8', 'replace')!r}"
                return f"the {split} split, shard {shard.file}, {location}", error
    return "", None
