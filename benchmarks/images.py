"""Decode, resize to 224 x 224 and encode as JPEG of quality 90: ours against tf.image and Pillow.

    python -m benchmarks.images

The inputs are photo-like and made from a seed; SHARDLINE_TEST_DATA adds its real photos. Every method cuts
the same square out of the centre. They take turns, image set by image set; the figures are CPU time of the
process, on one thread. Quality is the PSNR against Pillow's Lanczos filter applied to the same square, of the
pixels before they are encoded (for which each method is asked for PNG).
"""

from __future__ import annotations

import io
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import click
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from PIL import Image

from shardline.components.preprocess.images.codec import Codec
from shardline.trainer.manifest import compute_placement

SIDE = 224

#: Takes an encoded image and the format of the answer ("jpeg" or "png").
Method = Callable[[bytes, str], bytes]


def make_photos(sizes: Sequence[tuple[int, int]], rng: np.random.Generator) -> list[bytes]:
    """Returns JPEG images (quality 90, 4:2:0) with the spectrum of photos, of some edges and of grain.

    Args:
        sizes: (height, width) of each.
        rng: Where all that is random comes from.
    """
    return [_make_photo(int(height), int(width), rng) for height, width in sizes]


def _make_photo(height: int, width: int, rng: np.random.Generator) -> bytes:
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1
    spectrum = np.fft.rfft2(rng.normal(size=(3, height, width))) / frequency**1.2
    texture = np.fft.irfft2(spectrum, (height, width))
    pixels = 128 + 45 * (texture - texture.mean()) / texture.std()
    y, x = np.mgrid[:height, :width]
    for _ in range(12):  # discs, whose edges are as sharp as a lens makes them
        row, column, radius = rng.random(3) * (height, width, height / 5)
        inside = np.clip(radius - np.hypot(y - row, x - column) + 0.5, 0, 1)
        pixels += inside * (rng.integers(0, 256, (3, 1, 1)) - pixels)
    pixels += rng.normal(0, 2, pixels.shape)
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8).transpose(1, 2, 0))
    image.save(buffer := io.BytesIO(), "JPEG", quality=90, subsampling="4:2:0")
    return buffer.getvalue()


def shardline() -> Method:
    """Returns our own codec."""
    codecs = {
        encoding: Codec(image_size=SIDE, resize_mode="crop", encoding=encoding, max_pixels=10**9)
        for encoding in ("jpeg", "png")
    }
    return lambda data, encoding: codecs[encoding].store(data, b"")[0]


def tensorflow(*, antialias: bool, graph: bool = True) -> Method:
    """Returns tf.io and tf.image, in a tf.function or called op by op."""

    def convert(data: tf.Tensor, encoding: str) -> tf.Tensor:
        pixels = tf.io.decode_jpeg(data, channels=3)
        size = tf.shape(pixels)[:2]
        side = tf.reduce_min(size)
        top, left = tf.unstack((size - side) // 2)
        square = pixels[top : top + side, left : left + side]
        fitted = tf.image.resize(square, (SIDE, SIDE), antialias=antialias)
        stored = tf.cast(tf.clip_by_value(tf.round(fitted), 0, 255), tf.uint8)
        return tf.io.encode_jpeg(stored, quality=90) if encoding == "jpeg" else tf.io.encode_png(stored)

    compiled: Any = tf.function(convert, autograph=False) if graph else convert
    return lambda data, encoding: bytes(compiled(tf.constant(data), encoding).numpy())


def pillow(*, draft: bool) -> Method:
    """Returns Pillow; with `draft`, its own use of a JPEG decoder that shrinks."""

    def convert(data: bytes, encoding: str) -> bytes:
        with Image.open(io.BytesIO(data)) as image:
            if draft:
                image.draft("RGB", (SIDE, SIDE))
            square = _square(image.convert("RGB")).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        square.save(buffer := io.BytesIO(), encoding, **({"quality": 90} if encoding == "jpeg" else {}))
        return buffer.getvalue()

    return convert


METHODS: dict[str, Callable[[], Method]] = {
    "Shardline": shardline,
    "tf.image, op by op": lambda: tensorflow(antialias=False, graph=False),
    "tf.image in a tf.function": lambda: tensorflow(antialias=False),
    "tf.image, antialiased, op by op": lambda: tensorflow(antialias=True, graph=False),
    "tf.image, antialiased, in a tf.function": lambda: tensorflow(antialias=True),
    "Pillow bilinear (antialiased)": lambda: pillow(draft=False),
    "Pillow bilinear + draft": lambda: pillow(draft=True),
}


def measure(photos: Sequence[bytes], rounds: int) -> dict[str, tuple[list[float], float]]:
    """Returns, by method, the images per second of CPU time in each round, and the mean PSNR in dB."""
    methods = {name: make() for name, make in METHODS.items()}
    speeds: dict[str, list[float]] = {name: [] for name in methods}
    references = [_reference(data) for data in photos]
    quality = {}
    for name, method in methods.items():  # also warms up
        method(photos[0], "jpeg")
        fitted = [_pixels(method(data, "png")) for data in photos]
        quality[name] = statistics.mean(map(_psnr, fitted, references))
    for _ in range(rounds):
        for name, method in methods.items():
            start = time.process_time()
            for data in photos:
                method(data, "jpeg")
            speeds[name].append(len(photos) / (time.process_time() - start))
    return {name: (speeds[name], quality[name]) for name in methods}


def _square(image: Image.Image) -> Image.Image:
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def _reference(data: bytes) -> npt.NDArray[np.uint8]:
    with Image.open(io.BytesIO(data)) as image:
        at = compute_placement(image.height, image.width, (SIDE, SIDE), "crop")
        square = image.convert("RGB").crop((at.left, at.top, at.left + at.width, at.top + at.height))
    return np.asarray(square.resize((SIDE, SIDE), Image.Resampling.LANCZOS))


def _pixels(data: bytes) -> npt.NDArray[np.uint8]:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def _psnr(ours: npt.NDArray[np.uint8], reference: npt.NDArray[np.uint8]) -> float:
    return float(10 * np.log10(255**2 / np.mean((ours.astype(float) - reference) ** 2)))


def _print(title: str, photos: Sequence[bytes], rounds: int) -> None:
    size = statistics.mean(map(len, photos)) / 1000
    print(f"\n{title}: {len(photos)} images, {size:.0f} kB on average, {rounds} rounds\n")
    print(
        "| method | images/s of CPU, median (range) | Shardline is faster by | PSNR dB |\n|---|---|---|---|"
    )
    found = measure(photos, rounds)
    ours = found["Shardline"][0]
    for name, (speeds, quality) in found.items():
        # Of the ratios of each round, in which both met the same machine.
        ratio = statistics.median(a / b for a, b in zip(ours, speeds, strict=True))
        middle, low, high = statistics.median(speeds), min(speeds), max(speeds)
        print(f"| {name} | {middle:,.0f} ({low:,.0f}-{high:,.0f}) | {ratio:.2f} | {quality:.1f} |")


@click.command()
@click.option("--rounds", default=9, show_default=True, help="How often every method is measured.")
def main(rounds: int) -> None:
    """Prints a table for each kind of input."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    packages = ("simplejpeg", "opencv-python-headless", "pillow", "tensorflow", "numpy")
    print(f"Python {platform.python_version()}, " + ", ".join(f"{name} {version(name)}" for name in packages))
    rng = np.random.default_rng(0)
    _print("270-330 px", make_photos(rng.integers(270, 331, (40, 2)).tolist(), rng), rounds)
    _print("1280 x 960 px", make_photos([(960, 1280)] * 10, rng), rounds)
    if directory := os.environ.get("SHARDLINE_TEST_DATA"):
        photos = [path.read_bytes() for path in sorted((Path(directory) / "photos").rglob("*.jpg"))]
        _print("real photos, mostly 500 x 375 px", photos, rounds)


if __name__ == "__main__":
    main()
