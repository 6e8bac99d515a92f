"""Examples of a dataset: decoded to tensors, kept in memory, and the one that an error is about.

Stored examples, and images of a client's request, become the tensors that a model takes. TensorFlow's
decoders ignore the EXIF orientation: it is read here by operations that an exported model has. An error of
TensorFlow about an unreadable example becomes one line that names the example.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shardline.trainer import manifest as manifests
from shardline.trainer.base.errors import DatasetError, ModelError
from shardline.trainer.keras_compat.datasets import no_autograph
from shardline.trainer.keras_compat.tensorflow_internals import short_error, without_autotuning
from shardline.trainer.manifest import CLASS, REGRESSION, DatasetInfo, Feature, Label, Manifest

_EXIF = b"Exif\0\0"
_TAG = 0x0112
# Markers of a JPEG's frames, and of a scan.
_PIXELS_FOLLOW = sorted({*range(0xC0, 0xD0), 0xDA} - {0xC4, 0xC8, 0xCC})
_JPEG, _PNG = b"\xff\xd8", b"\x89PNG"

_BATCH_SIZE = 256
_CGROUP = Path("/sys/fs/cgroup")

# Errors of TensorFlow that only a dataset can cause: of `check_targets`, ParseExample, decoders.
_DATA_ERROR = re.compile(
    r"the \w+ split has a (?:label|value of)|is required but could not be found|Number of \w+ values !="
    r"|Could not parse example input|Decode(?:Image|Png|Jpeg)|Unknown image file format|Invalid (?:PNG|JPEG)"
)
# Errors about an image of another size, which a model's own code may raise too.
_SIZE_ERROR = re.compile(r"Shape of tensor|Input to reshape|inconsistent shapes")


class _Bytes:
    """Bytes of a scalar string, by position."""

    def __init__(self, encoded: tf.Tensor) -> None:
        self._encoded = encoded
        data = tf.io.decode_raw(encoded, tf.uint8)
        self.size = tf.size(data)
        self._data = tf.pad(data, [[0, 1]])

    def at(self, position: tf.Tensor) -> tf.Tensor:
        """Returns the bytes at some positions, int32; 0 beyond the end."""
        inside = (position >= 0) & (position < self.size)
        return tf.cast(tf.gather(self._data, tf.where(inside, position, self.size)), tf.int32)

    def number(self, position: tf.Tensor, count: int, little: tf.Tensor) -> tf.Tensor:
        """Returns the whole numbers of `count` bytes at some positions."""
        values = self.at(position[..., tf.newaxis] + tf.range(count))
        powers = 256 ** tf.range(count)
        return tf.reduce_sum(values * tf.where(little, powers, powers[::-1]), axis=-1)

    def starts_with(self, prefix: bytes) -> tf.Tensor:
        """Returns whether the file starts with these bytes, a bool scalar."""
        return tf.strings.substr(self._encoded, 0, len(prefix)) == prefix

    def has(self, position: tf.Tensor | int, expected: bytes) -> tf.Tensor:
        """Returns whether these bytes are at a position, a bool scalar."""
        return tf.reduce_all(self.at(position + tf.range(len(expected))) == tuple(expected))


def read_orientation(encoded: tf.Tensor) -> tf.Tensor:
    """Returns the EXIF orientation of a JPEG, or of a PNG before its pixels, int32 1..8; 1 for none."""
    file = _Bytes(encoded)

    def read_first_directory(tiff: tf.Tensor) -> tf.Tensor:
        little = file.at(tiff) == ord("I")
        directory = tiff + file.number(tiff + 4, 4, little)
        entries = directory + 2 + 12 * tf.range(file.number(directory, 2, little))
        values = tf.boolean_mask(file.number(entries + 8, 2, little), file.number(entries, 2, little) == _TAG)
        value = tf.concat([values, [1]], 0)[0]
        return tf.where((value >= 1) & (value <= 8), value, 1)

    # Not one whose pixels are in the first chunk after the header.
    is_png = file.starts_with(_PNG) & ~file.has(37, b"IDAT")
    tiff = tf.cond(
        file.starts_with(_JPEG),
        lambda: _find_segment(file),
        lambda: tf.cond(is_png, lambda: _find_chunk(file), lambda: file.size),
    )
    is_tiff = file.has(tiff, b"II*\0") | file.has(tiff, b"MM\0*")
    return tf.cond(is_tiff, lambda: read_first_directory(tiff), lambda: tf.constant(1))


def _find_segment(file: _Bytes) -> tf.Tensor:
    """Returns the position of a JPEG's EXIF data, after their name; its size if there are none."""

    def is_exif(position: tf.Tensor) -> tf.Tensor:
        return (file.at(position + 1) == 0xE1) & file.has(position + 4, _EXIF)

    def more(position: tf.Tensor) -> tf.Tensor:
        is_segment = (file.at(position) == 0xFF) & ~tf.reduce_any(file.at(position + 1) == _PIXELS_FOLLOW)
        return is_segment & ~is_exif(position)

    def following(position: tf.Tensor) -> tuple[tf.Tensor]:
        length = 2 + file.number(position + 2, 2, tf.constant(False))
        return (position + tf.where(file.at(position + 1) == 0xFF, 1, length),)  # a fill byte

    (segment,) = tf.while_loop(more, following, (tf.constant(2),))
    return tf.where(is_exif(segment), segment + 10, file.size)


def _find_chunk(file: _Bytes) -> tf.Tensor:
    def is_exif(position: tf.Tensor) -> tf.Tensor:
        return file.has(position + 4, b"eXIf")

    def more(position: tf.Tensor) -> tf.Tensor:
        return ~(file.has(position + 4, b"IDAT") | (position >= file.size)) & ~is_exif(position)

    def following(position: tf.Tensor) -> tuple[tf.Tensor]:
        step = file.number(position, 4, tf.constant(False)) + 12
        return (tf.where(step > 0, position + step, file.size),)

    (chunk,) = tf.while_loop(more, following, (tf.constant(8),))
    content = chunk + 8 + tf.where(file.has(chunk + 8, _EXIF), len(_EXIF), 0)
    return tf.where(is_exif(chunk), content, file.size)


def turn_upright(pixels: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Applies an orientation, int32 1..8, to pixels of shape (height, width, channels)."""
    steps: tuple[tuple[list[int], Callable[[tf.Tensor], tf.Tensor]], ...] = (
        ([5, 6, 7, 8], lambda image: tf.transpose(image, [1, 0, 2])),
        ([3, 4, 7, 8], lambda image: image[::-1]),
        ([2, 3, 6, 7], lambda image: image[:, ::-1]),
    )
    for values, turn in steps:
        needed = tf.reduce_any(orientation == values)
        pixels = tf.cond(needed, lambda turn=turn, image=pixels: turn(image), lambda image=pixels: image)
    return pixels


#: What a model takes: a batch of images, or a batch of each column of a table by its name.
Inputs: TypeAlias = "tf.Tensor | dict[str, tf.Tensor]"

#: Inputs of a dataset -> inputs of the model, by the dataset's transformation.
Prepare = Callable[[Inputs], Any]

#: What a model is to predict: a batch of the only label, or of each label by its name.
Targets: TypeAlias = "tf.Tensor | dict[str, tf.Tensor]"


def parse_batch(
    serialized: tf.Tensor, inputs: Mapping[str, Feature], labels: Sequence[Label]
) -> tuple[Inputs, Targets]:
    """Parses serialized tf.train.Examples (batch,) into the manifest's inputs and targets.

    Inputs are uint8 (batch, height, width, channels), or for a table a dict of columns, (batch,) or of
    vectors (batch, n). A target is a class, int64 (batch,); 0 or 1 for each output of a multilabel, int64
    (batch, outputs); or a number, float32 (batch,), for several numbers (batch, outputs).
    """
    stored = {
        name: tf.io.FixedLenFeature(*(((), "string") if name == "image" else (feature.shape, feature.dtype)))
        for name, feature in inputs.items()
    }
    stored |= {
        label.name: tf.io.FixedLenFeature(label.feature.shape, label.feature.dtype) for label in labels
    }
    parsed = tf.io.parse_example(serialized, stored)
    targets = {label.name: parsed.pop(label.name) for label in labels}
    x = decode_batch(parsed["image"], inputs["image"]) if "image" in inputs else parsed
    return x, targets if len(labels) > 1 else targets[labels[0].name]


def make_probe_rows(
    columns: Mapping[str, Feature], texts: Sequence[str], numbers: Sequence[int]
) -> dict[str, tf.Tensor]:
    """Returns synthetic rows of a table's columns, one for each value; a vector repeats its value."""
    values = {name: texts if column.dtype == "string" else numbers for name, column in columns.items()}
    return {
        name: tf.constant(
            np.array([np.full([side or 1 for side in column.shape], value) for value in values[name]]),
            column.dtype,
        )
        for name, column in columns.items()
    }


def decode_batch(stored: tf.Tensor, image: Feature) -> tf.Tensor:
    """Decodes a batch of stored images to uint8 (batch, height, width, channels)."""
    if image.encoding == "raw":
        return tf.reshape(tf.io.decode_raw(stored, tf.uint8), (-1, *image.shape))

    def decode(encoded: tf.Tensor) -> tf.Tensor:
        pixels = tf.io.decode_image(encoded, channels=image.shape[2], expand_animations=False)
        return tf.ensure_shape(pixels, image.shape)

    return tf.map_fn(decode, stored, fn_output_signature=tf.TensorSpec(image.shape, tf.uint8))


def encode_stored(stored: tf.Tensor, image: Feature) -> tf.Tensor:
    """Returns stored images, [n], as files that `decode_image` reads: raw values become a PNG."""
    return tf.io.encode_png(decode_batch(stored, image)) if image.encoding == "raw" else stored


def decode_image(encoded: tf.Tensor, image: Feature) -> tf.Tensor:
    """Decodes a JPEG or PNG to uint8 of the stored size; any other file is an InvalidArgumentError.

    The EXIF orientation is applied. An image of another size is then cropped, padded or stretched as the
    manifest says (cropped by default), with antialiased interpolation.
    """
    height, width, channels = image.shape
    assert height is not None  # no model is made for images that differ in size
    assert width is not None
    assert channels is not None
    file = _Bytes(encoded)
    is_read = tf.debugging.Assert(
        file.starts_with(_JPEG) | file.starts_with(_PNG), ["not an image that is read; send a JPEG or PNG"]
    )
    with tf.control_dependencies([is_read] if is_read is not None else []):
        decoded = tf.io.decode_image(encoded, channels=channels, expand_animations=False)
    pixels = turn_upright(decoded, read_orientation(encoded))

    def fit() -> tf.Tensor:
        size, mode = tf.shape(pixels), image.resize or "crop"
        at = manifests.compute_placement(
            size[0], size[1], (height, width), mode, minimum=tf.minimum, maximum=tf.maximum
        )
        used = pixels[at.top : at.top + at.height, at.left : at.left + at.width]
        fitted = tf.image.resize(used, [at.fitted_height, at.fitted_width], method="bilinear", antialias=True)
        fitted = tf.cast(tf.clip_by_value(tf.round(fitted), 0.0, 255.0), tf.uint8)
        return tf.image.pad_to_bounding_box(fitted, at.pad_top, at.pad_left, height, width)

    fits = tf.reduce_all(tf.shape(pixels)[:2] == [height, width])
    return tf.ensure_shape(tf.cond(fits, lambda: pixels, fit), (height, width, channels))


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


def load_examples(paths: Sequence[str], manifest: Manifest) -> Memory:
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


def describe_dataset(directory: Path, known: Manifest | None = None) -> DatasetInfo:
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
        raise explain_read_error(error, directory, manifest) or error from error
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


def explain_read_error(error: Raised, directory: Path, manifest: Manifest) -> DatasetError | None:
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
