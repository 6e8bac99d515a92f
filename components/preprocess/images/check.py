"""Checks of an encoded image without decoding it: whether its file is whole, so that training can read it.

What they refuse is what the decoders of TensorFlow (libpng, libjpeg-turbo) end with an error on, and more:
PNG: RFC 2083, every critical chunk with its checksum, and the pixels inflated to their end. JPEG: ITU-T T.81
annex B, every segment, table and scan up to the end marker. Garbage between two markers of a JPEG goes by, as
decoders skip it; it shows in the pixels alone, and only decoding them finds it.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import repeat

from shardline.components.preprocess.images.header import DAMAGED, JPEG_START, PNG_FIRST, TRUNCATED

_PNG_CHUNK = struct.Struct(">I4s")
_PNG_HEADER = struct.Struct(">IIBBBBB")
_PNG_PIXELS_FROM, _PNG_OVERHEAD = 33, 12
_PALETTE = 3
#: Bits per sample that each colour type of a PNG may have, and its samples per pixel.
_PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_PNG_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# First column and row, and steps, of each pass of an interlaced PNG.
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_LAST_FILTER = 4
#: The name of the second chunk, and length, name and checksum of the last one, as numbers.
_IDAT, _IEND = int.from_bytes(b"IDAT"), (0, int.from_bytes(b"IEND"), 0xAE426082)
_IDAT_SUM = zlib.crc32(b"IDAT")
_SMALLEST_FILE = 57
# Deflate makes at most 1,032 bytes of one: less than this cannot fill the memory.
_SURELY_SMALL = 16_384
_INFLATED_AT_ONCE = 1 << 24
# Of a large photo no more than this, so that what is searched does not leave the processor's cache.
_SEARCHED_AT_ONCE = 1 << 16
# What is shorter is searched as quickly by `re` alone.
_SHORT = 8192

# A marker that is neither a stuffed byte, a fill byte nor a restart.
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_MARKERS = frozenset(range(0x01, 0xFF)) - frozenset(range(0xD0, 0xD8))
_END, _SCAN, _QUANTIZATION, _HUFFMAN, _INTERVAL = 0xD9, 0xDA, 0xDB, 0xC4, 0xDD
_TEMPORARY, _ARITHMETIC, _LINES, _COMMENT = 0x01, 0xCC, 0xDC, 0xFE
_FRAMES, _PROGRESSIVE = (0xC0, 0xC1, 0xC2), 0xC2
_PASSED_OVER = frozenset({*range(0xE0, 0xF0), _COMMENT, _LINES, _ARITHMETIC})
#: Huffman tables that a sequential JPEG has without defining them.
_USUAL_TABLES = frozenset({0x00, 0x01, 0x10, 0x11})


class _FaultError(Exception):
    """The image is damaged; the text says how, in the words of `header`."""


def find_fault(encoded: bytes) -> str:
    """Returns what is wrong with the file of a standard JPEG or a PNG, TRUNCATED or DAMAGED, or ""."""
    try:
        if encoded.startswith(JPEG_START):
            _check_jpeg(encoded)
        else:
            _check_png(encoded)
    except _FaultError as fault:
        return str(fault)
    except (struct.error, IndexError):
        return TRUNCATED
    return ""


def is_whole_png(encoded: bytes) -> bool:
    """Returns whether a PNG that is one IHDR that was checked before, one IDAT and IEND is sound."""
    return (
        int.from_bytes(encoded[33:37]) == len(encoded) - 57
        and not any(encoded[-12:-8])
        and zlib.crc32(encoded[37:-16]) == int.from_bytes(encoded[-16:-12])
        and _are_pixels(encoded[PNG_FIRST], [encoded[41:-16]])
    )


def are_whole_pngs(images: Sequence[bytes]) -> bool:
    """Returns whether several small files, which may be no PNG, all are so, in a third of the time.

    If not, some may be: `is_whole_png` says which.
    """
    import numpy as np

    starts, sizes = {image[PNG_FIRST] for image in images}, list(map(len, images))
    if len(starts) > 1 or not _SMALLEST_FILE <= min(sizes) <= max(sizes) <= _SURELY_SMALL:
        return False
    lengths = np.frombuffer(b"".join([image[33:41] for image in images]), ">u4").reshape(-1, 2)
    ends = np.frombuffer(b"".join([image[-16:] for image in images]), ">u4").reshape(-1, 4)
    streams = [image[41:-16] for image in images]
    sums = np.fromiter(map(zlib.crc32, streams, repeat(_IDAT_SUM)), np.uint32)
    if (lengths[:, 0] != np.array(sizes) - 57).any():
        return False
    if (lengths[:, 1] != _IDAT).any() or (ends[:, 1:] != _IEND).any():
        return False
    try:
        pixels = list(map(zlib.decompress, streams))
    except zlib.error:
        return False
    (passes,) = map(_png_rows, starts)
    total = sum(rows * size for rows, size in passes)
    if not total or (sums != ends[:, 0]).any() or min(map(len, pixels)) < total:
        return False
    raw, position = np.frombuffer(b"".join([each[:total] for each in pixels]), np.uint8).reshape(-1, total), 0
    for rows, size in passes:
        end = position + rows * size
        if raw[:, position:end:size].max() > _LAST_FILTER:
            return False
        position = end
    return True


def _check_png(data: bytes) -> None:
    position, names, pixels = 8, [b""], list[bytes]()
    palette = b""
    while names[-1] != b"IEND":
        length, name = _PNG_CHUNK.unpack_from(data, position)
        content, end = position + 8, position + 8 + length
        if end + 4 > len(data):
            raise _FaultError(TRUNCATED)
        is_critical = not name[0] & 0x20
        if not name.isalpha() or (is_critical and zlib.crc32(data[position + 4 : end]) != _crc(data, end)):
            raise _FaultError(DAMAGED)
        if name == b"IDAT":
            pixels.append(data[content:end])
            if len(pixels) > 1 and names[-1] != b"IDAT":
                raise _FaultError(DAMAGED)
        elif name == b"PLTE":
            palette = palette or (b"" if pixels else data[content:end])
        elif is_critical and name != b"IEND" and (name != b"IHDR" or position != 8 or length != 13):
            raise _FaultError(DAMAGED)
        names.append(name)
        position = end + 4
    is_indexed = data[25] == _PALETTE
    if is_indexed and (not palette or len(palette) % 3 or len(palette) > 768):
        raise _FaultError(DAMAGED)
    if names[1] != b"IHDR" or not pixels or not _are_pixels(data[PNG_FIRST], pixels):
        raise _FaultError(DAMAGED)


def _crc(data: bytes, position: int) -> int:
    return int.from_bytes(data[position : position + 4])


@lru_cache(1024)
def _png_rows(start: bytes) -> tuple[tuple[int, int], ...]:
    """Returns number and bytes of the rows of each pass of a PNG that starts so; none for an invalid header.

    A row is a byte that names its filter, and pixels.
    """
    width, height, depth, colour, method, filtering, interlace = _PNG_HEADER.unpack_from(start, 16)
    if depth not in _PNG_DEPTHS.get(colour, ()) or method or filtering or interlace > 1 or not width * height:
        return ()
    passes = _PASSES if interlace else ((0, 0, 1, 1),)
    bits = depth * _PNG_SAMPLES[colour]
    sizes = [(-(-(height - y) // down), -(-(width - x) // right)) for x, y, right, down in passes]
    return tuple((rows, (columns * bits + 7) // 8 + 1) for rows, columns in sizes if rows > 0 and columns > 0)


def _are_pixels(start: bytes, chunks: list[bytes]) -> bool:
    """Returns whether chunks inflate to all rows of a PNG that starts so, each with a known filter."""
    passes = _png_rows(start)
    total = sum(rows * size for rows, size in passes)
    if not total:
        return False
    try:
        if len(chunks) == 1 and len(chunks[0]) < _SURELY_SMALL:
            raw = zlib.decompress(chunks[0])
            return len(raw) >= total and _are_filters(raw, passes)
        return _inflates(chunks, passes, total)
    except zlib.error:
        return False


def _inflates(chunks: list[bytes], passes: tuple[tuple[int, int], ...], total: int) -> bool:
    """Does the same for a large image, whose pixels are never in memory as a whole if they are many."""
    inflater, made = zlib.decompressobj(), bytearray()
    found, kept = 0, total <= _INFLATED_AT_ONCE
    for chunk in chunks:
        while chunk and not inflater.eof:
            block = inflater.decompress(chunk, _INFLATED_AT_ONCE)
            found += len(block)
            if kept:
                made += block[: total - len(made)]
            if found > 2 * total + _INFLATED_AT_ONCE:  # more than there is room for: a bomb
                return False
            chunk = inflater.unconsumed_tail
    return inflater.eof and found >= total and (not kept or _are_filters(made, passes))


def _are_filters(raw: bytes | bytearray, passes: tuple[tuple[int, int], ...]) -> bool:
    position = 0
    for rows, size in passes:
        end = position + rows * size
        if max(raw[position:end:size]) > _LAST_FILTER:
            return False
        position = end
    return True


def _check_jpeg(data: bytes) -> None:
    position, segments, size = 2, list[tuple[int, bytes]](), len(data)
    while True:
        marker = data[position + 1]
        if data[position] != 0xFF or marker not in _MARKERS:
            # The pixels of a scan, or what a camera leaves between two segments.
            found = _MARKER.search(data, _first_suspect(data, position))
            if found is None:
                raise _FaultError(TRUNCATED)
            position = found.start()
            marker = data[position + 1]
        position += 2
        if marker == _END:
            break
        if marker == _TEMPORARY:
            continue
        length = data[position] << 8 | data[position + 1]
        end = position + length
        if length < 2 or end > size:
            raise _FaultError(TRUNCATED if length >= 2 else DAMAGED)
        if marker not in _PASSED_OVER:  # of a frame without its precision and size, which the header has
            segments.append((marker, data[position + (7 if marker in _FRAMES else 2) : end]))
        position = end
    fault = _segments_fault(tuple(segments))
    if fault:
        raise _FaultError(fault)


def _first_suspect(data: bytes, position: int) -> int:
    """Returns a place that no marker is before: in a photo that of the end, in a third of a search's time."""
    if len(data) - position < _SHORT:
        return position
    import numpy as np

    found = np.frombuffer(data, np.uint8)
    for start in range(position, len(data) - 1, _SEARCHED_AT_ONCE):
        block = found[start : start + _SEARCHED_AT_ONCE + 1]
        suspects = (block[:-1] == 0xFF) & (block[1:] != 0)
        first = int(suspects.argmax())
        if suspects[first]:
            return start + first
    return len(data)


@lru_cache(256)
def _segments_fault(segments: tuple[tuple[int, bytes], ...]) -> str:
    """Returns what is wrong with the segments of a JPEG that decoding depends on; those of many are equal."""
    found = _Segments()
    try:
        for marker, content in segments:
            found.take(marker, content)
    except (_FaultError, IndexError):
        return DAMAGED
    return "" if found.is_scanned else DAMAGED


class _Segments:
    """Tables and scans of a JPEG in their order; a _FaultError where decoders end with an error."""

    def __init__(self) -> None:
        self._components: Mapping[int, int] = {}
        self._tables: set[int] = set()
        self._quantizations: set[int] = set()
        self._is_progressive = self._is_complete = False
        self.is_scanned = False

    def take(self, marker: int, content: bytes) -> None:
        """Takes the next segment."""
        if marker == _QUANTIZATION:
            self._quantizations |= _quantizations(content)
        elif marker == _HUFFMAN:
            self._tables |= _tables(content)
        elif marker == _SCAN:
            self._take_scan(content)
        elif marker in _FRAMES:
            self._is_progressive = marker == _PROGRESSIVE
            self._take_frame(content)
        elif marker != _INTERVAL or len(content) != 2:
            raise _FaultError(DAMAGED)

    def _take_frame(self, content: bytes) -> None:
        components = [content[at : at + 3] for at in range(1, len(content), 3)]
        samplings = [side for each in components for side in (each[1] >> 4, each[1] & 15)]
        if (
            self._components
            or len(content) != 1 + 3 * content[0]
            or not 1 <= min(samplings) <= max(samplings) <= 4
        ):
            raise _FaultError(DAMAGED)
        self._components = {name: table for name, _, table in components}

    def _take_scan(self, content: bytes) -> None:
        names = content[1:-3:2]
        if len(content) != 2 * len(names) + 4 or not 1 <= content[0] == len(set(names)) or self._is_complete:
            raise _FaultError(DAMAGED)
        first, last, before, after = content[-3], content[-2], content[-1] >> 4, content[-1] & 15
        if self._is_progressive:
            is_band = first <= last < 64 and len(names) == 1 if first else not last
            if not is_band or after > 13 or before not in (0, after + 1):
                raise _FaultError(DAMAGED)
        for name, tables in zip(names, content[2:-3:2], strict=True):
            dc, ac = {tables >> 4}, {0x10 | tables & 15}
            needed = dc | ac
            if self._is_progressive:
                needed = ac if first else set() if before else dc
            there = self._tables if self._is_progressive else self._tables | _USUAL_TABLES
            if self._components.get(name) not in self._quantizations or not needed <= there:
                raise _FaultError(DAMAGED)
        # Only a progressive JPEG, or one with its components in scans of their own, has further scans.
        self._is_complete = not self._is_progressive and len(names) == len(self._components)
        self.is_scanned = True


def _quantizations(content: bytes) -> frozenset[int]:
    """Returns the numbers of the quantization tables of a segment."""
    found, position = set(), 0
    while position < len(content):
        precision, number = content[position] >> 4, content[position] & 15
        position += 129 if precision else 65
        if number > 3:
            raise _FaultError(DAMAGED)
        found.add(number)
    if position != len(content):
        raise _FaultError(DAMAGED)
    return frozenset(found)


def _tables(content: bytes) -> frozenset[int]:
    """Returns the numbers of the Huffman tables of a segment; those of AC coefficients from 16 on."""
    found, position = set(), 0
    while position < len(content):
        number, counts = content[position], content[position + 1 : position + 17]
        values = content[position + 17 : position + 17 + sum(counts)]
        position += 17 + sum(counts)
        if number & ~0x13 or len(counts) < 16 or len(values) < sum(counts) or sum(counts) > 256:
            raise _FaultError(DAMAGED)
        if not _is_code(counts) or (number < 0x10 and max(values, default=0) > 15):
            raise _FaultError(DAMAGED)
        found.add(number)
    return frozenset(found)


def _is_code(counts: bytes) -> bool:
    """Returns whether a Huffman code can have so many words of 1, 2, ... 16 bits (none of them all ones)."""
    code = 0
    for length, count in enumerate(counts, start=1):
        code += count
        if count and code >= 1 << length:
            return False
        code <<= 1
    return True
