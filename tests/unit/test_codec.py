"""Images as they are stored: headers, which pass untouched, what becomes of the others, which are refused."""

from __future__ import annotations

import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageOps

from shardline.components.preprocess.images.codec import Codec, encode_pixels
from shardline.components.preprocess.images.structure import Header, read_header
from shardline.trainer.base.errors import BadRecordError
from shardline.trainer.data.examples import decode_batch, decode_image, read_orientation, turn_upright
from shardline.trainer.manifest import Feature
from tests.helpers.images import deep, encoded, opened, psnr, scene, turned, with_alpha, without


def codec(image_size: int = 0, encoding: str = "keep", mode: str = "crop", **options: Any) -> Codec:
    return Codec(
        image_size=image_size, resize_mode=mode, encoding=encoding, **{"max_pixels": 1_000_000, **options}
    )


FRAMES = [scene(), ImageOps.mirror(scene())]
PASSING = {
    "jpeg": encoded(scene(), "JPEG"),
    "progressive jpeg": encoded(scene(), "JPEG", progressive=True),
    "grey jpeg": encoded(scene().convert("L"), "JPEG"),
    "cmyk jpeg": encoded(scene().convert("CMYK"), "JPEG"),
    "cmyk jpeg not of Adobe": without(b"\xff\xee", encoded(scene().convert("CMYK"), "JPEG")),
    "jpeg of RGB components": encoded(scene(), "JPEG", keep_rgb=True),
    "upright jpeg": turned(1),
    "padded jpeg": encoded(scene(), "JPEG") + bytes(100),
    "png": encoded(scene(), "PNG"),
    "grey png": encoded(scene().convert("L"), "PNG"),
    "black and white png": encoded(scene().convert("1"), "PNG"),
    "palette png": encoded(scene().quantize(64), "PNG"),
    "palette png of 3 bits": encoded(scene().quantize(8), "PNG", bits=3),
    "palette png with transparency": encoded(scene().quantize(64), "PNG", transparency=bytes(range(64))),
    "alpha png": encoded(with_alpha("RGB"), "PNG"),
    "grey alpha png": encoded(with_alpha("L"), "PNG"),
    "transparent png": encoded(scene(), "PNG", transparency=scene().getpixel((3, 3))),
    "16-bit png": encoded(deep(), "PNG"),
    "animated png": encoded(FRAMES[0], "PNG", save_all=True, append_images=FRAMES[1:]),
}
COUNTED = {"cmyk": "cmyk", "alpha": "alpha", "transp": "alpha", "16-bit": "16 bit", "animated": "animation"}


@pytest.mark.parametrize("name", PASSING)
def test_images_stored_unchanged_are_the_same_to_tensorflow_and_to_us(name: str) -> None:
    data = PASSING[name]
    stored, kind = codec().store(data, b"x")
    assert stored is data
    grey = name.startswith(("grey", "black", "16"))
    lossless = "png" in name
    counted = tuple(each for word, each in COUNTED.items() if word in name)
    assert kind == (40, 60, 1 if grey else 3, "png" if lossless else "jpeg", counted)
    ours, _ = codec(encoding="raw").store(data, b"x")
    served = tf.io.decode_image(data, channels=3, expand_animations=False).numpy()
    # The two JPEG decoders round and interpolate differently; PNG has no such freedom.
    difference = np.abs(np.frombuffer(ours, np.uint8).reshape(served.shape).astype(int) - served)
    assert difference.mean() <= (0 if lossless else 2)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("size", [0, 32])
def test_the_exif_orientation_is_applied(form: str, orientation: int, size: int) -> None:
    stored, kind = codec(size).store(turned(orientation, form), b"x")
    upright = ImageOps.exif_transpose(opened(turned(orientation, form)))
    expected, expected_kind = codec(size, "png").store(encoded(upright, "PNG"), b"x")
    assert kind[:3] == expected_kind[:3]
    assert psnr(opened(stored), opened(expected)) > 30
    assert ("exif orientation" in kind.converted) == (orientation > 1)
    assert opened(stored).getexif().get(0x0112, 1) == 1
    assert kind.encoding == ("jpeg" if form == "JPEG" else "png")


@pytest.mark.parametrize("encoding", ["jpeg", "png", "raw"])
@pytest.mark.parametrize("size", [0, 32])
@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF"])
def test_every_image_is_stored_in_the_chosen_encoding(form: str, size: int, encoding: str) -> None:
    data = encoded(scene(), form)
    stored, kind = codec(size, encoding).store(data, b"x")
    shape = (size, size, 3) if size else (40, 60, 3)
    assert kind[:4] == (*shape, encoding)
    feature = Feature("image", "uint8", shape, encoding)
    assert decode_batch(tf.constant([stored]), feature).shape == (1, *shape)
    assert (stored is data) == (form.lower() == encoding and not size)


@pytest.mark.parametrize("mode", ["crop", "pad", "stretch"])
def test_an_image_of_the_wanted_size_and_encoding_is_not_encoded_again(mode: str) -> None:
    data = encoded(scene(32, 32), "JPEG")
    assert codec(32, mode=mode).store(data, b"x")[0] is data


def test_grey_images_stay_grey_but_for_raw() -> None:
    grey = encoded(scene().convert("L"), "PNG")
    assert codec(32).store(grey, b"x")[1].channels == 1
    raw, kind = codec(32, "raw").store(grey, b"x")
    assert (kind.channels, len(raw), kind.converted) == (3, 32 * 32 * 3, ("grey",))


def test_arrays_become_png_without_loss() -> None:
    pixels = np.asarray(scene())
    for array in (pixels, pixels[..., :1]):
        data = encode_pixels(array, "x")
        assert np.array_equal(tf.io.decode_png(data).numpy(), array)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((8, 8, 1), "float32"), ((8, 8), "uint8"), ((8, 8, 4), "uint8"), ((0, 8, 3), "uint8")],
)
def test_other_arrays_are_refused(shape: tuple[int, ...], dtype: str) -> None:
    with pytest.raises(BadRecordError, match="'x': not a uint8 array"):
        encode_pixels(np.zeros(shape, dtype), "x")


NO_IMAGE = "not an image that can be read"
JPEG, PNG = PASSING["jpeg"], PASSING["png"]


@pytest.mark.parametrize("image_size", [0, 32], ids=["kept", "resized"])
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (b"cats and dogs", NO_IMAGE),
        (b"%!PS-Adobe-3.0 EPSF", NO_IMAGE),
        (encoded(scene(), "AVIF")[:300], NO_IMAGE),
        (JPEG[:-2], "truncated image"),
        (JPEG[: len(JPEG) // 2], "truncated image"),
        (JPEG[:20], "truncated image"),  # in the header
        (PNG[:-4], "truncated image"),
        (PNG[: len(PNG) // 2], "truncated image"),
        (encoded(scene(), "GIF")[:-200], "truncated image"),
        (encoded(scene(), "BMP")[:300], "truncated image"),
        (encoded(scene(), "WEBP")[:300], "damaged image"),
        (JPEG[:2] + b"\xff\xda" + JPEG[2:], "damaged image"),  # without a frame
        (encoded(scene(3, 40), "PNG"), "fewer than 4 x 4 pixels"),
        (encoded(scene(40, 3), "JPEG"), "fewer than 4 x 4 pixels"),
        (encoded(scene(40, 3), "BMP"), "fewer than 4 x 4 pixels"),
        *((encoded(Image.new("L", (2000, 501)), form), "more than 1,0") for form in ("PNG", "JPEG", "GIF")),
        (encoded(scene(), "TIFF"), NO_IMAGE),
    ],
)
def test_what_cannot_be_used_is_named_in_fixed_words(data: bytes, reason: str, image_size: int) -> None:
    with pytest.raises(BadRecordError) as caught:
        codec(image_size).store(data, b"a/b.jpg")
    assert caught.value.name == "a/b.jpg"
    assert caught.value.reason.startswith(reason)


@pytest.mark.parametrize("form", ["BMP", "GIF", "WEBP"])
def test_other_formats_are_stored_as_png_and_not_served(form: str) -> None:
    data = encoded(scene(), form)
    stored, kind = codec().store(data, b"x")
    assert (kind.encoding, kind.converted) == ("png", (form.lower(),))
    assert psnr(opened(stored), opened(data).convert("RGB")) > 60
    with pytest.raises(tf.errors.InvalidArgumentError, match="send a JPEG or PNG"):
        decode_image(data, Feature("image", "uint8", (40, 60, 3), "png", "crop"))


@pytest.mark.parametrize("name", PASSING)
def test_a_resized_picture_is_the_same_in_training_and_in_serving(name: str) -> None:
    stored, kind = codec(32).store(PASSING[name], b"x")
    feature = Feature("image", "uint8", (32, 32, kind.channels), "png", "crop")
    trained, served = (
        decode_batch(tf.constant([stored]), feature)[0],
        decode_image(PASSING[name], feature),
    )
    # The two filters differ most in noise.
    limit = 25 if name == "black and white png" else 4
    assert np.abs(served.numpy().astype(int) - trained.numpy()).mean() < limit


def test_a_jpeg_with_bytes_between_its_segments_is_decoded_as_every_decoder_does() -> None:
    # The marker of the end is found after bytes that belong to nothing.
    untidy = JPEG[:-2] + b"\x12\x34" + JPEG[-2:]
    assert codec(32).store(untidy, b"x")[1].height == 32
    assert decode_image(untidy, Feature("image", "uint8", (32, 32, 3), "jpeg", "crop")).shape == (32, 32, 3)


@pytest.mark.parametrize(
    ("form", "size", "encoding", "reason"),
    [
        ("BMP", (1_000_001, 4), "keep", "cannot be encoded as png"),
        ("PNG", (4, 1_000_001), "keep", "cannot be encoded as png"),
        ("PNG", (70_000, 4), "jpeg", "cannot be encoded as jpeg"),
    ],
)
def test_an_image_that_its_encoding_cannot_hold_is_named(
    form: str, size: tuple[int, int], encoding: str, reason: str
) -> None:
    with pytest.raises(BadRecordError, match=f"'x': {reason}"):
        codec(encoding=encoding, max_pixels=10**8).store(encoded(Image.new("L", size), form), b"x")


LEAN = """
import sys
from shardline.components.preprocess.images.codec import Codec
codec = Codec(image_size=0, resize_mode="crop", encoding="keep", max_pixels=1_000_000)
data = sys.stdin.buffer.read()
assert codec.store(data, b"x")[0] is data
print(sorted({"PIL", "cv2", "tensorflow"} & set(sys.modules)))
"""


def test_passing_images_through_loads_no_large_library() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", LEAN], input=JPEG, capture_output=True, check=True, timeout=60
    )
    assert ran.stdout.strip() == b"[]"


#: The operations as a graph, as training and serving have them.
find_orientation = tf.function(read_orientation, input_signature=[tf.TensorSpec([], tf.string)])


def test_a_jpeg_of_another_kind_is_not_standard() -> None:
    data = bytearray(encoded(scene(), "JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 1] = 0xC9  # arithmetically coded
    assert read_header(bytes(data)) == Header("jpeg", 40, 60, 3, 1, False, False, True)
    data[frame + 1], data[frame + 4] = 0xC1, 12  # 12 bits
    assert read_header(bytes(data)) == Header("jpeg", 40, 60, 3, 1, False, False, True)


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
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
    assert header
    assert header.orientation == expected
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
def test_training_and_serving_find_the_same_orientation_in_odd_positions(
    before: bytes, expected: int
) -> None:
    form, end = ("PNG", 33) if before.startswith(b"\0") else ("JPEG", 2)
    plain = encoded(scene(), form)
    data = plain[:end] + before + plain[end:]
    header = read_header(data)
    assert header is not None
    assert (header.orientation, int(find_orientation(data))) == (expected, expected)


def test_no_broken_file_is_too_broken() -> None:
    rng = np.random.default_rng(0)
    for whole in (turned(6), turned(6, "PNG"), encoded(scene(), "JPEG")):
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
