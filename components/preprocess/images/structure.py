"""Structure of JPEG and PNG files: their headers, and whether they are complete, without decoding them.

The checks refuse files on which the decoders of TensorFlow (libpng, libjpeg-turbo) fail, and more: RFC 2083
(PNG), ITU-T T.81 annex B (JPEG), TIFF 6.0 (EXIF). Garbage between two markers of a JPEG is accepted, as
decoders skip it: only decoding the pixels finds it.
"""

from __future__ import annotations

import io
import struct
import zlib
from functools import lru_cache
from typing import NamedTuple

from shardline.components.preprocess.lazy import np

#: Reasons for which an image cannot be used.
TRUNCATED, DAMAGED = "truncated image", "damaged image"

# The longest sides that the libraries of TensorFlow read.
_LONGEST_JPEG, _LONGEST_PNG = 65_500, 1_000_000

JPEG_START, _JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
_EXIF, _ORIENTATION_TAG = b"Exif\0\0", 0x0112
_FRAME = struct.Struct(">BHHB")
_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Baseline, extended and progressive; the frames after it are lossless or arithmetically coded.
_BASELINE, _PROGRESSIVE = 0xC0, 0xC2
# Bytes in which a marker is searched at a time: they stay in the processor's cache.
_SEARCHED = 1 << 16
_MARKERS = frozenset(range(0x01, 0xFF)) - frozenset(range(0xD0, 0xD8))
_END, _SCAN, _APPLICATION = 0xD9, 0xDA, 0xE1
_TEMPORARY, _ARITHMETIC, _LINES, _COMMENT = 0x01, 0xCC, 0xDC, 0xFE
_SKIPPED = frozenset({*range(0xE0, 0xF0), _COMMENT, _LINES, _ARITHMETIC})
# Precision, height and width of a frame.
_TINY = b"\x08\0\x08\0\x08"

PNG_START = b"\x89PNG\r\n\x1a\n"
# The last chunk of a PNG, with its checksum, which is always the same.
_PNG_END = b"IEND\xae\x42\x60\x82"
_PNG_LAST = bytes(4) + _PNG_END
_PNG_HEADER, _PNG_CHUNK = struct.Struct(">8xI4sIIBBBBB"), struct.Struct(">I4s")
_PNG_KINDS = {b"tRNS": "alpha", b"acTL": "animation"}
# Checksums of the names of the critical chunks after IHDR: those of the contents continue them.
_PNG_CRITICAL = {name: zlib.crc32(name) for name in (b"PLTE", b"IDAT", b"IEND")}
_GREY, _PALETTE, _GREY_ALPHA, _ALPHA = 0, 3, 4, 6
#: Samples per pixel of each colour type, and the bits that a sample may have.
_PNG_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
# First column and row, and steps, of each interlacing step of a PNG.
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_FILTERS = bytes(range(5))
_INFLATED_AT_ONCE = 1 << 24


class Header(NamedTuple):
    """Header of a JPEG or PNG, with its size in pixels as stored (before an EXIF rotation).

    Attributes:
        channels: 1 for grey (any alpha channel is not counted), 3 for all others.
        orientation: EXIF's 1..8; 1 is upright.
        standard: Whether every decoder reads it; if not, a JPEG of 12 bits, of 2 components, lossless or
            arithmetically coded, or too long a side.
        plain: Whether it is a standard JPEG that is not CMYK, which the fast decoder reads.
        whole: Whether its end is present.
        kinds: What decoders leave out or convert: "alpha", "16 bit", "animation", "cmyk".
    """

    encoding: str
    height: int
    width: int
    channels: int
    orientation: int
    standard: bool
    plain: bool
    whole: bool
    kinds: tuple[str, ...] = ()


class UnreadableError(Exception):
    """The image cannot be used; the text is the reason, the same for the same kind of fault."""


def read_header(data: bytes) -> Header | None:
    """Returns the header of a JPEG or PNG, or None for anything else.

    One that is cut or broken within its header has a height and width of 0.
    """
    is_jpeg = data.startswith(JPEG_START)
    if not is_jpeg and not data.startswith(PNG_START):
        return None
    try:
        return _read_jpeg(data) if is_jpeg else _read_png(data)
    except (struct.error, IndexError, UnreadableError):
        is_whole = data.find(_JPEG_END if is_jpeg else _PNG_END) > 0
        return Header("jpeg" if is_jpeg else "png", 0, 0, 3, 1, False, False, is_whole)


def check_structure(encoded: bytes) -> None:
    """Raises an UnreadableError, TRUNCATED or DAMAGED, if the file of a JPEG or PNG is not sound."""
    try:
        (_check_jpeg if encoded.startswith(JPEG_START) else _check_png)(encoded)
    except (struct.error, IndexError):
        raise UnreadableError(TRUNCATED) from None


def _read_orientation(exif: bytes) -> int:
    """Returns the orientation in the first directory of EXIF data, with or without "Exif"; 1 if missing.

    The first of several EXIF data applies, as in `trainer.data.examples`.
    """
    tiff = exif.removeprefix(_EXIF)
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(order + "I", tiff, 4)
        (entries,) = struct.unpack_from(order + "H", tiff, directory)
        for entry in range(directory + 2, directory + 2 + 12 * entries, 12):
            tag, _, _, value = struct.unpack_from(order + "HHIH", tiff, entry)
            if tag == _ORIENTATION_TAG:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


@lru_cache(1024)
def _png_start(start: bytes) -> tuple[Header, int, tuple[tuple[int, int], ...]]:
    """Returns what follows from signature and IHDR: the header of a whole file, and the bytes of its rows.

    These are their number in all, and number and bytes of the rows of each image; none if IHDR is invalid. An
    interlaced PNG has up to seven images. A row is a byte that names its filter, and pixels.
    """
    length, name, width, height, depth, colour, method, filtering, interlace = _PNG_HEADER.unpack_from(start)
    if name != b"IHDR" or length != 13:
        raise UnreadableError(DAMAGED)
    channels = 1 if colour in (_GREY, _GREY_ALPHA) else 3
    kinds = ("16 bit",) * (depth == 16) + ("alpha",) * (colour in (_GREY_ALPHA, _ALPHA))
    standard = max(height, width) <= _LONGEST_PNG
    header = Header("png", height, width, channels, 1, standard, False, True, kinds)
    is_valid = depth in _PNG_DEPTHS.get(colour, ()) and not method and not filtering and interlace < 2
    if not is_valid or not width * height or zlib.crc32(start[12:29]) != int.from_bytes(start[29:]):
        return header, 0, ()
    bits = depth * _PNG_SAMPLES[colour]
    grids = _ADAM7 if interlace else ((0, 0, 1, 1),)
    sizes = [(-(-(height - y) // down), -(-(width - x) // right)) for x, y, right, down in grids]
    images = tuple(
        (rows, (columns * bits + 7) // 8 + 1) for rows, columns in sizes if rows > 0 and columns > 0
    )
    return header, sum(rows * size for rows, size in images), images


def _read_png(data: bytes) -> Header:
    header, *_ = _png_start(data[:33])
    orientation, position, kinds = 0, 33, list(header.kinds)
    length, name = _PNG_CHUNK.unpack_from(data, position)
    while name != b"IDAT" and name != b"IEND":
        if name == b"eXIf":
            orientation = orientation or _read_orientation(data[position + 8 : position + 8 + length])
        elif name in _PNG_KINDS:
            kinds.append(_PNG_KINDS[name])
        position += 12 + length
        length, name = _PNG_CHUNK.unpack_from(data, position)
    whole = name == b"IDAT" and data.rfind(_PNG_END) > 0
    if whole and position == 33:
        return header
    return header._replace(orientation=orientation or 1, whole=whole, kinds=tuple(kinds))


def _check_png(data: bytes) -> None:
    _, total, images = _png_start(data[:33])
    position, name, pixels, palette = 33, b"IHDR", list[bytes](), b""
    while name != b"IEND" and not data.startswith(_PNG_LAST, position):
        before = name
        length, name = _PNG_CHUNK.unpack_from(data, position)
        end = position + 8 + length
        content = data[position + 8 : end]
        position = end + 4
        if position > len(data):
            raise UnreadableError(TRUNCATED)
        checksum = _PNG_CRITICAL.get(name)
        if checksum is None:
            if not name.isalpha() or not name[0] & 0x20:
                raise UnreadableError(DAMAGED)
        elif zlib.crc32(content, checksum) != int.from_bytes(data[end:position]):
            raise UnreadableError(DAMAGED)
        elif name == b"IDAT":
            if pixels and before != name:
                raise UnreadableError(DAMAGED)
            pixels.append(content)
        elif name == b"PLTE":
            palette = palette or (b"" if pixels else content)
    is_wrong = data[25] == _PALETTE and (not palette or len(palette) % 3 or len(palette) > 768)
    if is_wrong or not _are_pixels(total, images, b"".join(pixels)):
        raise UnreadableError(DAMAGED)


def _are_pixels(total: int, images: tuple[tuple[int, int], ...], stream: bytes) -> bool:
    """Returns whether a stream inflates to all rows of all images, each with a known filter.

    The pixels of a large image are never in memory as a whole, and their filters are not checked.
    """
    inflater = zlib.decompressobj()
    try:
        made = inflater.decompress(stream, _INFLATED_AT_ONCE)
        found = len(made)
        while not inflater.eof and (stream := inflater.unconsumed_tail):
            if found > 2 * total + _INFLATED_AT_ONCE:  # a decompression bomb
                return False
            found += len(inflater.decompress(stream, _INFLATED_AT_ONCE))
    except zlib.error:
        return False
    if not inflater.eof or not 0 < total <= found:
        return False
    position = 0
    for rows, size in images if total <= len(made) else ():
        end = position + rows * size
        if made[position:end:size].translate(None, _FILTERS):
            return False
        position = end
    return True


def _read_jpeg(data: bytes) -> Header:
    position, orientation = 2, 0
    while True:
        marker = data[position + 1]
        if data[position] != 0xFF or marker == _SCAN:
            raise IndexError("no frame before the pixels")
        if marker in _FRAME_MARKERS:
            break
        if marker == 0xFF:  # a fill byte
            position += 1
            continue
        if marker == _APPLICATION and data.startswith(_EXIF, position + 4):
            orientation = orientation or _read_orientation(data[position + 4 : position + 0x10001])
        position += 2 + (data[position + 2] << 8 | data[position + 3])
    precision, height, width, components = _FRAME.unpack_from(data, position + 4)
    standard = marker <= _PROGRESSIVE and precision == 8 and components in (1, 3, 4)
    standard = standard and max(height, width) <= _LONGEST_JPEG
    plain = standard and components < 4
    # Bytes after the end are harmless, and a preview inside the EXIF data has an end of its own.
    whole = data.rfind(_JPEG_END, position) > 0
    channels, kinds = 1 if components == 1 else 3, ("cmyk",) if components == 4 else ()
    return Header("jpeg", height, width, channels, orientation or 1, standard, plain, whole, kinds)


def _check_jpeg(data: bytes) -> None:
    position, parts, scans, size = 2, [JPEG_START[:2]], 0, len(data)
    while True:
        marker = data[position + 1]
        if data[position] != 0xFF or marker not in _MARKERS:
            # The pixels of a scan, or what a camera leaves between two segments.
            position = _find_marker(data, position)
            marker = data[position + 1]
        position += 2
        if marker == _END:
            break
        if marker == _TEMPORARY:
            continue
        length = data[position] << 8 | data[position + 1]
        end = position + length
        if length < 2 or end > size:
            raise UnreadableError(TRUNCATED if length >= 2 else DAMAGED)
        if _BASELINE <= marker <= _PROGRESSIVE:
            parts += data[position - 2 : position + 2], _TINY, data[position + 7 : end]
        elif marker not in _SKIPPED:
            parts.append(data[position - 2 : end])
        scans += marker == _SCAN
        position = end
    if not scans or not _are_tables(b"".join([*parts, _JPEG_END])):
        raise UnreadableError(DAMAGED)


def _find_marker(data: bytes, position: int) -> int:
    """Returns the position of the next marker that is neither a stuffed byte, a fill byte nor a restart."""
    while position < len(data) - 1:
        first = np.frombuffer(data, np.uint8, min(len(data) - position, _SEARCHED), position)
        second = first[1:]
        found = first[:-1] == 0xFF
        found &= second != 0  # in place, which saves an array
        place = int(found.argmax())
        if found[place] and second[place] not in _MARKERS:
            found &= (second & 0xF8 != 0xD0) & (second != 0xFF)
            place = int(found.argmax())
        if found[place]:
            return position + place
        position += len(second)
    raise UnreadableError(TRUNCATED)


@lru_cache(256)
def _are_tables(tiny: bytes) -> bool:
    """Returns whether decoders accept the tables and scan headers of a JPEG, which are equal in many.

    `tiny` is a JPEG of these, of 8 x 8 pixels and without pixel data, whose absence is the only error if the
    rest is sound.
    """
    import simplejpeg

    components = tiny[tiny.index(_TINY) + len(_TINY)] if _TINY in tiny else 0
    try:
        simplejpeg.decode_jpeg(tiny, {1: "GRAY", 4: "CMYK"}.get(components, "RGB"))
    except ValueError as failure:
        if "determine subsampling" not in str(failure):
            return "Corrupt JPEG data: premature end" in str(failure)
        from PIL import Image  # which reads rarer ones too

        try:
            Image.open(io.BytesIO(tiny), formats=["JPEG"]).load()
        except Exception:  # OSError, SyntaxError, ValueError and more
            return False
    return True
