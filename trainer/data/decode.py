"""Stored examples to the tensors a model takes, and images as a client sends them likewise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import tensorflow as tf

from shardline.trainer.data.geometry import place
from shardline.trainer.data.manifest import Feature
from shardline.trainer.data.orientation import read_orientation, turn_upright

#: What a model takes: a batch of images, or a batch of each column of a table by its name.
Inputs: TypeAlias = "tf.Tensor | dict[str, tf.Tensor]"


def parse_batch(serialized: tf.Tensor, inputs: Mapping[str, Feature]) -> tuple[Inputs, tf.Tensor]:
    """Parses a batch of serialized tf.train.Example.

    Args:
        serialized: String tensor of shape (batch,).
        inputs: The manifest's inputs: the image alone, or columns.

    Returns:
        Images, uint8 (batch, height, width, channels), or for columns a dict of tensors (batch,) of their
        dtypes; and labels, int64 (batch,).
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
    return tf.map_fn(
        lambda one: decode_stored(one, image),
        stored,
        fn_output_signature=tf.TensorSpec(image.shape, tf.uint8),
    )


def decode_stored(stored: tf.Tensor, image: Feature) -> tf.Tensor:
    """Decodes one image of a shard, which has the size that the manifest states.

    Args:
        stored: Scalar string, in the encoding of the feature.
        image: The manifest's image feature; its shape is (height, width, channels).

    Returns:
        uint8 tensor of shape (height, width, channels), values 0..255.
    """
    if image.encoding == "raw":
        return tf.reshape(tf.io.decode_raw(stored, tf.uint8), image.shape)
    pixels = tf.io.decode_image(stored, channels=image.shape[2], expand_animations=False)
    return tf.ensure_shape(pixels, image.shape)


def encode_stored(stored: tf.Tensor, image: Feature) -> tf.Tensor:
    """Returns a stored image as a file that `decode_image` reads: raw values become a PNG.

    Args:
        stored: Scalar string, in the encoding of the feature.
        image: The manifest's image feature.
    """
    return tf.io.encode_png(decode_stored(stored, image)) if image.encoding == "raw" else stored


def decode_image(encoded: tf.Tensor, image: Feature) -> tf.Tensor:
    """Decodes one image of any size as a client sends it, and repeats the manifest's resizing.

    The EXIF orientation of a JPEG is applied. An image that then has the stored size passes untouched.
    Any other is cropped, padded or stretched as the manifest says (cropped if it says nothing), with
    antialiased bilinear interpolation, of which only the used part is computed.

    Args:
        encoded: Scalar string: PNG, JPEG, BMP or the first frame of a GIF.
        image: The manifest's image feature; its shape is (height, width, channels).

    Returns:
        uint8 tensor of shape (height, width, channels), values 0..255.
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
    at = place(
        size[0], size[1], (height, width), image.resize or "crop", minimum=tf.minimum, maximum=tf.maximum
    )
    used = pixels[at.top : at.top + at.height, at.left : at.left + at.width]
    fitted = tf.image.resize(used, [at.fitted_height, at.fitted_width], method="bilinear", antialias=True)
    fitted = tf.cast(tf.clip_by_value(tf.round(fitted), 0.0, 255.0), tf.uint8)
    return tf.image.pad_to_bounding_box(fitted, at.pad_top, at.pad_left, height, width)
