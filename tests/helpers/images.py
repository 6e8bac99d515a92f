"""Images in all the forms that people have them in."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

ORIENTATION = 0x0112


def scene(width: int = 60, height: int = 40) -> Image.Image:
    """Returns smooth waves with a bright upper left quarter: detail, colour, and a way to be upright."""
    y, x = np.mgrid[0:height, 0:width]
    waves = np.stack([np.sin(x / 5), np.cos(y / 7), np.sin((x + y) / 9)], axis=-1)
    pixels = 100 + 60 * waves
    pixels[: height // 2, : width // 2] += 90
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(image: Image.Image, encoding: str, **options: Any) -> bytes:
    """Returns the image as a file of one of Pillow's formats."""
    buffer = io.BytesIO()
    image.save(buffer, encoding, **options)
    return buffer.getvalue()


def turned(orientation: int, encoding: str = "JPEG", image: Image.Image | None = None) -> bytes:
    """Returns a file that states an EXIF orientation, after other entries as a camera writes them."""
    exif = Image.Exif()
    exif[0x010F], exif[ORIENTATION], exif[0x8298] = "maker", orientation, "owner"
    return encoded(image or scene(), encoding, exif=exif)


def with_alpha(mode: str = "RGB") -> Image.Image:
    """Returns a picture of mode RGBA or LA, more and more transparent from top to bottom."""
    image = scene().convert(mode)
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def deep() -> Image.Image:
    """Returns a grey picture of 16 bits, whose low byte is no copy of the high one."""
    return Image.fromarray(np.asarray(scene().convert("L")).astype(np.uint16) * 256 + 200)


def without(marker: bytes, data: bytes) -> bytes:
    """Returns a JPEG without its first segment of a kind."""
    start = data.index(marker)
    return data[:start] + data[start + 2 + int.from_bytes(data[start + 2 : start + 4]) :]


def opened(data: bytes) -> Image.Image:
    """Opens an encoded image."""
    return Image.open(io.BytesIO(data))


def psnr(ours: Any, reference: Any) -> float:
    """Returns the peak signal-to-noise ratio of two uint8 images in dB."""
    error = np.mean((np.asarray(ours, float) - np.asarray(reference, float)) ** 2)
    return float(10 * np.log10(255**2 / error)) if error else float("inf")
