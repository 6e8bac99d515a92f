"""Image codec: turns an image of the source into the image that is stored, or says why it cannot.

Without `image_size` and with encoding "keep", a JPEG or PNG passes untouched, and is checked as is asked for:
its header alone, the structure of its file (`images.structure`) and of some JPEG the pixels, or all pixels.
What `tf.io.decode_image` would not read as this module does is converted: other formats, arithmetically coded
JPEG, and images that only their EXIF data says how to turn.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, NamedTuple

from shardline.components.preprocess.images.structure import (
    DAMAGED,
    TRUNCATED,
    Header,
    UnreadableError,
    check_sides,
    check_structure,
    read_header,
)
from shardline.trainer.base.errors import BadRecordError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from shardline.components.preprocess.images.pixels import Converter

#: Shorter side of the smallest image that can be stored, in pixels.
SMALLEST = 4

# With "structure" the pixels of one JPEG in so many are decoded, chosen by its name. What can be wrong with a
# PNG of sound structure, decoding would not find.
_SAMPLED = 64

#: Height, width, channels, encoding and conversions of a stored image.
Kind = tuple[int, int, int, str, tuple[str, ...]]


class StoredImage(NamedTuple):
    """An image as the dataset holds it.

    Attributes:
        data: The bytes; where nothing had to be done, the very object that was given.
        channels: 1 for grey, 3 for all others; any alpha channel is not counted.
        encoding: "jpeg", "png" or "raw".
        converted: What is not there any more, or is converted, beside resizing and encoding, here or when a
            stored image is decoded: "exif orientation", "cmyk", "palette", "alpha", "16 bit", "animation",
            "grey" (to RGB, for raw), "gif", "bmp", "webp", ...
    """

    data: bytes
    height: int
    width: int
    channels: int
    encoding: str
    converted: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        """All but the data."""
        return self[1:]


class Codec:
    """Stores images in one way; see `PreprocessSettings` for what the arguments mean.

    An image that already has the wanted size and encoding is not encoded again. `channels` is the number
    that all raw images have: 3, or 1 when every image is known to be grey. `check` is `check_images`.
    """

    def __init__(
        self,
        *,
        image_size: int,
        resize_mode: str,
        encoding: str,
        max_pixels: int,
        channels: int = 3,
        check: str = "structure",
    ) -> None:
        self._size, self._mode = image_size, resize_mode
        self._encoding, self._raw_channels = encoding, channels
        self._max_pixels = max_pixels
        self._check = check
        self._converter: Converter | None = None

    def store(self, encoded: bytes, name: str) -> StoredImage:
        """Returns an image file as it is stored; BadRecordError with `name` if it cannot be used."""
        try:
            if not encoded:
                raise UnreadableError("empty file")
            header = read_header(encoded)
            if header and self._passes(encoded, header, name):
                encoding, height, width, channels, *_, kinds = header
                return StoredImage(encoded, height, width, channels, encoding, kinds)
            if self._converter is None:
                from shardline.components.preprocess.images.pixels import Converter

                self._converter = Converter(
                    self._size, self._mode, self._encoding, self._raw_channels, self._check_size
                )
            return StoredImage(*self._converter.convert(encoded, header))
        except UnreadableError as failure:
            raise BadRecordError(name, str(failure)) from failure

    def from_pixels(self, pixels: npt.NDArray[np.uint8], name: str) -> bytes:
        """Returns a uint8 array of shape (height, width, 1 or 3) as PNG, which loses nothing."""
        if pixels.dtype != "uint8" or pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or not pixels.size:
            raise BadRecordError(name, "not a uint8 array of shape (height, width, 1 or 3)")
        from shardline.components.preprocess.images.pixels import encode

        try:
            return encode(pixels, "png")
        except UnreadableError as failure:
            raise BadRecordError(name, str(failure)) from failure

    def _passes(self, encoded: bytes, header: Header, name: str) -> bool:
        """Returns whether a JPEG or PNG is stored as it is, which is then checked as far as is asked for."""
        if not header.whole:
            raise UnreadableError(TRUNCATED)
        if not header.height:
            raise UnreadableError(DAMAGED)
        self._check_size(header.height, header.width)
        has_size = self._size in (0, header.height) and self._size in (0, header.width)
        is_wanted = has_size and self._encoding in ("keep", header.encoding)
        if not header.standard or header.orientation != 1 or not is_wanted:
            return False
        check_sides(header.height, header.width, header.encoding)
        if self._check != "header":
            is_sampled = (
                header.encoding == "jpeg" and not zlib.crc32(name.encode(errors="replace")) % _SAMPLED
            )
            check_file(encoded, header, deep=self._check == "decode" or is_sampled)
        return True

    def _check_size(self, height: int, width: int) -> None:
        if height * width > self._max_pixels:
            raise UnreadableError(f"more than {self._max_pixels:,} pixels")
        if min(height, width) < SMALLEST:
            raise UnreadableError(f"fewer than {SMALLEST} x {SMALLEST} pixels")


def check_file(encoded: bytes, header: Header, *, deep: bool) -> None:
    """Raises an UnreadableError if the file of a JPEG or PNG is damaged, or with `deep` its pixels are."""
    check_structure(encoded)
    if deep:
        from shardline.components.preprocess.images.pixels import check_pixels

        check_pixels(encoded, header)
