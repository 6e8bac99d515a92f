"""Resizing: the geometry that training data and the exported model share, and how good and alike it is."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from shardline.components.preprocess.images.codec import Codec
from shardline.trainer.data.examples import decode_image
from shardline.trainer.manifest import Feature, Placement, compute_placement
from tests.helpers.images import encoded, opened, psnr, scene

MODES = ("crop", "pad", "stretch")
SIZES = [(320, 213), (213, 320), (97, 96), (64, 64), (500, 11), (11, 500), (1003, 751), (40, 30)]


@pytest.mark.parametrize(
    ("size", "target", "mode", "expected"),
    [
        # top, left, height, width, reduction, fitted height and width, padding
        ((300, 400), (224, 224), "crop", (0, 50, 300, 300, 1, 224, 224, 0, 0)),
        ((300, 400), (224, 224), "pad", (0, 0, 300, 400, 1, 168, 224, 28, 0)),
        ((300, 400), (224, 224), "stretch", (0, 0, 300, 400, 1, 224, 224, 0, 0)),
        ((960, 1280), (224, 224), "crop", (0, 160, 960, 960, 2, 224, 224, 0, 0)),
        ((751, 1003), (96, 96), "crop", (0, 124, 748, 748, 4, 96, 96, 0, 0)),  # cut to multiples of 4
        ((4, 40_000), (224, 224), "crop", (0, 19_998, 4, 4, 1, 224, 224, 0, 0)),
        ((4, 40_000), (224, 224), "pad", (0, 0, 4, 40_000, 2, 1, 224, 111, 0)),  # never thinner than a pixel
        ((9000, 9000), (224, 224), "stretch", (0, 0, 9000, 9000, 8, 224, 224, 0, 0)),  # 8 at most
        ((100, 100), (40, 60), "crop", (17, 0, 66, 100, 1, 40, 60, 0, 0)),  # a target that is no square
    ],
)
def test_placement(
    size: tuple[int, int], target: tuple[int, int], mode: str, expected: tuple[int, ...]
) -> None:
    assert compute_placement(*size, target, mode) == Placement(*expected)


@pytest.mark.parametrize("mode", MODES)
def test_numbers_and_tensors_are_placed_alike(mode: str) -> None:
    rng = np.random.default_rng(0)
    for height, width in [*SIZES, *rng.integers(4, 5000, (40, 2)).tolist(), (4, 65_000), (65_000, 4)]:
        for target in ((224, 224), (7, 7), (48, 96)):
            numbers = compute_placement(height, width, target, mode)
            tensors = compute_placement(
                tf.constant(height), tf.constant(width), target, mode, minimum=tf.minimum, maximum=tf.maximum
            )
            assert tuple(map(int, tensors)) == numbers
            assert numbers.top + numbers.height <= height
            assert numbers.left + numbers.width <= width
            assert 0 < numbers.fitted_height + numbers.pad_top <= target[0]


def stored(data: bytes, size: int, mode: str, encoding: str = "png") -> np.ndarray:
    codec = Codec(image_size=size, resize_mode=mode, encoding=encoding, max_pixels=10**8)
    return np.asarray(opened(codec.store(data, b"x")[0])).astype(int)


def served(data: bytes, size: int, mode: str) -> np.ndarray:
    feature = Feature("image", "uint8", (size, size, 3), "png", mode)
    return decode_image(data, feature).numpy().astype(int)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("target", [96, 31, 200])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_what_is_stored_agrees_with_what_is_served(
    form: str, size: tuple[int, int], target: int, mode: str
) -> None:
    image = scene(120, 90).resize(size, Image.Resampling.BICUBIC)
    data = encoded(image, form, **({"quality": 95} if form == "JPEG" else {}))
    difference = np.abs(stored(data, target, mode) - served(data, target, mode))
    # Of a JPEG, the decoders themselves differ by up to 2.
    assert difference.mean() < (1 if form == "PNG" else 3)


def test_the_padding_is_black_and_even() -> None:
    for ours in (stored, served):
        pixels = ours(encoded(Image.new("RGB", (64, 32), "white"), "PNG"), 32, "pad")
        assert (pixels[:8] == 0).all()
        assert (pixels[8:24] == 255).all()
        assert (pixels[24:] == 0).all()


def test_a_very_long_image_is_not_blown_up() -> None:
    # Resized whole, it would have 4,096 x 40,960,000 pixels.
    data = encoded(Image.new("L", (40_000, 4), 7), "PNG")
    assert (stored(data, 1024, "crop") == 7).all()
    assert (served(data, 1024, "crop") == 7).all()


@pytest.mark.parametrize("size", [(300, 300), (640, 480), (1280, 960), (1501, 1125), (400, 700)], ids=str)
def test_a_photo_is_no_further_from_the_reference_than_tensorflow_brings_it(size: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    noise = [
        Image.fromarray(rng.integers(0, 256, (size[1] // n, size[0] // n, 3), np.uint8)).resize(size)
        for n in (2, 8, 40)
    ]
    photo = Image.blend(Image.blend(noise[2], noise[1], 0.3), noise[0], 0.15)
    data = encoded(photo, "JPEG", quality=92)
    decoded = opened(data).convert("RGB")
    at = compute_placement(size[1], size[0], (224, 224), "crop")
    square = decoded.crop((at.left, at.top, at.left + at.width, at.top + at.height))
    reference = square.resize((224, 224), Image.Resampling.LANCZOS)
    assert psnr(stored(data, 224, "crop"), reference) > psnr(served(data, 224, "crop"), reference) - 0.1
