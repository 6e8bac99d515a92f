"""Pictures of the rarer formats and kinds, which Pillow reads: to 8 bits of grey or RGB, or refused.

What the exported model reads too (`trainer.data.decode`) becomes the same pixels here.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import AvifImagePlugin, Image, ImageChops, UnidentifiedImageError

from shardline.components.preprocess.images.structure import (
    DAMAGED,
    JPEG_START,
    PNG_START,
    TRUNCATED,
    Header,
    UnreadableError,
    read_orientation,
)

# Shards are written by one process per core.
AvifImagePlugin.DEFAULT_MAX_THREADS = 1

# Pillow knows more formats, but some start other programs (EPS) and none of the rest is a photo's.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_HEIF = "HEIF"

_CONVERT = "convert it to JPEG or PNG"
_UNKNOWN = (
    f"not an image that can be read ({', '.join(FORMATS)}; HEIC with pip install pillow-heif); {_CONVERT}"
)
_UNUSUAL = (
    "an unusual kind of image (JPEG of 12 bits, of 2 components or lossless; TIFF that is a preview, or of "
    f"more than 16 bits; GIF whose first frame leaves a part free); {_CONVERT}"
)

_16_BIT_MODES = ("I", "I;16", "I;16B", "I;16L")
_GREY_MODES = frozenset({"1", "L", "LA", *_16_BIT_MODES})
_COLOUR_MODES = frozenset({"P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"})
_KINDS = {"P": "palette", "PA": "palette", "CMYK": "cmyk"}

# Tags of TIFF 6.0, and one of DNG 1.7.
_SUBFILE, _BITS, _PHOTOMETRIC, _ORIENTATION, _DNG = 254, 258, 262, 274, 50706
_IS_PREVIEW, _WHITE_IS_ZERO = 1, 0


class Picture:
    """An image that Pillow has opened: its header is read, its pixels are not.

    Attributes:
        orientation: EXIF's 1..8, which is still to be applied to `to_pixels`.
        kinds: Properties beside plain 8-bit grey or RGB: "palette", "alpha", "cmyk", "16 bit", "animation"
            (or further pages), "exif orientation", and its format unless that is JPEG or PNG.
    """

    def __init__(self, opened: Any, header: Header | None) -> None:
        self._opened = opened
        # A JPEG of a camera that holds a second picture (a preview) is of the format MPO.
        form = "jpeg" if opened.format == "MPO" else str(opened.format).lower()
        self._tags: Any = opened.tag_v2 if form == "tiff" else {}
        is_partial = form == "gif" and opened.tile and opened.tile[0].extents != (0, 0, *opened.size)
        if _DNG in self._tags or self._tags.get(_SUBFILE, 0) & _IS_PREVIEW or is_partial:
            raise UnreadableError(_UNUSUAL)  # its first frame is not the picture
        self._bits = max(self._tags.get(_BITS, (16 if opened.mode in _16_BIT_MODES else 8,)))
        # `getexif` of Pillow would believe XMP data as well. It turns a TIFF upright, and no other format.
        exif = read_orientation(opened.info.get("exif") or b"")
        self.orientation = header.orientation if header else 1 if self._tags else exif
        is_transparent = opened.mode in ("LA", "PA", "RGBA") or "transparency" in opened.info
        kinds = (
            "" if form in ("jpeg", "png") else form,
            _KINDS.get(opened.mode, ""),
            "16 bit" if self._bits > 8 else "",
            "alpha" if is_transparent else "",
            "animation" if form != "jpeg" and getattr(opened, "is_animated", False) else "",
            *(header.kinds if header else ()),
            "exif orientation" if (self._tags.get(_ORIENTATION) or self.orientation) in range(2, 9) else "",
        )
        self.kinds = tuple(dict.fromkeys(kind for kind in kinds if kind))

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels, upright after `load`."""
        width, height = self._opened.size
        return (height, width) if self.orientation < 5 else (width, height)

    def load(self) -> None:
        """Reads the pixels of the first frame."""
        self._opened.load()

    def to_pixels(self, reduction: int) -> npt.NDArray[np.uint8]:
        """Returns the first frame as stored and shrunk, (height, width, 1 or 3); alpha is dropped."""
        image = self._to_8_bits()
        pixels = np.asarray(image.reduce(reduction) if reduction > 1 else image, np.uint8)
        return pixels if pixels.ndim == 3 else pixels[..., None]

    def _to_8_bits(self) -> Image.Image:
        """Returns the first frame in mode L or RGB."""
        image: Image.Image = self._opened
        mode = image.mode
        # Some releases of Pillow open 16 bits of grey as 32, of which a TIFF may use all.
        if mode not in _GREY_MODES | _COLOUR_MODES or (mode == "I" and image.format == "TIFF"):
            raise UnreadableError(_UNUSUAL)
        if mode in _16_BIT_MODES:
            # The highest 8 bits, as TensorFlow takes them; Pillow would clip.
            high = np.clip(np.asarray(image) >> (self._bits - 8), 0, 255).astype(np.uint8)
            return Image.fromarray(~high if self._tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO else high)
        if image.format == "GIF":  # TensorFlow makes black what is transparent
            colours = image.convert("RGBA")
            return Image.composite(colours, Image.new("RGBA", image.size), colours.getchannel("A")).convert(
                "RGB"
            )
        if mode in ("P", "PA"):  # by way of RGBA, as the transparent colours of a palette are still colours
            return image.convert("RGBA").convert("RGB")
        if mode == "CMYK" and image.format in ("JPEG", "MPO") and "adobe" not in image.info:
            image = ImageChops.invert(image)  # Adobe's are inverted, and Pillow takes all for Adobe's
        wanted = "L" if mode in _GREY_MODES else "RGB"
        return image if mode == wanted else image.convert(wanted)  # which would copy


@contextmanager
def opened_picture(encoded: bytes, header: Header | None) -> Iterator[Picture]:
    """Opens an image of any of `FORMATS`, or HEIC where pillow-heif is installed.

    Args:
        encoded: The file.
        header: What `read_header` has found in it.

    Raises:
        UnreadableError: It is none of these, or it cannot be decoded.
    """
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # the codec has a limit of its own
    formats = (*FORMATS, _HEIF) if encoded.startswith(b"ftyp", 4) and _reads_heic() else FORMATS
    try:
        with Image.open(io.BytesIO(encoded), formats=formats) as opened:
            yield Picture(opened, header)
    except UnreadableError:
        raise
    except Exception as failure:  # Pillow's decoders raise OSError, SyntaxError, ValueError and more
        raise UnreadableError(_reason(encoded, header, failure)) from failure
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def _reads_heic() -> bool:
    """Has Pillow read HEIC; returns whether it can."""
    try:
        heif = importlib.import_module("pillow_heif")
    except ImportError:
        return False
    if _HEIF not in Image.OPEN:
        heif.register_heif_opener(decode_threads=1, thumbnails=False, depth_images=False, aux_images=False)
    return True


def _reason(encoded: bytes, header: Header | None, failure: Exception) -> str:
    if header and header.height and not header.standard:
        return _UNUSUAL
    if isinstance(failure, UnidentifiedImageError) and not encoded.startswith((JPEG_START, PNG_START)):
        return _UNKNOWN
    return TRUNCATED if "truncated" in str(failure).lower() or isinstance(failure, EOFError) else DAMAGED
