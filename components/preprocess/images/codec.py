"""Image codec: converts an image of the source to the image that is stored, or says why it cannot.

Without `image_size` and with encoding "keep", a JPEG or PNG is stored unchanged, and checked as set by
`check_images`: its header alone, the structure of its file (`images.structure`) and the pixels of some JPEG,
or all pixels. What `tf.io.decode_image` would read differently is converted: other formats, arithmetically
coded JPEG, and images with an EXIF orientation.

libjpeg-turbo (simplejpeg) reads and writes JPEG, OpenCV resizes and writes PNG, Pillow reads the rarer
formats and kinds as the exported model does (`trainer.data.examples`), all on one core. Loading them takes 50
MB: only where pixels are needed.
"""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from shardline.components.preprocess.images.structure import (
    DAMAGED,
    TRUNCATED,
    Header,
    UnreadableError,
    check_structure,
    read_header,
)
from shardline.components.preprocess.lazy import np
from shardline.trainer.base.errors import BadRecordError
from shardline.trainer.manifest import REDUCTIONS, Placement, compute_placement

if TYPE_CHECKING:
    import numpy.typing as npt

    Pixels = npt.NDArray[np.uint8]


#: Shorter side of the smallest image that can be stored, in pixels.
SMALLEST = 4

#: JPEG quality of a resized photo, and of one that is only turned upright.
QUALITY, TURNED_QUALITY = 90, 95

# With "structure" the pixels of one JPEG in so many are decoded, chosen by its name. Decoding a PNG of sound
# structure would find nothing more.
_SAMPLED = 64

# Headers whose outcome is kept: many images have the same.
_KNOWN_HEADERS = 1024

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
                    is_sampled = kind.encoding == "jpeg" and not zlib.crc32(key) % _SAMPLED
                    check_file(encoded, header, deep=is_sampled or self._check == "decode")
                return encoded, kind
            if not encoded:
                raise UnreadableError("empty file")
            return self._convert(encoded, header)
        except UnreadableError as failure:
            raise BadRecordError(key.decode(errors="surrogateescape"), str(failure)) from failure

    def _convert(self, encoded: bytes, header: Header | None) -> tuple[bytes, Kind]:
        """Decodes an image, turns it upright, fits and encodes it."""
        size, encoding = self._size, self._encoding

        def place(height: int, width: int) -> Placement | None:
            return compute_placement(height, width, (size, size), self._mode) if size else None

        jpeg = header is not None and header.encoding == "jpeg"
        if header and header.plain:  # with the fast decoder, no larger than needed
            orientation, kinds = header.orientation, ("exif orientation",) * (header.orientation > 1)
            sides = (header.height, header.width)
            placed = place(*(sides if orientation < 5 else sides[::-1]))
            pixels = _decode_jpeg(encoded, header, placed.reduction if placed else 1)
        else:
            with opened_picture(encoded, header) as picture:
                self._check_size(*picture.size)
                picture.load()
                placed, kinds, orientation = place(*picture.size), picture.kinds, picture.orientation
                pixels = picture.to_pixels(placed.reduction if placed else 1)
        pixels = _turn_upright(pixels, orientation)
        if encoding == "keep":
            encoding = "jpeg" if jpeg else "png"
        if placed:
            pixels = _fit(pixels, placed, (size, size))
        if encoding == "raw" and pixels.shape[2] == 1:
            kinds += ("grey",)
            pixels = pixels.repeat(3, axis=2)
        data = _encode(pixels, encoding, quality=QUALITY if placed or not jpeg else TURNED_QUALITY)
        height, width, channels = pixels.shape
        return data, Kind(height, width, channels, encoding, kinds)

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


def encode_pixels(pixels: Pixels, name: str) -> bytes:
    """Returns a uint8 array of shape (height, width, 1 or 3) as PNG, which loses nothing."""
    if pixels.dtype != "uint8" or pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or not pixels.size:
        raise BadRecordError(name, "not a uint8 array of shape (height, width, 1 or 3)")
    try:
        return _encode(pixels, "png")
    except UnreadableError as failure:
        raise BadRecordError(name, str(failure)) from failure


def check_file(encoded: bytes, header: Header, *, deep: bool) -> None:
    """Raises UnreadableError if the file of a JPEG or PNG is damaged, or with `deep`, its pixels are."""
    check_structure(encoded)
    if deep and header.plain:
        _decode_jpeg(encoded, header, REDUCTIONS[-1])
    elif deep:
        with opened_picture(encoded, header) as picture:
            picture.load()


@cache
def _opencv() -> Any:
    import cv2

    cv2.setNumThreads(1)  # shards are written by one process per core
    return cv2


def _decode_jpeg(encoded: bytes, header: Header, reduction: int) -> Pixels:
    """Decodes a plain JPEG; UnreadableError if it is damaged.

    Each side of the result is divided by `reduction` (1, 2, 4 or 8) and rounded up. libjpeg-turbo alone loads
    in a tenth of the time of OpenCV and Pillow.
    """
    import simplejpeg

    # The decoder uses the smallest of its sizes that is at least this one; 0 is the full size.
    height, width = (-(-side // reduction) if reduction > 1 else 0 for side in (header.height, header.width))
    space = "RGB" if header.channels == 3 else "GRAY"
    options: dict[str, Any] = {"colorspace": space, "min_height": height, "min_width": width}
    for strict in (True, False):
        try:
            return np.asarray(simplejpeg.decode_jpeg(encoded, strict=strict, **options), np.uint8)
        except ValueError as failure:
            # Some cameras leave bytes between two segments; every decoder skips them.
            if not strict or "extraneous bytes" not in str(failure):
                raise UnreadableError(DAMAGED) from failure
    raise AssertionError("unreachable")


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

    def to_pixels(self, reduction: int) -> Pixels:
        """Returns the first frame, not yet turned, shrunk, as (height, width, 1 or 3); alpha is dropped."""
        from PIL import Image, ImageChops

        image = self._opened
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
    from PIL import AvifImagePlugin, Image, UnidentifiedImageError

    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
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


def _turn_upright(pixels: Pixels, orientation: int) -> Pixels:
    """Applies an EXIF orientation (1..8) to an array (height, width, channels)."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def _fit(pixels: Pixels, place: Placement, target: tuple[int, int]) -> Pixels:
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
        blurred = _opencv().GaussianBlur(part, kernel, max(sigma_x, 0.01), sigmaY=max(sigma_y, 0.01))
        part = np.asarray(blurred, np.uint8).reshape(part.shape)
    size = (place.fitted_height, place.fitted_width)
    if part.shape[:2] != size:
        resized = _opencv().resize(part, size[::-1])  # bilinear
        part = np.asarray(resized, np.uint8).reshape(*size, -1)  # OpenCV drops a single channel
    if part.shape[:2] == target:
        return part
    padded = np.zeros((*target, part.shape[2]), np.uint8)
    padded[
        place.pad_top : place.pad_top + place.fitted_height,
        place.pad_left : place.pad_left + place.fitted_width,
    ] = part
    return padded


def _encode(pixels: Pixels, encoding: str, *, quality: int = QUALITY) -> bytes:
    """Encodes uint8 (height, width, 1 or 3) as "jpeg", "png" or "raw" (the values row by row).

    A JPEG of quality 90 or less has half the resolution in colour, as photos have; above that, the whole.
    Raises UnreadableError if the library fails, as for a side that is longer than the encoding allows.
    """
    import simplejpeg

    cv2 = _opencv()
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
    return bytes(data)
