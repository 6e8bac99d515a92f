"""Images: headers, formats, modes, sizes, and the geometry that serving repeats."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from components.preprocess.image import (
    Encoded,
    Header,
    choose_feature,
    encode_pixels,
    fit,
    read_header,
    stored_bytes,
)
from trainer.data.decode import decode_image
from trainer.data.manifest import Feature
from trainer.errors import SourceError

GREY_32 = Feature("image", "uint8", (32, 32, 1), "png", "crop")
RGB_32 = Feature("image", "uint8", (32, 32, 3), "jpeg", "crop")


def scene(width: int = 60, height: int = 40) -> Image.Image:
    """Smooth waves with a bright upper left quarter: has detail, colour and an orientation."""
    y, x = np.mgrid[0:height, 0:width]
    waves = np.stack([np.sin(x / 5), np.cos(y / 7), np.sin((x + y) / 9)], axis=-1)
    pixels = 100 + 60 * waves
    pixels[: height // 2, : width // 2] += 90
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(image: Image.Image, encoding: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, encoding, **options)
    return buffer.getvalue()


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize(
    ("mode", "encoding", "grey"),
    [
        ("RGB", "JPEG", False),
        ("L", "JPEG", True),
        ("CMYK", "JPEG", False),
        ("RGB", "PNG", False),
        ("RGBA", "PNG", False),
        ("P", "PNG", False),
        ("L", "PNG", True),
        ("LA", "PNG", True),
        ("1", "PNG", True),
    ],
)
def test_every_mode_is_stored_as_it_is_and_means_the_same_to_tensorflow(
    mode: str, encoding: str, grey: bool
) -> None:
    data = encoded(scene().convert(mode), encoding)
    header = read_header(data, "x")
    assert header == Header(60, 40, grey, encoding.lower())
    feature = choose_feature([header], 0)
    assert feature == Feature("image", "uint8", (40, 60, 1 if grey else 3), encoding.lower())
    assert stored_bytes(data, feature, "x") == data
    ours = np.asarray(opened(data).convert("L" if grey else "RGB"), int).reshape(feature.shape)
    # The two JPEG decoders round and interpolate differently; PNG has no such freedom.
    assert np.abs(decode_image(data, feature).numpy() - ours).mean() <= (2 if encoding == "JPEG" else 0)


@pytest.mark.parametrize("encoding", ["BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"])
@pytest.mark.parametrize("feature", [GREY_32, RGB_32], ids=["grey", "colour"])
def test_resized_photos_stay_jpeg_and_the_rest_becomes_png(encoding: str, feature: Feature) -> None:
    stored = opened(stored_bytes(encoded(scene(), encoding), feature, "x"))
    assert stored.size == (32, 32)
    assert stored.mode == ("L" if feature.shape[2] == 1 else "RGB")
    assert stored.format == ("JPEG" if encoding == "JPEG" else "PNG")


def test_of_an_animation_the_first_frame_is_taken() -> None:
    frames = [Image.new("RGB", (40, 40), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert opened(stored_bytes(data, RGB_32, "x")).getpixel((16, 16)) == (255, 0, 0)


def test_the_exif_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it rotated by 90 degrees clockwise
    turned = stored_bytes(encoded(scene(), "PNG", exif=exif), RGB_32, "x")
    upright = stored_bytes(encoded(scene().transpose(Image.Transpose.ROTATE_270), "PNG"), RGB_32, "x")
    assert turned == upright


@pytest.mark.parametrize("target", [(96, 96), (31, 31), (17, 90), (200, 200)], ids=str)
@pytest.mark.parametrize("size", [(320, 213), (213, 320), (97, 96), (64, 64), (500, 11)], ids=str)
def test_resizing_agrees_with_serving(size: tuple[int, int], target: tuple[int, int]) -> None:
    source = scene(*size)
    height, width = target
    ours = np.asarray(fit(source, width, height), int)
    feature = Feature("image", "uint8", (height, width, 3), "png", "crop")
    serving = decode_image(encoded(source, "PNG"), feature).numpy().astype(int)
    difference = np.abs(ours - serving)
    # Pillow rounds after each of its two passes, TensorFlow once.
    assert difference.max() <= 1
    assert difference.mean() < 0.25


def test_a_very_long_image_is_cropped_without_being_blown_up() -> None:
    # Resized whole, it would have 4,096 x 40,960,000 pixels.
    assert fit(Image.new("L", (40_000, 4)), 4096, 4096).size == (4096, 4096)


def test_an_array_becomes_a_png_without_loss() -> None:
    pixels = np.asarray(scene())
    assert np.array_equal(np.asarray(opened(encode_pixels(pixels, "x"))), pixels)
    grey = opened(encode_pixels(pixels[..., :1], "x"))
    assert grey.mode == "L"
    assert np.array_equal(np.asarray(grey), pixels[..., 0])


@pytest.mark.parametrize(
    "pixels",
    [
        pytest.param(np.zeros((8, 8, 1), np.float32), id="float"),
        pytest.param(np.zeros((8, 8), np.uint8), id="no channels"),
        pytest.param(np.zeros((8, 8, 4), np.uint8), id="alpha"),
        pytest.param(np.zeros((0, 8, 3), np.uint8), id="empty"),
    ],
)
def test_other_arrays_are_refused(pixels: Any) -> None:
    with pytest.raises(
        SourceError, match=r"image 'x' is an array of .* expected uint8 and \(height, width, 1 or 3\)"
    ):
        encode_pixels(pixels, "x")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "'x' is not an image that can be read", id="zero bytes"),
        pytest.param(b"cats and dogs", "'x' is not an image that can be read", id="text"),
        pytest.param(
            encoded(scene(), "JPEG")[:20], "'x' is not an image that can be read", id="cut in the header"
        ),
        pytest.param(encoded(scene(3, 40), "PNG"), "'x' has 3 x 40 pixels; at least 4 x 4", id="too small"),
        pytest.param(
            encoded(Image.new("I;16", (8, 8)), "PNG"), "mode I;16; only 8 bits per channel", id="16 bits"
        ),
        pytest.param(Path("/nowhere/x.jpg"), "'x' cannot be read: No such file or directory", id="no file"),
        pytest.param(Path(os.sep), "'x' cannot be read: Is a directory", id="a directory"),
    ],
)
def test_what_is_not_a_usable_image(data: Encoded, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        read_header(data, "x")


@pytest.mark.parametrize("pixels", [5_000, 2_000], ids=["over the limit", "over twice the limit"])
def test_decompression_bombs_are_refused(monkeypatch: pytest.MonkeyPatch, pixels: int) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50 * 50 if pixels == 5_000 else 1_000)
    with pytest.raises(SourceError, match=r"'x' has more than .* pixels, too many"):
        read_header(encoded(Image.new("L", (50, pixels // 50)), "PNG"), "x")


def test_a_truncated_image_is_named_when_it_is_decoded() -> None:
    data = encoded(scene(), "JPEG")
    with pytest.raises(SourceError, match=r"image 'x' cannot be read: .*[Tt]runcated"):
        stored_bytes(data[: len(data) // 2], RGB_32, "x")


def test_grey_only_if_every_image_is_grey() -> None:
    grey, colour = Header(40, 40, True, "png"), Header(50, 40, False, "jpeg")
    assert choose_feature([grey], 32).shape == (32, 32, 1)
    assert choose_feature([grey, colour], 32).shape == (32, 32, 3)


def test_a_mixture_of_encodings_is_called_image() -> None:
    headers = [Header(40, 40, False, "png"), Header(40, 40, False, "jpeg")]
    assert choose_feature(headers, 0).encoding == choose_feature(headers, 32).encoding == "image"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        pytest.param(
            Header(640, 480, False, "jpeg"),
            r"differ in size \(width 320..640, height 480..480 pixels\); give image_size, such as 224",
            id="size",
        ),
        pytest.param(
            Header(320, 480, True, "jpeg"), "some images are grey and some are coloured", id="channels"
        ),
        pytest.param(
            Header(320, 480, False, "webp"),
            "only JPEG and PNG can be stored as they are, found webp",
            id="format",
        ),
    ],
)
def test_images_that_differ_need_an_image_size(other: Header, message: str) -> None:
    headers = [Header(320, 480, False, "jpeg"), other]
    with pytest.raises(SourceError, match=message):
        choose_feature(headers, 0)
    assert choose_feature(headers, 96).resize == "crop"


def test_stored_images_are_what_the_feature_says() -> None:
    assert tf.io.decode_image(stored_bytes(encoded(scene(), "JPEG"), RGB_32, "x")).shape == RGB_32.shape
