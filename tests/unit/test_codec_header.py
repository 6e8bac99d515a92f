"""Headers of JPEG and PNG, read by hand: what Pillow and TensorFlow read too, of whole and broken files."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageOps

from shardline.components.preprocess.images.structure import Header, read_header
from shardline.trainer.data.decode import read_orientation, turn_upright
from tests.helpers.images import encoded, opened, scene, turned

#: The operations as a graph, as training and serving have them.
find_orientation = tf.function(read_orientation, input_signature=[tf.TensorSpec([], tf.string)])


def test_a_jpeg_of_another_kind_is_not_standard() -> None:
    data = bytearray(encoded(scene(), "JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 1] = 0xC9  # arithmetically coded
    assert read_header(bytes(data)) == Header("jpeg", 40, 60, 3, 1, False, False, True)
    data[frame + 1], data[frame + 4] = 0xC1, 12  # 12 bits
    assert read_header(bytes(data)) == Header("jpeg", 40, 60, 3, 1, False, False, True)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("order", ["little", "big"])
@pytest.mark.parametrize("orientation", range(10))
def test_tensorflow_s_own_operations_find_and_apply_it(orientation: int, order: str, form: str) -> None:
    exif = Image.Exif()
    exif.endian = "<" if order == "little" else ">"
    exif[0x010F], exif[0x0112] = "maker", orientation
    data = encoded(scene(), form, exif=exif, quality=95)
    assert (b"MM\0*" in data) == (order == "big")
    expected = orientation if 1 <= orientation <= 8 else 1
    assert int(find_orientation(data)) == expected
    header = read_header(data)
    assert form == "WEBP" if header is None else header.orientation == expected
    pixels = np.asarray(opened(data))
    upright = turn_upright(tf.constant(pixels), tf.constant(expected)).numpy()
    assert np.array_equal(upright, np.asarray(ImageOps.exif_transpose(opened(data))))


def _segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def _exif(orientation: int, order: bytes = b"MM\0*") -> bytes:
    return b"Exif\0\0" + order + struct.pack(">IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)


def _chunk(content: bytes) -> bytes:
    return struct.pack(">I4s", len(content), b"eXIf") + content + bytes(4)


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        pytest.param(_segment(0xFE, b"a comment") + _segment(0xE1, _exif(6)), 6, id="behind a comment"),
        pytest.param(_segment(0xDB, bytes(65)) + _segment(0xE1, _exif(6)), 6, id="behind a table"),
        pytest.param(b"\xff\xff" + _segment(0xE1, _exif(6)), 6, id="behind fill bytes"),
        pytest.param(_segment(0xE1, _exif(6)) + _segment(0xE1, _exif(8)), 6, id="two: the first counts"),
        pytest.param(_segment(0xE1, _exif(6, b"XX\0*")), 1, id="no byte order"),
        pytest.param(_segment(0xE1, _exif(6, b"IX*\0")), 1, id="half a byte order"),
        pytest.param(_chunk(_exif(6)), 6, id="named again in a PNG"),
        pytest.param(_chunk(_exif(6)[6:]) + _chunk(_exif(8)[6:]), 6, id="two in a PNG"),
    ],
)
def test_training_and_serving_find_the_same_orientation_in_odd_places(before: bytes, expected: int) -> None:
    form, end = ("PNG", 33) if before.startswith(b"\0") else ("JPEG", 2)
    plain = encoded(scene(), form)
    data = plain[:end] + before + plain[end:]
    header = read_header(data)
    assert header is not None
    assert (header.orientation, int(find_orientation(data))) == (expected, expected)


def test_no_broken_file_is_too_broken() -> None:
    rng = np.random.default_rng(0)
    for whole in (turned(6), turned(6, "PNG"), turned(6, "WEBP"), encoded(scene(), "JPEG")):
        for end in range(0, len(whole) - 13, 7):
            header = read_header(whole[:end])
            assert header is None or not header.whole
        for _ in range(300):
            damaged = bytearray(whole)
            damaged[rng.integers(3, 200)] = rng.integers(256)
            header = read_header(bytes(damaged))
            assert header is None or 1 <= header.orientation <= 8
            assert 1 <= int(find_orientation(bytes(damaged))) <= 8
    for data in (b"", b"\xff\xd8", b"\xff\xd8\xff\xe1\0\x08Exif\0\0", b"\xff\xd8\xff\xe0\0\0" * 9):
        assert int(find_orientation(data)) == int(read_orientation(data)) == 1
