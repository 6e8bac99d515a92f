"""The EXIF orientation of a JPEG, in TensorFlow's own operations, so that an exported model can read it.

TensorFlow's decoders ignore it. `shardline.components.preprocess.images.header` reads it in the same way, in plain
Python.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

# The Exif standard has its segment come first; in practice a small one (JFIF) may precede it.
_HEAD_BYTES = 80_000
_EXIF = tuple(b"Exif\0\0")
_TAG = 0x0112


def read_orientation(encoded: tf.Tensor) -> tf.Tensor:
    """Returns what a JPEG says of its orientation, an int32 scalar 1..8; 1 if it says nothing.

    Args:
        encoded: Scalar string: an encoded image of any format.
    """
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
