"""An image in one of the rarer formats or kinds, read by Pillow."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from shardline.components.preprocess.images.header import DAMAGED, JPEG_START, PNG_START, TRUNCATED
from shardline.components.preprocess.images.pixels import Pixels, UnreadableError, turn_upright
from shardline.trainer.errors import ShardlineError

# Pillow knows more formats, but some start other programs (EPS) and none of the rest is a photo's.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

# Formats that people have and we do not read: first bytes, at which place, name.
_OTHERS = (
    (b"ftypheic", 4, "HEIC"),
    (b"ftypmif1", 4, "HEIC"),
    (b"ftypavif", 4, "AVIF"),
    (b"\xff\x0a", 0, "JPEG XL"),
    (b"\0\0\0\x0cJXL ", 0, "JPEG XL"),
    (b"\0\0\0\x0cjP  ", 0, "JPEG 2000"),
    (b"8BPS", 0, "PSD"),
    (b"%PDF", 0, "PDF"),
    (b"%!PS", 0, "PostScript"),
    (b"<svg", 0, "SVG"),
)

_GREY_MODES = frozenset({"1", "L", "LA", "I", "I;16", "I;16B", "I;16L"})
_COLOUR_MODES = frozenset({"P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"})
_KINDS = {
    "P": "palette",
    "PA": "palette",
    "LA": "alpha",
    "RGBA": "alpha",
    "CMYK": "cmyk",
    "I": "16 bit",
    "I;16": "16 bit",
    "I;16B": "16 bit",
    "I;16L": "16 bit",
}


class Picture:
    """An image that Pillow has opened: its header is read, its pixels are not.

    Attributes:
        height: In pixels; upright after `load`.
        width: Likewise.
        kinds: What it is beside plain 8-bit grey or RGB: "palette", "alpha", "cmyk", "16 bit", "animation",
            "exif orientation", and its format unless that is JPEG or PNG.
    """

    def __init__(self, opened: Image.Image) -> None:
        self._opened = opened
        self.width, self.height = opened.size
        # A JPEG of a camera that holds a second picture (a preview) is of the format MPO.
        form = "jpeg" if opened.format == "MPO" else str(opened.format).lower()
        animated = form != "jpeg" and getattr(opened, "is_animated", False)
        kinds = (
            "" if form in ("jpeg", "png") else form,
            _KINDS.get(opened.mode),
            "animation" if animated else "",
            "exif orientation" if self._orientation() > 1 else "",
        )
        self.kinds = tuple(kind for kind in kinds if kind)

    def load(self) -> None:
        """Reads the pixels of the first frame."""
        self._opened.load()  # turns a TIFF upright, and no other format
        width, height = self._opened.size
        self.height, self.width = (height, width) if self._orientation() < 5 else (width, height)

    def to_pixels(self, reduction: int) -> Pixels:
        """Returns the first frame upright and shrunk, as uint8 (height, width, 1 or 3); alpha is dropped."""
        image = self._to_8_bits()
        if reduction > 1:
            image = image.reduce(reduction)
        pixels = np.asarray(image, np.uint8)
        return turn_upright(pixels if pixels.ndim == 3 else pixels[..., None], self._orientation())

    def _orientation(self) -> int:
        orientation = self._opened.getexif().get(ExifTags.Base.Orientation, 1)
        return int(orientation) if orientation in range(1, 9) else 1

    def _to_8_bits(self) -> Image.Image:
        """Returns the first frame in mode L or RGB."""
        image, mode = self._opened, self._opened.mode
        # Some releases of Pillow open 16 bits of grey as 32, of which a TIFF may use all.
        if mode not in _GREY_MODES | _COLOUR_MODES or (mode == "I" and image.format == "TIFF"):
            raise UnreadableError(f"pixels of more than 16 bits or of an unknown kind (mode {mode})")
        if _KINDS.get(mode) == "16 bit":
            # The high byte, as TensorFlow takes it; Pillow would clip.
            return Image.fromarray(np.clip(np.asarray(image) // 256, 0, 255).astype(np.uint8))
        if mode in ("P", "PA"):  # by way of RGBA, as the transparent colours of a palette are still colours
            return image.convert("RGBA").convert("RGB")
        wanted = "L" if mode in _GREY_MODES else "RGB"
        return image if mode == wanted else image.convert(wanted)  # which would copy


@contextmanager
def opened_picture(encoded: bytes) -> Iterator[Picture]:
    """Opens an image of any of `FORMATS`.

    Raises:
        UnreadableError: It is none, or its pixels cannot be decoded.
    """
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # the codec has a limit of its own
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as opened:
            yield Picture(opened)
    except (UnreadableError, ShardlineError):
        raise
    except UnidentifiedImageError:
        raise UnreadableError(_unidentified(encoded)) from None
    except Exception as failure:  # Pillow's decoders raise OSError, SyntaxError, ValueError and more
        truncated = "truncated" in str(failure).lower() or isinstance(failure, EOFError)
        raise UnreadableError(TRUNCATED if truncated else DAMAGED) from failure
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def _unidentified(data: bytes) -> str:
    if data.startswith((JPEG_START, PNG_START)):
        return DAMAGED
    for start, place, name in _OTHERS:
        if data.startswith(start, place):
            return f"unsupported image format ({name})"
    return f"not an image that can be read ({', '.join(FORMATS)})"
