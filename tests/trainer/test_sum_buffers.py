"""Sum buffers: aligned, and reused only when no longer referenced."""

import numpy as np
import tensorflow as tf

from shardline.trainer.distribute.collectives import RingSummation
from shardline.trainer.keras_compat.tensorflow_internals import SumBuffers


def gradients():
    return np.ones((3, 5), np.float32), np.float32(2) * np.ones((), np.float32), np.ones(40, np.float32)


def test_every_gradient_has_an_aligned_view_of_its_shape():
    flat, parts = SumBuffers().lay_out(gradients())

    assert [part.shape for part in parts] == [(3, 5), (), (40,)]
    assert {part.ctypes.data % 64 for part in parts} == {0}
    for number, part in enumerate(parts):
        part[...] = number + 1
    assert flat.sum() == 15 + 2 + 3 * 40  # what lies between is 0


def test_a_buffer_is_reused_only_when_unreferenced():
    buffers = SumBuffers()
    flat, parts = buffers.lay_out(gradients())
    first = flat.ctypes.data
    kept = parts[1]
    del flat, parts

    other, _ = buffers.lay_out(gradients())
    assert other.ctypes.data != first
    del kept
    again, _ = buffers.lay_out(gradients())
    assert again.ctypes.data == first


def test_large_gradients_are_passed_to_the_ring_without_a_copy():
    class Twice:
        def sum(self, values, own):
            self.starts = [start for start, _ in own]
            for start, array in own:
                values[start : start + array.size] = array
            values *= 2

    ring = Twice()
    gradients = [
        np.full(shape, number, np.float32) for number, shape in enumerate([(3,), (200, 100), (), (1, 20_000)])
    ]
    summation = RingSummation(ring)
    sums = tf.function(lambda *own: summation(own))(*map(tf.constant, gradients))

    assert ring.starts == [16, 16 + 20_000 + 16]
    for total, own in zip(sums, gradients, strict=True):
        np.testing.assert_array_equal(total, 2 * own)
