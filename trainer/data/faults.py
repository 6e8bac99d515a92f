"""Faults of a dataset: what an error of TensorFlow says about it, and which example is to blame."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import tensorflow as tf

from shardline.trainer.data.decode import Targets, parse_batch
from shardline.trainer.data.features import CLASS, REGRESSION, Label
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.errors import DatasetError
from shardline.trainer.tensorflow_internals import untuned

_BAD_LABEL = re.compile(
    r"(the \w+ split has a (?:label outside 0\.\.\d+|value of '.+' that is no finite number):)\]? *\[?(-?\w+)"
)
# Of TensorFlow's ParseExample.
_ABSENT = re.compile(r"Feature: (\S+) \(data type: \w+\) is required but could not be found")
_NOT_ONE = re.compile(r"Key: (\S+), Index: \d+\. +Number of \w+ values != expected\. +Values size: (\d+)")
_NOT_PARSED = "a record of the dataset is no tf.train.Example"
_NO_EXAMPLE = re.compile(r"Could not parse example input")
# Of its decoders, and of what follows on an image of another size. A model's own code may say so too.
_DECODER = re.compile(r"Decode(?:Image|Png|Jpeg)|Unknown image file format|Invalid (?:PNG|JPEG)")
_SIZE = re.compile(r"Shape of tensor|Input to reshape|inconsistent shapes")
_PREFIX = re.compile(
    r"\{\{.*?\}\} *|\[\[?Op:.*|\[\[\{\{.*|Error in user-defined function.*? with iterator: \S+ "
)

#: What TensorFlow raises; the other where its words quote a record that is no text.
Raised: TypeAlias = "tf.errors.OpError | UnicodeDecodeError"

#: How long an example that cannot be read is looked for.
_SEARCH_SECONDS = 60.0


def check_targets(targets: Targets, labels: Sequence[Label], split: str) -> Targets:
    """Returns targets as `parse_batch` gives them, of which reading fails when one is none of its label."""
    if isinstance(targets, dict):
        return {label.name: _check(targets[label.name], label, split) for label in labels}
    return _check(targets, labels[0], split)


def _check(target: tf.Tensor, label: Label, split: str) -> tf.Tensor:
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
    """Returns what an error of TensorFlow says about a dataset; None when it says nothing.

    The example is looked for, and named by its split, shard and key.
    """
    what = _describe(error)
    if not what and not isinstance(error, UnicodeDecodeError) and not _SIZE.search(str(error)):
        return None
    place, found = _find(directory, manifest)
    if isinstance(found, UnicodeDecodeError):
        what = _NOT_PARSED
    elif found is not None:
        what = _describe(found) or _unusable(found)
    if not what:
        return None
    if not place:
        place = f"in {directory}, where 'shardline dataset verify --deep' names all damage"
    return DatasetError(f"{place}: {what}; preprocess the data again")


def _describe(error: Raised) -> str:
    """Returns in words what an error that only a dataset can cause says; "" for any other."""
    text = " ".join(str(error).split())
    if bad_label := _BAD_LABEL.search(text):
        return f"{bad_label[1]} {bad_label[2]}"
    if absent := _ABSENT.search(text):
        return f"an example of the dataset has no {absent[1]!r}"
    if not_one := _NOT_ONE.search(text):
        return (
            f"an example of the dataset has {not_one[2]} values of {not_one[1]!r}, and a model takes one: "
            "what varies in length cannot be batched; store a column for each value, in every example"
        )
    if _NO_EXAMPLE.search(text):
        return _NOT_PARSED
    if isinstance(error, tf.errors.DataLossError):
        return "a shard of the dataset is damaged"
    return _unusable(error) if _DECODER.search(text) else ""


def _unusable(error: Raised) -> str:
    """Returns TensorFlow's words about an image, without the names of operations around them."""
    words = _PREFIX.sub("", " ".join(str(error).split())).strip()
    return f"its image cannot be used ({words[:200]})"


def _find(directory: Path, manifest: Manifest) -> tuple[str, Raised | None]:
    """Reads a dataset up to an example that cannot be read; its place in words, and what was raised."""
    until = time.monotonic() + _SEARCH_SECONDS
    for split, of_split in manifest.splits.items():

        def check(record: tf.Tensor, split: str = split) -> Targets:
            inputs, targets = parse_batch(record[tf.newaxis], manifest.inputs, manifest.labels)
            with tf.control_dependencies(tf.nest.flatten(inputs)):  # which nothing else needs
                return check_targets(targets, manifest.labels, split)

        for shard in of_split.shards:
            path, compression = str(directory / shard.file), manifest.compression.upper()
            records, number = tf.data.TFRecordDataset(path, compression_type=compression), 0
            checked = records.map(
                tf.autograph.experimental.do_not_convert(check), num_parallel_calls=tf.data.AUTOTUNE
            )
            try:
                for _ in untuned(checked).as_numpy_iterator():
                    number += 1
                    if time.monotonic() > until:
                        return "", None
            except (tf.errors.OpError, UnicodeDecodeError) as error:
                where = f"the {split} split, shard {shard.file}, record {number:,}{_key(records, number)}"
                return where, error
    return "", None


def _key(records: tf.data.Dataset, number: int) -> str:
    """Returns ", key 'x'" of a record; "" where it has none."""
    wanted = {"key": tf.io.FixedLenFeature([], tf.string, "")}
    with contextlib.suppress(tf.errors.OpError, UnicodeDecodeError):
        for record in records.skip(number).take(1):
            key = tf.io.parse_single_example(record, wanted)["key"].numpy()
            return f", key {key.decode('utf-8', 'replace')!r}" if key else ""
    return ""
