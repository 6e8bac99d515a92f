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
    ways = (
        "bit flipped",
        "bits flipped",
        "zeroed",
        "garbage",
        "garbage spliced in",
        "removed",
        "cut",
        "text",
    )
    for number in range(count):
        way = ways[number % len(ways)]
        at = int(rng.integers(8, len(data) - 4))
        size = int(rng.integers(4, max(5, min(400, (len(data) - at) // 2))))
        copy = bytearray(data)
        junk = rng.integers(0, 256, size, dtype=np.uint8).tobytes()
        if way == "bit flipped":
            copy[at] ^= 1 << int(rng.integers(8))
        elif way == "bits flipped":
            for place in rng.integers(8, len(data), 10):
                copy[place] ^= 1 << int(rng.integers(8))
        elif way == "zeroed":
            copy[at : at + size] = bytes(len(copy[at : at + size]))
        elif way == "garbage":
            copy[at : at + size] = junk[: len(copy[at : at + size])]
        elif way == "garbage spliced in":
            copy[at:at] = junk
        elif way == "removed":
            del copy[at : at + size]
        elif way == "cut":
            del copy[at:]
        elif way == "text":
            copy[at:at] = b"<html>503 Service Unavailable</html>"
        if bytes(copy) != data:
            yield f"{way} at {at} of {len(data)} ({number})", bytes(copy)


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


def cut_pixels(png: bytes) -> bytes:
    """Returns a PNG of sound checksums whose deflated pixels lack their last bytes."""
    return join([(name, content[:-4] if name == b"IDAT" else content) for name, content in chunks(png)])


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
        header = dict(parts)[b"IHDR"]
        pixels = zlib.decompress(b"".join(content for name, content in parts if name == b"IDAT"))
        end = (b"IEND", b"")

        def png(ihdr: bytes = header, idat: bytes = zlib.compress(pixels), rest=rest, last=(end,)) -> bytes:
            return join([(b"IHDR", ihdr), *rest, (b"IDAT", idat), *last])

        row = len(pixels) // 40
        filters = bytearray(pixels)
        filters[row * 7] = 9
        zipped = zlib.compress(pixels)
        made |= {
            f"{kind}: sound": png(),
            f"{kind}: rows missing": png(idat=zlib.compress(pixels[: row * 20])),
            f"{kind}: a byte missing": png(idat=zlib.compress(pixels[:-1])),
            f"{kind}: a bomb": png(idat=zlib.compress(bytes(1 << 24))),
            f"{kind}: unknown filter": png(idat=zlib.compress(bytes(filters))),
            f"{kind}: stream cut": png(idat=zipped[: len(zipped) // 2]),
            f"{kind}: stream without its sum": png(idat=zipped[:-4]),
            f"{kind}: stream of garbage": png(idat=b"\x78\x9c" + pixels[:200]),
            f"{kind}: bytes behind the stream": png(idat=zipped + b"more"),
            f"{kind}: a height of 50": png(ihdr=header[:4] + (50).to_bytes(4) + header[8:]),
            f"{kind}: 3 bits": png(ihdr=header[:8] + b"\3" + header[9:]),
            f"{kind}: colour 5": png(ihdr=header[:9] + b"\5" + header[10:]),
            f"{kind}: method 1": png(ihdr=header[:10] + b"\1" + header[11:]),
            f"{kind}: interlaced": png(ihdr=header[:12] + b"\1"),
            f"{kind}: no pixels": join([(b"IHDR", header), *rest, end]),
            f"{kind}: no end": png(last=()),
            f"{kind}: two headers": join(
                [(b"IHDR", header), (b"IHDR", header), *rest, (b"IDAT", zipped), end]
            ),
            f"{kind}: an unknown critical chunk": png(rest=[*rest, (b"ABCD", b"x")]),
            f"{kind}: pixels in two places": join(
                [
                    (b"IHDR", header),
                    *rest,
                    (b"IDAT", zipped[:50]),
                    (b"tEXt", b"a\0b"),
                    (b"IDAT", zipped[50:]),
                    end,
                ]
            ),
            f"{kind}: no palette": png(rest=[part for part in rest if part[0] != b"PLTE"]),
            f"{kind}: a short palette": png(rest=[(n, c[:6] if n == b"PLTE" else c) for n, c in rest]),
            f"{kind}: palette behind": join([(b"IHDR", header), (b"IDAT", zipped), *rest, end]),
        }
    return made


def segments(jpeg: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """Returns marker and content of the segments before the first scan, and the rest from there."""
    found, position = [], 2
    while jpeg[position + 1] != 0xDA:
        length = int.from_bytes(jpeg[position + 2 : position + 4])
        found.append((jpeg[position + 1], jpeg[position + 4 : position + 2 + length]))
        position += 2 + length
    return found, jpeg[position:]


def miswritten_jpegs() -> dict[str, bytes]:
    """Returns JPEG files that their writer, or an editor of their segments, spoiled."""
    made = {}
    for kind in ("usual", "grey", "progressive"):
        parts, scan = segments(sound_jpegs()[kind])

        def jpeg(parts=parts, scan: bytes = scan) -> bytes:
            heads = [bytes((0xFF, m)) + (len(c) + 2).to_bytes(2) + c for m, c in parts]
            return b"".join([b"\xff\xd8", *heads, scan])

        def edit(marker: int, change, parts=parts, jpeg=jpeg) -> bytes:
            return jpeg([(m, change(c) if m == marker else c) for m, c in parts])

        frame = next(m for m, _ in parts if m in (0xC0, 0xC2))
        middle = len(scan) // 2
        made |= {
            f"{kind}: sound": jpeg(),
            f"{kind}: no quantization": jpeg([p for p in parts if p[0] != 0xDB]),
            f"{kind}: no huffman": jpeg([p for p in parts if p[0] != 0xC4]),
            f"{kind}: a bad huffman": edit(0xC4, lambda c: c[:1] + b"\xff" * 16 + c[17:]),
            f"{kind}: higher": edit(frame, lambda c: c[:1] + (500).to_bytes(2) + c[3:]),
            f"{kind}: no width": edit(frame, lambda c: c[:3] + bytes(2) + c[5:]),
            f"{kind}: a component more": edit(frame, lambda c: c[:5] + bytes([c[5] + 1]) + c[6:]),
            f"{kind}: sampling 0": edit(frame, lambda c: c[:7] + b"\0" + c[8:]),
            f"{kind}: two frames": jpeg(
                [p for part in parts for p in ([part] * (2 if part[0] == frame else 1))]
            ),
            f"{kind}: no scan": jpeg(scan=b"\xff\xd9"),
            f"{kind}: half a scan": jpeg(scan=scan[:middle]),
            f"{kind}: half a scan and an end": jpeg(scan=scan[:middle] + b"\xff\xd9"),
            f"{kind}: a marker in the scan": jpeg(scan=scan[:middle] + b"\xff\xc4" + scan[middle:]),
            f"{kind}: a segment in the scan": jpeg(scan=scan[:middle] + b"\xff\xe1\0\6abcd" + scan[middle:]),
            f"{kind}: a start in the scan": jpeg(scan=scan[:middle] + b"\xff\xd8" + scan[middle:]),
            f"{kind}: a scan in the scan": jpeg(scan=scan[:middle] + scan),
            f"{kind}: two images": jpeg() + jpeg(),
            f"{kind}: bytes behind": jpeg() + b"trailing bytes",
            f"{kind}: no end": jpeg(scan=scan[:-2]),
            f"{kind}: zeros for an end": jpeg(scan=scan[:-2] + bytes(2)),
            f"{kind}: scan header of a component more": jpeg(scan=scan[:4] + b"\4" + scan[5:]),
        }
    return made
