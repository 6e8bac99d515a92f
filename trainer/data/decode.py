"""Decoding: stored examples, and images of a client's request, to the tensors that a model takes.

TensorFlow's decoders ignore the EXIF orientation: it is read here by operations that an exported model has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from shardline.trainer.data.features import Feature, Label, compute_placement

_EXIF = b"Exif\0\0"
_TAG = 0x0112
# Markers of a JPEG's frames, and of a scan.
_PIXELS_FOLLOW = sorted({*range(0xC0, 0xD0), 0xDA} - {0xC4, 0xC8, 0xCC})
_JPEG, _PNG = b"\xff\xd8", b"\x89PNG"


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
    """Returns a stored image as a file that `decode_image` reads: raw values become a PNG."""
    return tf.io.encode_png(decode_batch(stored, image)[0]) if image.encoding == "raw" else stored


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
        at = compute_placement(
            size[0], size[1], (height, width), mode, minimum=tf.minimum, maximum=tf.maximum
        )
        used = pixels[at.top : at.top + at.height, at.left : at.left + at.width]
        fitted = tf.image.resize(used, [at.fitted_height, at.fitted_width], method="bilinear", antialias=True)
        fitted = tf.cast(tf.clip_by_value(tf.round(fitted), 0.0, 255.0), tf.uint8)
        return tf.image.pad_to_bounding_box(fitted, at.pad_top, at.pad_left, height, width)

    fits = tf.reduce_all(tf.shape(pixels)[:2] == [height, width])
    return tf.ensure_shape(tf.cond(fits, lambda: pixels, fit), (height, width, channels))
