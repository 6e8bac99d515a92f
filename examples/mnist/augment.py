"""Training digits moved by up to two pixels, the same on any number of workers."""

from __future__ import annotations

import tensorflow as tf

_PIXELS = 2


def shift(x: tf.Tensor, y: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Moves one image at random and fills with black.

    Args:
        x: uint8 (height, width, channels).
        y: Its label.
        seed: int64 (2,).
    """
    padded = tf.pad(x, [[_PIXELS, _PIXELS], [_PIXELS, _PIXELS], [0, 0]])
    offset = tf.random.stateless_uniform((2,), seed, 0, 2 * _PIXELS + 1, tf.int32)
    return tf.slice(padded, tf.concat([offset, [0]], axis=0), tf.shape(x)), y
