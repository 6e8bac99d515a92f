"""Pictures of the rarer formats and kinds, which Pillow reads: to 8 bits of grey or RGB, or refused by name.

What the exported model reads too (`trainer.data.decode`) becomes the same pixels here.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import AvifImagePlugin, Image, ImageChops, UnidentifiedImageError

from shardline.components.preprocess.images.header import (
    DAMAGED,
    JPEG_START,
    PNG_START,
    TRUNCATED,
    Header,
    read_orientation,
)
from shardline.components.preprocess.images.pixels import (
    Pixels,
    UnreadableError,
    decode_jpeg,
    turn_upright,
)
from shardline.trainer.data.features import REDUCTIONS
from shardline.trainer.errors import ShardlineError

# Shards are written by one process per core.
AvifImagePlugin.DEFAULT_MAX_THREADS = 1

# Pillow knows more formats, but some start other programs (EPS) and none of the rest is a photo's.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_HEIF, _AVIF = "HEIF", "AVIF"

CONVERT = "convert it to JPEG or PNG"
PARTIAL_GIF = f"unsupported image format (GIF whose first frame leaves a part of it free); {CONVERT}"
RARE_JPEG = f"unsupported image format (JPEG of 12 bits, of 2 components, or lossless); {CONVERT}"
_CAMERA, _VIDEO, _PAGE, _POINTER = "raw file of a camera", "video", "web page", "pointer of Git LFS"
_ADVICE = {
    "HEIC": "pip install pillow-heif",
    _VIDEO: "take frames out of it",
    _PAGE: "fetch the image again",
    _POINTER: "git lfs pull",
}

# Files that people have and we do not read: first bytes, at which place, name.
_OTHERS = (
    *((brand, 4, "HEIC") for brand in (b"ftyphei", b"ftyphev", b"ftypmif1", b"ftypmsf1")),
    (b"ftypavi", 4, _AVIF),
    (b"ftypcrx", 4, _CAMERA),
    (b"FUJIFILMCCD-RAW", 0, _CAMERA),
    *((start, 0, _CAMERA) for start in (b"IIRO", b"IIRS", b"MMOR", b"IIU\0")),
    (b"ftyp", 4, _VIDEO),
    (b"AVI ", 8, _VIDEO),
    (b"\x1aE\xdf\xa3", 0, _VIDEO),
    (b"\xff\x0a", 0, "JPEG XL"),
    (b"\0\0\0\x0cJXL ", 0, "JPEG XL"),
    (b"\0\0\0\x0cjP  ", 0, "JPEG 2000"),
    (b"\xff\x4f\xff\x51", 0, "JPEG 2000"),
    (b"\0\0\1\0", 0, "ICO"),
    (b"\x76\x2f\x31\x01", 0, "OpenEXR"),
    (b"DICM", 128, "DICOM"),
    (b"8BPS", 0, "PSD"),
    (b"%PDF", 0, "PDF"),
    (b"%!PS", 0, "PostScript"),
    (b"PK\3\4", 0, "ZIP archive"),
    (b"\x1f\x8b", 0, "gzip"),
)
_SEARCHED = 1000

_16_BIT_MODES = ("I", "I;16", "I;16B", "I;16L")
_GREY_MODES = frozenset({"1", "L", "LA", *_16_BIT_MODES})
_COLOUR_MODES = frozenset({"P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"})
_KINDS = {"P": "palette", "PA": "palette", "CMYK": "cmyk"}

# Tags of TIFF 6.0, and one of DNG 1.7.
_SUBFILE, _BITS, _PHOTOMETRIC, _ORIENTATION, _DNG = 254, 258, 262, 274, 50706
_IS_PREVIEW, _WHITE_IS_ZERO = 1, 0


def find_fault(encoded: bytes, header: Header) -> str:
    """Returns why the pixels of a JPEG or PNG cannot be decoded; "" if they can."""
    try:
        if header.plain:
            decode_jpeg(encoded, (header.height, header.width), header.channels, REDUCTIONS[-1])
        else:
            with opened_picture(encoded, header) as picture:
                picture.load()
    except UnreadableError as failure:
        return str(failure)
    return ""


class Picture:
    """An image that Pillow has opened: its header is read, its pixels are not.

    Attributes:
        height: Height in pixels; upright after `load`.
        width: Width likewise.
        kinds: Properties beside plain 8-bit grey or RGB: "palette", "alpha", "cmyk", "16 bit", "animation"
            (or further pages), "exif orientation", and its format unless that is JPEG or PNG.
    """

    def __init__(self, opened: Any, header: Header | None) -> None:
        self._opened = opened
        self.width, self.height = opened.size
        # A JPEG of a camera that holds a second picture (a preview) is of the format MPO.
        form = "jpeg" if opened.format == "MPO" else str(opened.format).lower()
        self._tags: Any = opened.tag_v2 if form == "tiff" else {}
        self._check_frame()
        self._orientation = header.orientation if header else self._stated_orientation()
        self._bits = max(self._tags.get(_BITS, (16 if opened.mode in _16_BIT_MODES else 8,)))
        is_transparent = opened.mode in ("LA", "PA", "RGBA") or "transparency" in opened.info
        kinds = (
            "" if form in ("jpeg", "png") else form,
            _KINDS.get(opened.mode, ""),
            "16 bit" if self._bits > 8 else "",
            "alpha" if is_transparent else "",
            "animation" if form != "jpeg" and getattr(opened, "is_animated", False) else "",
            *(header.kinds if header else ()),
            "exif orientation" if self._orientation > 1 else "",
        )
        self.kinds = tuple(dict.fromkeys(kind for kind in kinds if kind))

    def load(self) -> None:
        """Reads the pixels of the first frame."""
        self._opened.load()
        if self._tags:  # Pillow turns a TIFF upright, and no other format
            self._orientation = 1
        width, height = self._opened.size
        self.height, self.width = (height, width) if self._orientation < 5 else (width, height)

    def to_pixels(self, reduction: int) -> Pixels:
        """Returns the first frame upright and shrunk, as uint8 (height, width, 1 or 3); alpha is dropped."""
        image = self._to_8_bits()
        if reduction > 1:
            image = image.reduce(reduction)
        pixels = np.asarray(image, np.uint8)
        return turn_upright(pixels if pixels.ndim == 3 else pixels[..., None], self._orientation)

    def _check_frame(self) -> None:
        """Refuses a file whose first frame is not the picture."""
        opened = self._opened
        if _DNG in self._tags or self._tags.get(_SUBFILE, 0) & _IS_PREVIEW:
            raise UnreadableError(_unsupported(_CAMERA))
        if opened.format == "GIF" and opened.tile and opened.tile[0].extents != (0, 0, *opened.size):
            raise UnreadableError(PARTIAL_GIF)

    def _stated_orientation(self) -> int:
        """Returns what the EXIF data says; `getexif` of Pillow would believe XMP data as well."""
        stated = self._tags.get(_ORIENTATION)
        if stated is None:
            return read_orientation(self._opened.info.get("exif") or b"")
        return int(stated) if stated in range(1, 9) else 1

    def _to_8_bits(self) -> Image.Image:
        """Returns the first frame in mode L or RGB."""
        image: Image.Image = self._opened
        mode = image.mode
        # Some releases of Pillow open 16 bits of grey as 32, of which a TIFF may use all.
        if mode not in _GREY_MODES | _COLOUR_MODES or (mode == "I" and image.format == "TIFF"):
            raise UnreadableError(
                f"pixels of more than 16 bits or of an unknown kind (mode {mode}); {CONVERT}"
            )
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
def opened_picture(encoded: bytes, header: Header | None = None) -> Iterator[Picture]:
    """Opens an image of any of `FORMATS`, or HEIC where pillow-heif is installed.

    Args:
        encoded: The file.
        header: What `read_header` has found in it.

    Raises:
        UnreadableError: It is none of these, or it cannot be decoded.
    """
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # the codec has a limit of its own
    name = _name(encoded)
    formats = (*FORMATS, _HEIF) if name == "HEIC" and _reads_heic() else FORMATS
    try:
        with Image.open(io.BytesIO(encoded), formats=formats) as opened:
            yield Picture(opened, header)
    except (UnreadableError, ShardlineError):
        raise
    except UnidentifiedImageError:
        raise UnreadableError(_unidentified(encoded, name, header, _HEIF in formats)) from None
    except Exception as failure:  # Pillow's decoders raise OSError, SyntaxError, ValueError and more
        if header and not header.standard:
            raise UnreadableError(RARE_JPEG) from failure
        truncated = "truncated" in str(failure).lower() or isinstance(failure, EOFError)
        raise UnreadableError(TRUNCATED if truncated else DAMAGED) from failure
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


def _name(data: bytes) -> str:
    """Returns the name of a format that we do not read (of HEIC, not always), or ""."""
    for start, place, name in _OTHERS:
        if data.startswith(start, place):
            return name
    text = data[:_SEARCHED].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return _PAGE
    if text.startswith(b"<svg") or (text.startswith((b"<?xml", b"<!doctype")) and b"<svg" in text):
        return "SVG"
    return _POINTER if text.startswith(b"version https://git-lfs") else ""


def _unsupported(name: str) -> str:
    return f"unsupported image format ({name}); {_ADVICE.get(name, CONVERT)}"


def _unidentified(data: bytes, name: str, header: Header | None, reads_heic: bool) -> str:
    if header and header.encoding == "jpeg" and header.height and not header.standard:
        return RARE_JPEG
    if data.startswith((JPEG_START, PNG_START)) or name == _AVIF or (name == "HEIC" and reads_heic):
        return DAMAGED
    return _unsupported(name) if name else f"not an image that can be read ({', '.join(FORMATS)})"
