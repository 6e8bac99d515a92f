"""Image codec: converts an image of the source to the image that is stored, or says why it cannot.

Without `image_size` and with encoding "keep", a JPEG or PNG is stored unchanged, and checked as set by
`check_images`: its header alone, the structure of its file (`images.structure`) and the pixels of some JPEG,
or all pixels. What `tf.io.decode_image` would read differently is converted: other formats, arithmetically
coded JPEG, and images with an EXIF orientation.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardline.components.preprocess.images.jpeg import decode_jpeg
from shardline.components.preprocess.images.structure import (
    DAMAGED,
    TRUNCATED,
    Header,
    UnreadableError,
    check_structure,
    read_header,
)
from shardline.trainer.base.errors import BadRecordError
from shardline.trainer.manifest import REDUCTIONS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Shorter side of the smallest image that can be stored, in pixels.
SMALLEST = 4

# With "structure" the pixels of one JPEG in so many are decoded, chosen by its name. Decoding a PNG of sound
# structure would find nothing more.
_SAMPLED = 64

# Headers whose outcome is kept: many images have the same.
_KNOWN_HEADERS = 1024


class Kind(NamedTuple):
    """Properties of an image as the dataset holds it: all but its bytes.

    Attributes:
        channels: 1 for grey, 3 for all others; any alpha channel is not counted.
        encoding: "jpeg", "png" or "raw".
        converted: Properties that are lost or converted, other than by resizing and encoding, here or when a
            stored image is decoded: "exif orientation", "cmyk", "alpha", "16 bit", "animation",
            "grey" (to RGB, for raw), "gif", "bmp", "webp", ...
    """

    height: int
    width: int
    channels: int
    encoding: str
    converted: tuple[str, ...] = ()


class Codec:
    """Converts images as one set of `PreprocessSettings` says, which explains the arguments.

    An image that already has the wanted size and encoding is not encoded again. `check` is `check_images`.
    """

    def __init__(
        self, *, image_size: int, resize_mode: str, encoding: str, max_pixels: int, check: str = "structure"
    ) -> None:
        self._size, self._mode, self._encoding = image_size, resize_mode, encoding
        self._max_pixels, self._check = max_pixels, check
        self._kind_of = lru_cache(_KNOWN_HEADERS)(self._kept_kind)

    def store(self, encoded: bytes, key: bytes) -> tuple[bytes, Kind]:
        """Returns an image file as stored, the very object if nothing had to be done.

        Raises BadRecordError with the name `key` if it cannot be used.
        """
        try:
            header = read_header(encoded)
            if header and (kind := self._kind_of(header)):
                if self._check != "header":
                    check_structure(encoded)
                    is_sampled = kind.encoding == "jpeg" and not zlib.crc32(key) % _SAMPLED
                    if is_sampled or self._check == "decode":
                        check_pixels(encoded, header)
                return encoded, kind
            if not encoded:
                raise UnreadableError("empty file")
            from shardline.components.preprocess.images.pixels import convert

            found = convert(encoded, header, self._size, self._mode, self._encoding, self._check_size)
            return found[0], Kind(*found[1:])
        except UnreadableError as failure:
            raise BadRecordError(key.decode(errors="surrogateescape"), str(failure)) from failure

    def _kept_kind(self, header: Header) -> Kind | None:
        """Returns the kind of a JPEG or PNG that is stored unchanged; None for one that is not."""
        if not header.whole:
            raise UnreadableError(TRUNCATED)
        if not header.height:
            raise UnreadableError(DAMAGED)
        self._check_size(header.height, header.width)
        has_size = self._size in (0, header.height) and self._size in (0, header.width)
        is_wanted = has_size and self._encoding in ("keep", header.encoding)
        if not header.standard or header.orientation != 1 or not is_wanted:
            return None
        return Kind(header.height, header.width, header.channels, header.encoding, header.kinds)

    def _check_size(self, height: int, width: int) -> None:
        if height * width > self._max_pixels:
            raise UnreadableError(f"more than {self._max_pixels:,} pixels")
        if min(height, width) < SMALLEST:
            raise UnreadableError(f"fewer than {SMALLEST} x {SMALLEST} pixels")


def encode_pixels(pixels: npt.NDArray[np.uint8], name: str) -> bytes:
    """Returns a uint8 array of shape (height, width, 1 or 3) as PNG, which loses nothing."""
    if pixels.dtype != "uint8" or pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or not pixels.size:
        raise BadRecordError(name, "not a uint8 array of shape (height, width, 1 or 3)")
    from shardline.components.preprocess.images.pixels import encode

    try:
        return encode(pixels, "png")
    except UnreadableError as failure:
        raise BadRecordError(name, str(failure)) from failure


def check_file(encoded: bytes, header: Header, *, deep: bool) -> None:
    """Raises UnreadableError if the file of a JPEG or PNG is damaged, or with `deep`, its pixels are."""
    check_structure(encoded)
    if deep:
        check_pixels(encoded, header)


def check_pixels(encoded: bytes, header: Header) -> None:
    """Raises an UnreadableError if the pixels of a JPEG or PNG cannot be decoded."""
    if header.plain:
        decode_jpeg(encoded, (header.height, header.width), header.channels, REDUCTIONS[-1])
        return
    from shardline.components.preprocess.images.pixels import opened_picture

    with opened_picture(encoded, header) as picture:
        picture.load()
