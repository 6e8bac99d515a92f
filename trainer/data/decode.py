"""Image bytes to the tensor a model takes: as they are stored in shards, or as a client sends them."""

from __future__ import annotations

import tensorflow as tf

from trainer.data.geometry import place
from trainer.data.manifest import Feature
from trainer.data.orientation import read_orientation, turn_upright


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
