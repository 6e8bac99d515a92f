"""Damaged images: what becomes of files on bad disks and broken transfers, and what broken writers make."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image

from tests.helpers.images import encoded, scene


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Returns an image that hardly compresses, so that damage falls into its pixels."""
    rng = np.random.default_rng(width)
    shape = (height, width, 3)
    return Image.fromarray(
        (np.asarray(scene(width, height)) // 2 + rng.integers(0, 90, shape)).astype(np.uint8)
    ).convert(mode)


def sound_pngs() -> dict[str, bytes]:
    """Returns PNG files of all kinds."""
    files = {mode: encoded(noise(60, 40, mode), "PNG") for mode in ("RGB", "L", "RGBA", "P", "1")}
    files["16 bit"] = encoded(Image.fromarray(np.arange(2400, dtype=np.uint16).reshape(40, 60) * 27), "PNG")
    files["small"] = encoded(noise(8, 8, "L"), "PNG")
    files["many chunks"] = split_pixels(files["RGB"], 700)
    return files


def sound_jpegs() -> dict[str, bytes]:
    """Returns JPEG files of all kinds."""
    return {
        "usual": encoded(noise(120, 90), "JPEG", quality=90),
        "grey": encoded(noise(120, 90, "L"), "JPEG"),
        "progressive": encoded(noise(120, 90), "JPEG", progressive=True),
        "restarts": encoded(noise(120, 90), "JPEG", restart_marker_rows=1),
        "cmyk": encoded(noise(120, 90, "CMYK"), "JPEG"),
        "tiny": encoded(noise(16, 16), "JPEG"),
        "smooth": encoded(scene(300, 200), "JPEG"),
    }


def damaged(data: bytes, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yields `count` damaged copies of a file, and what was done to each."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        at = int(rng.integers(8, len(data) - 4))
        size = int(rng.integers(4, max(5, min(400, (len(data) - at) // 2))))
        end, junk = at + size, rng.integers(0, 256, size, dtype=np.uint8).tobytes()
        flipped = bytearray(data)
        for place in [at] if number % 8 == 0 else rng.integers(8, len(data), 10):
            flipped[place] ^= 1 << int(rng.integers(8))
        way, copy = (
            ("a bit flipped", bytes(flipped)),
            ("bits flipped", bytes(flipped)),
            ("zeroed", data[:at] + bytes(len(data[at:end])) + data[end:]),
            ("garbage", data[:at] + junk[: len(data[at:end])] + data[end:]),
            ("garbage spliced in", data[:at] + junk + data[at:]),
            ("removed", data[:at] + data[end:]),
            ("cut", data[:at]),
            ("text", data[:at] + b"<html>503 Service Unavailable</html>" + data[at:]),
        )[number % 8]
        if copy != data:
            yield f"{way} at {at} of {len(data)} ({number})", copy


def chunks(png: bytes) -> list[tuple[bytes, bytes]]:
    """Returns name and content of the chunks of a PNG."""
    found, position = [], 8
    while position < len(png):
        length = int.from_bytes(png[position : position + 4])
        found.append((png[position + 4 : position + 8], png[position + 8 : position + 8 + length]))
        position += 12 + length
    return found


def join(parts: list[tuple[bytes, bytes]]) -> bytes:
    """Returns a PNG of chunks, with right checksums."""
    made = [b"\x89PNG\r\n\x1a\n"]
    for name, content in parts:
        made += len(content).to_bytes(4), name, content, zlib.crc32(name + content).to_bytes(4)
    return b"".join(made)


def split_pixels(png: bytes, size: int) -> bytes:
    """Returns a PNG whose pixels are in chunks of a size."""
    parts = []
    for name, content in chunks(png):
        step = size if name == b"IDAT" else max(1, len(content))
        parts += [(name, content[at : at + step]) for at in range(0, max(1, len(content)), step)]
    return join(parts)


def miswritten_pngs() -> dict[str, bytes]:
    """Returns PNG files whose every checksum is right, and which their writer spoiled."""
    made = {}
    for kind in ("RGB", "P", "L"):
        parts = chunks(sound_pngs()[kind])
        rest = [part for part in parts if part[0] not in (b"IHDR", b"IDAT", b"IEND")]
        header, end = parts[0], (b"IEND", b"")
        pixels = zlib.decompress(b"".join(content for name, content in parts if name == b"IDAT"))
        zipped, row = zlib.compress(pixels), len(pixels) // 40
        filters = bytearray(pixels)
        filters[row * 7] = 9
        streams = {
            "rows missing": zlib.compress(pixels[: row * 20]),
            "a byte missing": zlib.compress(pixels[:-1]),
            "a byte more": zlib.compress(pixels + b"x"),
            "a bomb": zlib.compress(bytes(1 << 24)),
            "unknown filter": zlib.compress(bytes(filters)),
            "stream cut": zipped[: len(zipped) // 2],
            "stream without its sum": zipped[:-4],
            "stream of wrong sum": zipped[:-4] + b"abcd",
            "stream of garbage": b"\x78\x9c" + pixels[:200],
            "bytes behind the stream": zipped + b"more",
        }
        heights = {"a height of 50": (4, (50).to_bytes(4)), "a height of 30": (4, (30).to_bytes(4))}
        heads = heights | {
            "a width of 61": (0, (61).to_bytes(4)), "3 bits": (8, b"\3"), "16 bits": (8, b"\x10"),
            "colour 5": (9, b"\5"), "method 1": (10, b"\1"), "filter method 1": (11, b"\1"),
            "interlaced": (12, b"\1"), "interlace 2": (12, b"\2"),
        }  # fmt: skip
        data = (b"IDAT", zipped)
        cut = {size: [(n, c[:size] if n == b"PLTE" else c) for n, c in rest] for size in (6, 7)}
        whole = {
            "sound": [header, *rest, data, end],
            "no pixels": [header, *rest, end],
            "no end": [header, *rest, data],
            "two ends": [header, *rest, data, end, end],
            "two headers": [header, header, *rest, data, end],
            "an unknown critical chunk": [header, *rest, (b"ABCD", b"x"), data, end],
            "an unknown chunk": [header, *rest, (b"abCd", b"x"), data, end],
            "pixels in two places": [
                *(header, *rest, (b"IDAT", zipped[:50]), (b"tEXt", b"a\0b"), (b"IDAT", zipped[50:]), end)
            ],
            "no palette": [header, *(part for part in rest if part[0] != b"PLTE"), data, end],
            "a short palette": [header, *cut[6], data, end],
            "a palette of 7 bytes": [header, *cut[7], data, end],
            "palette behind": [header, data, *rest, end],
            **{name: [header, *rest, (b"IDAT", stream), end] for name, stream in streams.items()},
        }
        for name, (at, new) in heads.items():
            content = header[1][:at] + new + header[1][at + len(new) :]
            whole[name] = [(b"IHDR", content), *rest, data, end]
        made |= {f"{kind}: {name}": join(found) for name, found in whole.items()}
    return made


def miswritten_jpegs() -> dict[str, bytes]:
    """Returns JPEG files that their writer, or an editor of their segments, spoiled."""
    made = {}
    for kind in ("usual", "grey", "progressive"):
        whole, parts, position = sound_jpegs()[kind], list[tuple[int, bytes]](), 2
        while whole[position + 1] != 0xDA:
            length = int.from_bytes(whole[position + 2 : position + 4])
            parts.append((whole[position + 1], whole[position + 4 : position + 2 + length]))
            position += 2 + length
        scan = whole[position:]
        frame, middle = next(m for m, _ in parts if m in (0xC0, 0xC2)), len(scan) // 2

        def jpeg(parts: list[tuple[int, bytes]] = parts, scan: bytes = scan) -> bytes:
            heads = [bytes((0xFF, m)) + (len(c) + 2).to_bytes(2) + c for m, c in parts]
            return b"".join([b"\xff\xd8", *heads, scan])

        half = {
            marker: [(m, c[: len(c) // 2] if m == marker else c) for m, c in parts] for marker in (0xC4, 0xDB)
        }
        bad = [(m, c[:1] + b"\xff" * 16 + c[17:] if m == 0xC4 else c) for m, c in parts]
        tables = {
            "sound": parts,
            "no quantization": [p for p in parts if p[0] != 0xDB],
            "no huffman": [p for p in parts if p[0] != 0xC4],
            "half a huffman": half[0xC4],
            "half a quantization": half[0xDB],
            "a bad huffman": bad,
            "two frames": [p for part in parts for p in [part] * (2 if part[0] == frame else 1)],
        }
        components = dict(parts)[frame][5]
        for name, (at, new) in {
            "higher": (1, (500).to_bytes(2)), "lower": (1, (40).to_bytes(2)), "wider": (3, (500).to_bytes(2)),
            "no width": (3, bytes(2)), "a component more": (5, bytes([components + 1])),
            "sampling 0": (7, b"\0"), "sampling 5": (7, b"\x55"), "table 9": (8, b"\x09"),
        }.items():  # fmt: skip
            tables[name] = [(m, c[:at] + new + c[at + len(new) :] if m == frame else c) for m, c in parts]
        scans = {
            "no scan": b"\xff\xd9",
            "half a scan": scan[:middle],
            "half a scan and an end": scan[:middle] + b"\xff\xd9",
            "a marker in the scan": scan[:middle] + b"\xff\xc4" + scan[middle:],
            "a segment in the scan": scan[:middle] + b"\xff\xe1\0\6abcd" + scan[middle:],
            "an unknown marker in the scan": scan[:middle] + b"\xff\x02" + scan[middle:],
            "a start in the scan": scan[:middle] + b"\xff\xd8" + scan[middle:],
            "a scan in the scan": scan[:middle] + scan,
            "two images": scan + jpeg(),
            "bytes behind": scan + b"trailing bytes",
            "no end": scan[:-2],
            "zeros for an end": scan[:-2] + bytes(2),
            "zeros behind": scan + bytes(500),
            "scan header of a component more": scan[:4] + b"\4" + scan[5:],
            "scan header of an unknown component": scan[:5] + b"\x77" + scan[6:],
            "scan header of a table": scan[:6] + b"\x33" + scan[7:],
        }
        made |= {f"{kind}: {name}": jpeg(found) for name, found in tables.items()}
        made |= {f"{kind}: {name}": jpeg(scan=found) for name, found in scans.items()}
    return made
