"""Augmentations that tests use, some of them wrong on purpose."""

import tensorflow as tf


def brighten(x, y, seed):
    delta = tf.random.stateless_uniform((), seed, 0, 100, tf.int32)
    return tf.cast(tf.minimum(tf.cast(x, tf.int32) + delta, 255), tf.uint8), y


def age(x, y, seed):
    years = tf.random.stateless_uniform((), seed, 1, 1000, tf.int64)
    return {**x, "year": x["year"] + years}, y


def cropped(x, y, seed):
    return x[:4], y


def only_x(x, y, seed):
    return x


def broken(x, y, seed):
    raise ValueError("no such filter")


def words(x, y):
    """Ragged: each example has as many values as its label."""
    return tf.RaggedTensor.from_row_lengths(tf.ones((tf.reduce_sum(y),)), y), y


def pixels_of_any_number(x, y):
    return tf.reshape(x, (tf.shape(x)[0], -1))[:, : tf.reduce_max(y)], y


def of_any_rank(x, y):
    return tf.py_function(lambda x: x, [x], tf.uint8), y


not_a_function = 3
