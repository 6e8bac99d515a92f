"""One image: what its header says, and the bytes that are stored for it."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from trainer.data.manifest import Feature
from trainer.errors import SourceError

Encoded = bytes | Path

#: Shorter sides of an image, in pixels, that can be stored.
SMALLEST, LARGEST = 4, 4096

#: JPEG quality of a resized photo.
QUALITY = 90

# Pillow knows more formats, but some start other programs (EPS) and none of the rest is a photo's.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_GREY_MODES = frozenset({"1", "L", "LA"})
_COLOUR_MODES = frozenset({"P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"})


@dataclass(frozen=True)
class Header:
    """What is known of an image before it is decoded.

    Attributes:
        width: In pixels, as stored (before an EXIF rotation).
        height: In pixels, as stored.
        grey: Whether it has one channel of brightness; any alpha channel is not counted.
        encoding: "jpeg", "png", "gif", ...
    """

    width: int
    height: int
    grey: bool
    encoding: str


def read_header(image: Encoded, name: str) -> Header:
    """Reads the header of an encoded image; of a file only as much as that takes.

    Raises:
        SourceError: It is not an image, or smaller than 4 pixels, or has more pixels than Pillow's limit
            against decompression bombs, or is not of 8 bits per channel.
    """
    with _open(image, name) as opened:
        width, height, mode = *opened.size, opened.mode
        # A JPEG of a camera that holds a second picture (a preview) is of the format MPO.
        encoding = "jpeg" if opened.format == "MPO" else str(opened.format).lower()
    if min(width, height) < SMALLEST:
        raise SourceError(
            f"image {name!r} has {width} x {height} pixels; at least {SMALLEST} x {SMALLEST} are needed"
        )
    if mode not in _GREY_MODES | _COLOUR_MODES:
        raise SourceError(
            f"image {name!r} has pixels of mode {mode}; only 8 bits per channel can be used: convert it"
        )
    return Header(width, height, mode in _GREY_MODES, encoding)


def encode_pixels(pixels: npt.NDArray[np.uint8], name: str) -> bytes:
    """Returns a uint8 array of shape (height, width, 1 or 3) as PNG, which loses nothing.

    Raises:
        SourceError: The array is not of that kind.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or not pixels.size:
        raise SourceError(
            f"image {name!r} is an array of {pixels.dtype} and shape {pixels.shape}; expected uint8 and "
            "(height, width, 1 or 3)"
        )
    return _encode(Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels), "png")


def choose_feature(headers: Collection[Header], image_size: int) -> Feature:
    """Decides how the images of a dataset are stored.

    They are grey only if all of them are. With `image_size` they become squares of that size: JPEG for
    sources that were JPEG, PNG for all others, so that what was lossless stays so. Without it the encoded
    bytes pass untouched, for which all must be of one size, and JPEG or PNG.

    Args:
        headers: Every header that occurs.
        image_size: Side of the stored images in pixels, or 0.

    Raises:
        SourceError: Without `image_size`, when the images differ or are of another format.
    """
    channels = 1 if all(header.grey for header in headers) else 3
    if image_size:
        encodings = {_stored_encoding(header.encoding) for header in headers}
        return Feature("image", "uint8", (image_size, image_size, channels), _mixture(encodings), "crop")
    _refuse_differences(headers)
    first = next(iter(headers))
    encodings = {header.encoding for header in headers}
    return Feature("image", "uint8", (first.height, first.width, channels), _mixture(encodings))


def stored_bytes(image: Encoded, feature: Feature, name: str) -> bytes:
    """Returns the encoded image as the dataset stores it.

    Without resizing these are the source's own bytes. Otherwise: first frame of an animation, EXIF
    orientation applied, alpha dropped, converted to the feature's channels, resized and cropped (`fit`),
    then encoded as JPEG of quality 90 if it was JPEG and as PNG if not.

    Raises:
        SourceError: The image cannot be read or decoded.
    """
    if not feature.resize:
        return _read(image, name)
    height, width, channels = feature.shape
    with _open(image, name) as opened:
        encoding = _stored_encoding(str(opened.format).lower())
        upright = ImageOps.exif_transpose(opened).convert("L" if channels == 1 else "RGB")
        return _encode(fit(upright, width, height), encoding)


def fit(image: Image.Image, width: int, height: int) -> Image.Image:
    """Resizes so that the target is just covered (bilinear, antialiased) and crops its centre.

    This is `trainer.data.decode.decode_image` for the writing side: float32, ties to even, as there. Only
    the pixels of the crop are computed, so that a very long image does not become a huge one.
    """
    size, target = np.array(image.size), np.array([width, height])
    scale = np.max(target.astype(np.float32) / size.astype(np.float32))
    covering = np.maximum(np.rint(size.astype(np.float32) * scale).astype(int), target)
    corner = (covering - target) // 2
    box = np.concatenate([corner, corner + target]) * np.tile(size, 2) / np.tile(covering, 2)
    left, top, right, bottom = box.tolist()
    return image.resize(
        (width, height), Image.Resampling.BILINEAR, (left, top, right, bottom), reducing_gap=None
    )


@contextlib.contextmanager
def _open(image: Encoded, name: str) -> Iterator[Image.Image]:
    """Opens an image with Pillow and turns everything that is wrong with it into a `SourceError`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(
                io.BytesIO(image) if isinstance(image, bytes) else image, formats=_FORMATS
            ) as opened:
                yield opened
    except UnidentifiedImageError:
        raise SourceError(
            f"{name!r} is not an image that can be read ({', '.join(_FORMATS)}); remove or convert it"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise SourceError(
            f"image {name!r} has more than {Image.MAX_IMAGE_PIXELS:,} pixels, too many; make it smaller"
        ) from None
    except Exception as failure:  # Pillow's decoders raise OSError, SyntaxError, ValueError and more
        raise _unreadable(name, failure) from failure


def _read(image: Encoded, name: str) -> bytes:
    try:
        return image if isinstance(image, bytes) else image.read_bytes()
    except OSError as failure:
        raise _unreadable(name, failure) from failure


def _unreadable(name: str, failure: Exception) -> SourceError:
    reason = failure.strerror if isinstance(failure, OSError) and failure.strerror else failure
    return SourceError(f"image {name!r} cannot be read: {reason}; repair or remove it")


def _encode(image: Image.Image, encoding: str) -> bytes:
    buffer = io.BytesIO()
    if encoding == "jpeg":
        image.save(buffer, "JPEG", quality=QUALITY)
    else:
        image.save(buffer, "PNG")
    return buffer.getvalue()


def _stored_encoding(encoding: str) -> str:
    return "jpeg" if encoding in ("jpeg", "mpo") else "png"


def _mixture(encodings: Collection[str]) -> str:
    return next(iter(encodings)) if len(encodings) == 1 else "image"


def _refuse_differences(headers: Collection[Header]) -> None:
    others = sorted({header.encoding for header in headers} - {"jpeg", "png"})
    if others:
        raise SourceError(
            f"only JPEG and PNG can be stored as they are, found {', '.join(others)}; give image_size"
        )
    widths = sorted(header.width for header in headers)
    heights = sorted(header.height for header in headers)
    if widths[0] != widths[-1] or heights[0] != heights[-1]:
        raise SourceError(
            f"the images differ in size (width {widths[0]}..{widths[-1]}, height {heights[0]}..{heights[-1]} "
            f"pixels); give image_size, such as {min(widths[0], heights[0], 224)}"
        )
    if len({header.grey for header in headers}) > 1:
        raise SourceError(
            "some images are grey and some are coloured; give image_size to make all of one kind"
        )
