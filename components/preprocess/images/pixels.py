"""Pixels of an image: decoded, turned upright, fitted and encoded, on one core.

libjpeg-turbo (simplejpeg) reads and writes JPEG, OpenCV resizes and writes PNG, Pillow reads the rarer
formats and kinds as the exported model does (`trainer.data.examples`). Loading them takes 50 MB: only where
pixels are needed.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import AvifImagePlugin, Image, ImageChops, UnidentifiedImageError

from shardline.components.preprocess.images.jpeg import decode_jpeg
from shardline.components.preprocess.images.structure import DAMAGED, TRUNCATED, Header, UnreadableError
from shardline.trainer.manifest import Placement, compute_placement

Pixels = npt.NDArray[np.uint8]

#: JPEG quality of a resized photo, and of one that is only turned upright.
QUALITY, TURNED_QUALITY = 90, 95

# Shards are written by one process per core.
cv2.setNumThreads(1)
AvifImagePlugin.DEFAULT_MAX_THREADS = 1

# A blur below this costs a sixth of the time and gains nothing: without it, images that shrink by less than
# 1.4 are as close to Lanczos as with it, or closer by up to 0.7 dB.
_LEAST_VARIANCE = 0.16

# Pillow reads more formats, but some start other programs (EPS) and none of the rest is used for photos.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "WEBP")

_CONVERT = "convert it to JPEG or PNG"
_UNKNOWN = f"not an image that can be read ({', '.join(FORMATS)}); {_CONVERT}"
_UNUSUAL = f"an unusual kind of image (JPEG of 12 bits, of 2 components or lossless); {_CONVERT}"

# Some releases of Pillow open 16 bits of grey as 32.
_16_BIT_MODES = ("I", "I;16", "I;16B", "I;16L")
_GREY_MODES = frozenset({"1", "L", "LA", *_16_BIT_MODES})
_ORIENTATION_TAG = 0x0112


def convert(
    encoded: bytes,
    header: Header | None,
    size: int,
    mode: str,
    encoding: str,
    check_size: Callable[[int, int], None],
) -> tuple[bytes, int, int, int, str, tuple[str, ...]]:
    """Decodes an image, turns it upright, fits and encodes it as a `Codec` is to store it.

    Returns the data and the values of a `Kind`; UnreadableError if the image cannot be used.
    """

    def place(height: int, width: int) -> Placement | None:
        return compute_placement(height, width, (size, size), mode) if size else None

    jpeg = header is not None and header.encoding == "jpeg"
    if header and header.plain:  # with the fast decoder, no larger than needed
        orientation, kinds = header.orientation, ("exif orientation",) * (header.orientation > 1)
        sides = (header.height, header.width)
        placed = place(*(sides if orientation < 5 else sides[::-1]))
        pixels = decode_jpeg(encoded, sides, header.channels, placed.reduction if placed else 1)
    else:
        with opened_picture(encoded, header) as picture:
            check_size(*picture.size)
            picture.load()
            placed, kinds, orientation = place(*picture.size), picture.kinds, picture.orientation
            pixels = picture.to_pixels(placed.reduction if placed else 1)
    pixels = turn_upright(pixels, orientation)
    if encoding == "keep":
        encoding = "jpeg" if jpeg else "png"
    if placed:
        pixels = fit(pixels, placed, (size, size))
    if encoding == "raw" and pixels.shape[2] == 1:
        kinds += ("grey",)
        pixels = pixels.repeat(3, axis=2)
    data = encode(pixels, encoding, quality=QUALITY if placed or not jpeg else TURNED_QUALITY)
    height, width, channels = pixels.shape
    return data, height, width, channels, encoding, kinds


class SourceImage:
    """An image opened by Pillow: its header is read, its pixels are not.

    Attributes:
        orientation: EXIF's 1..8, not yet applied by `to_pixels`.
        size: Height and width in pixels, upright.
        kinds: What is lost or converted, as in a `Kind`.
    """

    def __init__(self, opened: Any, header: Header | None) -> None:
        self._opened, mode = opened, opened.mode
        # A camera's JPEG with a second picture (a preview) has the format MPO.
        form = "jpeg" if opened.format == "MPO" else str(opened.format).lower()
        # `getexif` of Pillow would believe the XMP data of a JPEG as well.
        found = header.orientation if header else opened.getexif().get(_ORIENTATION_TAG)
        self.orientation = found if found in range(1, 9) else 1
        self.size = opened.size[::-1] if self.orientation < 5 else opened.size
        kinds = {
            form: form not in ("jpeg", "png"),
            "cmyk": mode == "CMYK",
            "16 bit": mode in _16_BIT_MODES,
            "alpha": mode in ("LA", "PA", "RGBA") or "transparency" in opened.info,
            "animation": form != "jpeg" and getattr(opened, "is_animated", False),
            **dict.fromkeys(header.kinds if header else (), True),
            "exif orientation": self.orientation > 1,
        }
        self.kinds = tuple(kind for kind, is_there in kinds.items() if is_there)

    def load(self) -> None:
        """Reads the pixels of the first frame."""
        self._opened.load()

    def to_pixels(self, reduction: int) -> npt.NDArray[np.uint8]:
        """Returns the first frame, not yet turned, shrunk, as (height, width, 1 or 3); alpha is dropped."""
        image: Image.Image = self._opened
        mode, wanted = image.mode, "L" if image.mode in _GREY_MODES else "RGB"
        if mode in _16_BIT_MODES:
            # The highest 8 bits, as in TensorFlow; Pillow would clip.
            image = Image.fromarray(np.clip(np.asarray(image) >> 8, 0, 255).astype(np.uint8))
        elif mode in ("P", "PA"):  # through RGBA, as transparent colours of a palette are still colours
            image = image.convert("RGBA")
        elif mode == "CMYK" and image.format in ("JPEG", "MPO") and "adobe" not in image.info:
            image = ImageChops.invert(image)  # Adobe's are inverted, and Pillow takes all for Adobe's
        image = image if image.mode == wanted else image.convert(wanted)  # which would copy
        pixels = np.asarray(image.reduce(reduction) if reduction > 1 else image, np.uint8)
        return pixels if pixels.ndim == 3 else pixels[..., None]


@contextmanager
def opened_picture(encoded: bytes, header: Header | None) -> Iterator[SourceImage]:
    """Opens an image of any of `FORMATS`; UnreadableError if it cannot be used."""
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # the codec has a limit of its own
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as opened:
            yield SourceImage(opened, header)
    except UnreadableError:
        raise
    except Exception as failure:  # Pillow's decoders raise OSError, SyntaxError, ValueError and more
        is_cut = "truncated" in str(failure).lower() or isinstance(failure, EOFError)
        reason = TRUNCATED if is_cut else DAMAGED
        if header and header.height and not header.standard:
            reason = _UNUSUAL
        elif isinstance(failure, UnidentifiedImageError) and header is None:
            reason = _UNKNOWN
        raise UnreadableError(reason) from failure
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def turn_upright(pixels: Pixels, orientation: int) -> Pixels:
    """Applies an EXIF orientation (1..8) to an array (height, width, channels)."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def fit(pixels: Pixels, place: Placement, target: tuple[int, int]) -> Pixels:
    """Resizes the placed part of an upright image, with antialiasing, and pads it with black.

    The image is already shrunk by the placement's reduction. The variance of the whole filter is that of the
    triangle which `tf.image.resize` uses, in a fifth of its time: a box that shrinks by the reduction, a
    Gaussian for the rest, and bilinear interpolation. (A triangle over r pixels has r**2 / 6, a box
    (r**2 - 1) / 12.)
    """
    step = place.reduction
    top, left = place.top // step, place.left // step
    part = pixels[top : top + place.height // step, left : left + place.width // step]
    # Variances of the Gaussian before interpolation.
    variances = (
        ((source / fitted) ** 2 - 1) / 6 - (1 - step**-2) / 12
        for source, fitted in zip(part.shape, (place.fitted_height, place.fitted_width), strict=False)
    )
    sigma_y, sigma_x = (math.sqrt(variance) if variance >= _LEAST_VARIANCE else 0.0 for variance in variances)
    if sigma_x or sigma_y:
        kernel = tuple(2 * math.ceil(2 * sigma) + 1 if sigma >= 0.9 else 3 for sigma in (sigma_x, sigma_y))
        blurred = cv2.GaussianBlur(part, kernel, max(sigma_x, 0.01), sigmaY=max(sigma_y, 0.01))
        part = np.asarray(blurred, np.uint8).reshape(part.shape)
    size = (place.fitted_height, place.fitted_width)
    if part.shape[:2] != size:
        resized = cv2.resize(part, size[::-1], interpolation=cv2.INTER_LINEAR)
        part = np.asarray(resized, np.uint8).reshape(*size, -1)  # OpenCV drops a single channel
    if part.shape[:2] == target:
        return part
    padded = np.zeros((*target, part.shape[2]), np.uint8)
    padded[
        place.pad_top : place.pad_top + place.fitted_height,
        place.pad_left : place.pad_left + place.fitted_width,
    ] = part
    return padded


def encode(pixels: Pixels, encoding: str, *, quality: int = QUALITY) -> bytes:
    """Encodes uint8 (height, width, 1 or 3) as "jpeg", "png" or "raw" (the values row by row).

    A JPEG of quality 90 or less has half the resolution in colour, as photos have; above that, the whole.
    Raises UnreadableError if the library fails, as for a side that is longer than the encoding allows.
    """
    pixels = np.ascontiguousarray(pixels)
    grey = pixels.shape[2] == 1
    if encoding == "raw":
        return pixels.tobytes()
    space, sampling = ("GRAY", "Gray") if grey else ("RGB", "420" if quality <= 90 else "444")
    try:
        if encoding == "jpeg":
            options = {"quality": quality, "colorspace": space, "colorsubsampling": sampling}
            return bytes(simplejpeg.encode_jpeg(pixels, **options))
        done, data = cv2.imencode(".png", pixels if grey else cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR))
    except (cv2.error, ValueError):
        done = False
    if not done:
        raise UnreadableError(f"cannot be encoded as {encoding}")
    return data.tobytes()
