"""Image headers: the first bytes of a JPEG or PNG, read by hand in microseconds and without a library.

JPEG: ITU-T T.81 annex B. PNG: RFC 2083. EXIF: the TIFF 6.0 image file directory inside them.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

JPEG_START = b"\xff\xd8\xff"
PNG_START = b"\x89PNG\r\n\x1a\n"

#: Reasons for which an image cannot be used.
TRUNCATED = "truncated image"
DAMAGED = "damaged image"

#: The longest side that the libraries of TensorFlow, and of everybody else, read and write.
LONGEST_SIDES = {"jpeg": 65_500, "png": 1_000_000}

#: The first chunk of a PNG, which says all that `Header` holds, up to its checksum.
PNG_FIRST = slice(29)

#: The same with its checksum.
PNG_HEAD = slice(33)

#: Where the name of the second chunk is.
PNG_SECOND = 37

_JPEG_END = b"\xff\xd9"
_EXIF = b"Exif\0\0"

#: The last chunk of a PNG, with its checksum, which is always the same.
PNG_END = b"IEND\xae\x42\x60\x82"

_FRAME = struct.Struct(">BHHB")
_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Baseline, extended and progressive; those after it are lossless or arithmetically coded.
_PROGRESSIVE = 0xC2
_EXIF_MARKER, _SCAN_MARKER = 0xE1, 0xDA
_ORIENTATION_TAG = 0x0112

_PNG_HEADER = struct.Struct(">8xI4sIIBB")
_PNG_CHUNK = struct.Struct(">I4s")
_FIRST_CHUNK, _CHUNK_FRAME = 33, 12
_GREY_ALPHA, _PNG_GREY, _PNG_ALPHA = 4, 0, (4, 6)
_PNG_KINDS = {b"tRNS": "alpha", b"acTL": "animation"}


class Header(NamedTuple):
    """Header of a JPEG or PNG, with its size in pixels as stored (before an EXIF rotation).

    Attributes:
        channels: 1 for grey (any alpha channel is not counted), 3 for all others.
        orientation: EXIF's 1..8; 1 is upright.
        standard: Whether every decoder reads it; if not, a JPEG of 12 bits, of 2 components, lossless or
            arithmetically coded.
        plain: Whether it is a standard JPEG that is not CMYK, which the fast decoder reads.
        whole: Whether its end is there.
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


def read_header(data: bytes) -> Header | None:
    """Returns what a JPEG or PNG says of itself, or None for anything else.

    One that is cut or broken within its header has a height and width of 0.
    """
    try:
        if data.startswith(JPEG_START):
            return _read_jpeg(data)
        if data.startswith(PNG_START):
            return _read_png(data)
    except (struct.error, IndexError):
        encoding, end = ("jpeg", _JPEG_END) if data.startswith(JPEG_START) else ("png", PNG_END)
        return Header(encoding, 0, 0, 3, 1, False, False, data.find(end) > 0)
    return None


def _read_jpeg(data: bytes) -> Header:
    position, orientation = 2, 0
    while True:
        marker = data[position + 1]
        if data[position] != 0xFF or marker == _SCAN_MARKER:
            raise IndexError("no frame before the pixels")
        if marker in _FRAME_MARKERS:
            break
        if marker == 0xFF:  # a fill byte
            position += 1
            continue
        if marker == _EXIF_MARKER and data.startswith(_EXIF, position + 4):
            orientation = orientation or read_orientation(data[position + 4 : position + 0x10001])
        position += 2 + (data[position + 2] << 8 | data[position + 3])
    precision, height, width, components = _FRAME.unpack_from(data, position + 4)
    standard = marker <= _PROGRESSIVE and precision == 8 and components in (1, 3, 4)
    plain = standard and components < 4
    kinds = ("cmyk",) if components == 4 else ()
    # Bytes after the end are harmless, and a preview inside the EXIF data has an end of its own.
    whole = data.rfind(_JPEG_END, position) > 0
    channels = 1 if components == 1 else 3
    return Header("jpeg", height, width, channels, orientation or 1, standard, plain, whole, kinds)


def _read_png(data: bytes) -> Header:
    length, name, width, height, depth, colour = _PNG_HEADER.unpack_from(data)
    if name != b"IHDR" or length != 13:
        raise IndexError("no IHDR")
    orientation, position = 0, _FIRST_CHUNK
    kinds = [*(["16 bit"] if depth == 16 else []), *(["alpha"] if colour in _PNG_ALPHA else [])]
    length, name = _PNG_CHUNK.unpack_from(data, position)
    while name != b"IDAT" and name != b"IEND":
        if name == b"eXIf":
            orientation = orientation or read_orientation(data[position + 8 : position + 8 + length])
        elif name in _PNG_KINDS:
            kinds.append(_PNG_KINDS[name])
        position += _CHUNK_FRAME + length
        length, name = _PNG_CHUNK.unpack_from(data, position)
    whole = name == b"IDAT" and data.rfind(PNG_END) > 0
    channels = 1 if colour in (_PNG_GREY, _GREY_ALPHA) else 3
    return Header("png", height, width, channels, orientation or 1, True, False, whole, tuple(kinds))


def read_orientation(exif: bytes) -> int:
    """Returns the orientation that EXIF data, with their name or without, state in the first directory; or 1.

    Of several EXIF data the first count, as `trainer.data.decode` has it too.
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
