"""Decoding: stored examples to the tensors a model takes, and images as clients send them likewise.

TensorFlow's decoders ignore the EXIF orientation of a JPEG. It is read here in TensorFlow's own operations,
so that an exported model does it too; `components.preprocess.images` reads it in the same way in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import tensorflow as tf

from shardline.trainer.data.geometry import place
from shardline.trainer.data.manifest import Feature

# The Exif standard has its segment come first; in practice a small one (JFIF) may precede it.
_HEAD_BYTES = 80_000
_EXIF = tuple(b"Exif\0\0")
_TAG = 0x0112


def read_orientation(encoded: tf.Tensor) -> tf.Tensor:
    """Returns a JPEG's EXIF orientation, an int32 scalar 1..8; 1 for any other image (a scalar string)."""
    head = tf.strings.substr(encoded, 0, tf.minimum(tf.strings.length(encoded), _HEAD_BYTES))
    data = tf.cast(tf.io.decode_raw(head, tf.uint8), tf.int32)
    size = tf.size(data)
    data = tf.pad(data, [[0, 1]])

    def at(position: tf.Tensor) -> tf.Tensor:
        """Returns the bytes at some positions, 0 beyond the end."""
        inside = (position >= 0) & (position < size)
        return tf.gather(data, tf.where(inside, position, size))

    def number(position: tf.Tensor, count: int, little: tf.Tensor) -> tf.Tensor:
        """Returns the whole numbers of `count` bytes at some positions."""
        values = at(position[..., tf.newaxis] + tf.range(count))
        powers = 256 ** tf.range(count)
        return tf.reduce_sum(values * tf.where(little, powers, powers[::-1]), axis=-1)

    def is_exif(position: tf.Tensor) -> tf.Tensor:
        return (at(position + 1) == 0xE1) & tf.reduce_all(at(position + 4 + tf.range(6)) == _EXIF)

    def more(position: tf.Tensor) -> tf.Tensor:
        application_data = (at(position) == 0xFF) & (at(position + 1) // 16 == 0xE)
        return application_data & ~is_exif(position)

    def following(position: tf.Tensor) -> tuple[tf.Tensor]:
        return (position + 2 + number(position + 2, 2, tf.constant(False)),)

    def read_first_directory() -> tf.Tensor:
        tiff = segment + 10
        little = at(tiff) == ord("I")
        directory = tiff + number(tiff + 4, 4, little)
        entries = directory + 2 + 12 * tf.range(number(directory, 2, little))
        values = tf.boolean_mask(number(entries + 8, 2, little), number(entries, 2, little) == _TAG)
        value = tf.concat([values, [1]], 0)[0]
        return tf.where((value >= 1) & (value <= 8), value, 1)

    is_jpeg = (at(tf.constant(0)) == 0xFF) & (at(tf.constant(1)) == 0xD8)
    (segment,) = tf.while_loop(more, following, (tf.where(is_jpeg, 2, size),))
    return tf.cond(is_exif(segment), read_first_directory, lambda: tf.constant(1))


def turn_upright(pixels: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Applies an orientation, int32 1..8, to pixels of shape (height, width, channels)."""
    swapped, upside_down, mirrored = (
        tf.reduce_any(orientation == values) for values in ([5, 6, 7, 8], [3, 4, 7, 8], [2, 3, 6, 7])
    )
    steps: tuple[tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]], ...] = (
        (swapped, lambda image: tf.transpose(image, [1, 0, 2])),
        (upside_down, lambda image: image[::-1]),
        (mirrored, lambda image: image[:, ::-1]),
    )
    for needed, turn in steps:
        pixels = tf.cond(needed, lambda turn=turn, image=pixels: turn(image), lambda image=pixels: image)
    return pixels


#: What a model takes: a batch of images, or a batch of each column of a table by its name.
Inputs: TypeAlias = "tf.Tensor | dict[str, tf.Tensor]"


def parse_batch(serialized: tf.Tensor, inputs: Mapping[str, Feature]) -> tuple[Inputs, tf.Tensor]:
    """Parses serialized tf.train.Examples (batch,) into the manifest's inputs and labels, int64 (batch,).

    Inputs are uint8 (batch, height, width, channels), or for a table a dict of columns (batch,).
    """
    stored = {
        name: tf.io.FixedLenFeature([], "string" if name == "image" else feature.dtype)
        for name, feature in inputs.items()
    }
    parsed = tf.io.parse_example(serialized, {**stored, "label": tf.io.FixedLenFeature([], tf.int64)})
    labels = parsed.pop("label")
    return decode_batch(parsed["image"], inputs["image"]) if "image" in inputs else parsed, labels


def decode_batch(stored: tf.Tensor, image: Feature) -> tf.Tensor:
    """Decodes a batch of stored images to uint8 (batch, height, width, channels)."""
    if image.encoding == "raw":
        return tf.reshape(tf.io.decode_raw(stored, tf.uint8), (-1, *image.shape))
    pixels = tf.TensorSpec(image.shape, tf.uint8)
    return tf.map_fn(lambda one: decode_stored(one, image), stored, fn_output_signature=pixels)


def decode_stored(stored: tf.Tensor, image: Feature) -> tf.Tensor:
    """Decodes one stored image, a scalar string, to the manifest's uint8 (height, width, channels)."""
    if image.encoding == "raw":
        return tf.reshape(tf.io.decode_raw(stored, tf.uint8), image.shape)
    pixels = tf.io.decode_image(stored, channels=image.shape[2], expand_animations=False)
    return tf.ensure_shape(pixels, image.shape)


def encode_stored(stored: tf.Tensor, image: Feature) -> tf.Tensor:
    """Returns a stored image as a file that `decode_image` reads: raw values become a PNG."""
    return tf.io.encode_png(decode_stored(stored, image)) if image.encoding == "raw" else stored


def decode_image(encoded: tf.Tensor, image: Feature) -> tf.Tensor:
    """Decodes an image as clients send it (PNG, JPEG, BMP, a GIF's first frame) to uint8 of the stored size.

    The EXIF orientation of a JPEG is applied. An image that then has another than the stored size is cropped,
    padded or stretched as the manifest says (cropped if it says nothing), with antialiased interpolation.
    """
    height, width, channels = image.shape
    pixels = tf.io.decode_image(encoded, channels=channels, expand_animations=False)
    pixels = turn_upright(pixels, read_orientation(encoded))
    size = tf.shape(pixels)
    fits = tf.logical_and(tf.equal(size[0], height), tf.equal(size[1], width))
    pixels = tf.cond(fits, lambda: pixels, lambda: _fit(pixels, image))
    return tf.ensure_shape(pixels, (height, width, channels))


def _fit(pixels: tf.Tensor, image: Feature) -> tf.Tensor:
    """Resizes uint8 (h, w, c) to the feature's shape in the feature's way."""
    height, width, _ = image.shape
    assert height is not None  # no model is made for images that differ in size
    assert width is not None
    size = tf.shape(pixels)
    mode, target = image.resize or "crop", (height, width)
    at = place(size[0], size[1], target, mode, minimum=tf.minimum, maximum=tf.maximum)
    used = pixels[at.top : at.top + at.height, at.left : at.left + at.width]
    fitted = tf.image.resize(used, [at.fitted_height, at.fitted_width], method="bilinear", antialias=True)
    fitted = tf.cast(tf.clip_by_value(tf.round(fitted), 0.0, 255.0), tf.uint8)
    return tf.image.pad_to_bounding_box(fitted, at.pad_top, at.pad_left, height, width)
