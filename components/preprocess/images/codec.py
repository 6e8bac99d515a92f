"""Image codec: turns an image of the source into the image that is stored, or says why it cannot.

Without `image_size` and with encoding "keep", a JPEG or PNG passes untouched, and is checked as is asked for:
its header alone, the structure of its file (`images.check`) and of some JPEG the pixels, or all pixels.
`tf.io.decode_image` reads grey, palette, alpha, 16-bit and animated PNG (alpha dropped, high byte, first
frame) and CMYK JPEG as this module does; they are counted all the same. What it would not read so is
converted: other formats, arithmetically coded JPEG, and images that only their EXIF data says how to turn.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardline.components.preprocess.images.check import are_whole_pngs, find_fault, is_whole_png
from shardline.components.preprocess.images.header import (
    DAMAGED,
    LONGEST_SIDES,
    PNG_END,
    PNG_HEAD,
    PNG_SECOND,
    TRUNCATED,
    Header,
    read_header,
)
from shardline.trainer.data.features import Placement, place
from shardline.trainer.errors import BadRecordError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from shardline.components.preprocess.images.pixels import Memory, Pixels

#: Shorter side of the smallest image that can be stored, in pixels.
SMALLEST = 4

# With "structure" the pixels of one JPEG in so many are decoded, chosen by its name. What can be wrong with a
# PNG of sound structure, decoding would not find.
_SAMPLED = 64

#: JPEG quality of a resized photo, and of one that is only turned upright.
QUALITY, TURNED_QUALITY = 90, 95

# Small images are often all of one size. Of large ones there are many, and then nothing is gained.
_KNOWN_HEADS = 1024

EMPTY = "empty file"
TOO_SMALL = f"fewer than {SMALLEST} x {SMALLEST} pixels"
NO_PIXELS = "not a uint8 array of shape (height, width, 1 or 3)"

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
        self._size = image_size
        self._mode = resize_mode
        self._encoding = encoding
        self._max_pixels = max_pixels
        self._raw_channels = channels
        self._check = check
        self._too_large = f"more than {max_pixels:,} pixels"
        self._known: dict[bytes, Kind] = {}
        self._kept: Memory | None = None

    def known(self, images: Sequence[bytes]) -> list[Kind | None]:
        """Returns the kinds of images that `store` would not touch, as far as known without parsing.

        That is of a PNG that begins as an earlier one did, in a fraction of the time that `store` takes.
        """
        if not self._known:
            return [None] * len(images)
        heads = {image[PNG_HEAD] for image in images}
        known = self._known.get(heads.pop()) if len(heads) == 1 else None
        if known and self._check != "header" and are_whole_pngs(images):
            return [known] * len(images)
        kinds = [
            self._known.get(image[PNG_HEAD])
            if image.startswith(b"IDAT", PNG_SECOND) and image.endswith(PNG_END)
            else None
            for image in images
        ]
        if self._check == "header" or not any(kinds):
            return kinds
        return [
            kind if kind and is_whole_png(image) else None for image, kind in zip(images, kinds, strict=True)
        ]

    def store(self, encoded: bytes, name: str) -> StoredImage:
        """Returns an image file as it is stored; BadRecordError with `name` if it cannot be used."""
        header = read_header(encoded)
        if header is None:
            return self._store_other(encoded, name, None)
        encoding, height, width, channels, orientation, standard, plain, whole, kinds = header
        if not whole:
            raise BadRecordError(name, TRUNCATED)
        if not height:
            raise BadRecordError(name, DAMAGED)
        self._check_size(height, width, name)
        has_size = self._size in (0, height) and self._size in (0, width)
        if standard and orientation == 1 and has_size and self._encoding in ("keep", encoding):
            self._check_whole(encoded, header, name)
            stored = StoredImage(encoded, height, width, channels, encoding, kinds)
            if encoding == "png" and len(self._known) < _KNOWN_HEADS and self._check != "decode":
                self._known[encoded[PNG_HEAD]] = stored.kind
            return stored
        return self._store_jpeg(encoded, name, header) if plain else self._store_other(encoded, name, header)

    def from_pixels(self, pixels: npt.NDArray[np.uint8], name: str) -> bytes:
        """Returns a uint8 array of shape (height, width, 1 or 3) as PNG, which loses nothing."""
        if pixels.dtype != "uint8" or pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or not pixels.size:
            raise BadRecordError(name, NO_PIXELS)
        return _encode(pixels, "png", name)

    def _check_size(self, height: int, width: int, name: str) -> None:
        if height * width > self._max_pixels:
            raise BadRecordError(name, self._too_large)
        if min(height, width) < SMALLEST:
            raise BadRecordError(name, TOO_SMALL)

    def _check_whole(self, encoded: bytes, header: Header, name: str) -> None:
        """Refuses an image that is to be stored as it is and is damaged, as far as this is looked at."""
        _check_sides(header.height, header.width, header.encoding, name)
        if self._check == "header":
            return
        fault = find_fault(encoded)
        is_sampled = header.encoding == "jpeg" and not zlib.crc32(name.encode(errors="replace")) % _SAMPLED
        if not fault and (self._check == "decode" or is_sampled):
            from shardline.components.preprocess.images import picture

            fault = picture.find_fault(encoded, header)
        if fault:
            raise BadRecordError(name, fault)

    def _store_jpeg(self, encoded: bytes, name: str, header: Header) -> StoredImage:
        """Decodes with the fast decoder, no larger than needed."""
        from shardline.components.preprocess.images import pixels

        size = (header.height, header.width)
        placed = self._place(*(size if header.orientation < 5 else size[::-1]))
        try:
            reduction = placed.reduction if placed else 1
            decoded = pixels.decode_jpeg(encoded, size, header.channels, reduction, self._memory())
        except pixels.UnreadableError as failure:
            raise BadRecordError(name, str(failure)) from failure
        upright = pixels.turn_upright(decoded, header.orientation)
        converted = ("exif orientation",) if header.orientation > 1 else ()
        return self._finish(upright, placed, name, jpeg=True, converted=converted)

    def _store_other(self, encoded: bytes, name: str, header: Header | None) -> StoredImage:
        """Decodes with Pillow."""
        if not encoded:
            raise BadRecordError(name, EMPTY)
        from shardline.components.preprocess.images.picture import opened_picture
        from shardline.components.preprocess.images.pixels import UnreadableError

        try:
            with opened_picture(encoded, header) as picture:
                self._check_size(picture.height, picture.width, name)
                picture.load()
                placed = self._place(picture.height, picture.width)
                upright = picture.to_pixels(placed.reduction if placed else 1)
        except UnreadableError as failure:
            raise BadRecordError(name, str(failure)) from failure
        jpeg = header is not None and header.encoding == "jpeg"
        return self._finish(upright, placed, name, jpeg=jpeg, converted=picture.kinds)

    def _memory(self) -> Memory:
        from shardline.components.preprocess.images.pixels import Memory

        self._kept = self._kept or Memory()
        return self._kept

    def _place(self, height: int, width: int) -> Placement | None:
        return place(height, width, (self._size, self._size), self._mode) if self._size else None

    def _finish(
        self, upright: Pixels, placed: Placement | None, name: str, *, jpeg: bool, converted: tuple[str, ...]
    ) -> StoredImage:
        """Fits and encodes pixels that are upright; `jpeg` says that they came from a JPEG."""
        from shardline.components.preprocess.images import pixels

        encoding = self._encoding if self._encoding != "keep" else "jpeg" if jpeg else "png"
        if placed:
            upright = pixels.fit(upright, placed, (self._size, self._size), self._memory())
        if encoding == "raw" and upright.shape[2] != self._raw_channels:
            converted += ("grey",) if self._raw_channels == 3 else ("colour",)
            upright = pixels.to_channels(upright, self._raw_channels)
        quality = QUALITY if placed or not jpeg else TURNED_QUALITY
        data = _encode(upright, encoding, name, quality)
        height, width, channels = upright.shape
        return StoredImage(data, height, width, channels, encoding, converted)


def _encode(pixels: Pixels, encoding: str, name: str, quality: int = QUALITY) -> bytes:
    from shardline.components.preprocess.images.pixels import encode

    _check_sides(pixels.shape[0], pixels.shape[1], encoding, name)
    try:
        return encode(pixels, encoding, quality=quality)
    except ValueError as failure:
        raise BadRecordError(name, f"cannot be encoded as {encoding}: {failure}") from failure


def _check_sides(height: int, width: int, encoding: str, name: str) -> None:
    longest = LONGEST_SIDES.get(encoding)
    if longest and max(height, width) > longest:
        raise BadRecordError(name, f"a side of more than {longest:,} pixels, which no {encoding} has")
