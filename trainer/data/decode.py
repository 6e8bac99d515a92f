"""Encoded image bytes to the tensor a model takes: one function for training, evaluation and serving."""

from __future__ import annotations

import tensorflow as tf

from trainer.data.manifest import Feature


def decode_image(encoded: tf.Tensor, image: Feature) -> tf.Tensor:
    """Decodes one image and, where it is not yet of the stored size, repeats the manifest's resizing.

    Examples of the dataset already have the size that the manifest states and pass untouched; an image
    of another size, which only serving meets, is fitted by its shorter side (antialiased bilinear) and
    centre-cropped.

    Args:
        encoded: Scalar string: PNG, JPEG, BMP or the first frame of a GIF.
        image: The manifest's image feature; its shape is (height, width, channels).

    Returns:
        uint8 tensor of shape (height, width, channels), values 0..255.
    """
    height, width, channels = image.shape
    pixels = tf.io.decode_image(encoded, channels=channels, expand_animations=False)
    size = tf.shape(pixels)
    fits = tf.logical_and(tf.equal(size[0], height), tf.equal(size[1], width))
    pixels = tf.cond(fits, lambda: pixels, lambda: _fit(pixels, height, width))
    return tf.ensure_shape(pixels, (height, width, channels))


def _fit(pixels: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Resizes uint8 (h, w, c) so that the target is just covered, and crops its centre."""
    size = tf.cast(tf.shape(pixels)[:2], tf.float32)
    scale = tf.maximum(height / size[0], width / size[1])
    covering = tf.maximum(tf.cast(tf.round(size * scale), tf.int32), [height, width])
    resized = tf.image.resize(pixels, covering, method="bilinear", antialias=True)
    top, left = (covering[0] - height) // 2, (covering[1] - width) // 2
    cropped = resized[top : top + height, left : left + width]
    return tf.cast(tf.clip_by_value(tf.round(cropped), 0.0, 255.0), tf.uint8)
