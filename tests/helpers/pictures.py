"""Every kind of picture that people have, and what becomes of it; run as a module, it prints the table."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from shardline.components.preprocess.images.codec import Codec, StoredImage
from shardline.trainer.base.errors import BadRecordError
from tests.helpers.images import deep, encoded, scene, turned, with_alpha, without

REFUSED = "refused"
SAME = "the same pixels"


class Outcome(NamedTuple):
    """What becomes of a picture.

    Attributes:
        stored: How it is stored where neither a size nor an encoding is asked for.
        counted: What the manifest counts it as.
        served: What the exported model sees in it.
    """

    stored: str
    counted: str
    served: str


def _animated(form: str, **options: Any) -> bytes:
    frames = [scene(), ImageOps.mirror(scene())]
    if form == "GIF":
        frames = [frame.quantize(64) for frame in frames]
    return encoded(frames[0], form, save_all=True, append_images=frames[1:], **options)


def _deep_png() -> bytes:
    """Returns a PNG of 16 bits of red, green and blue, which Pillow reads and does not write."""
    rows = np.random.default_rng(0).integers(0, 65536, (40, 60, 3)).astype(">u2")
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", 60, 40, 16, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))),
        (b"IEND", b""),
    )
    packed = [
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def _frame(data: bytes, **changes: int) -> bytes:
    """Returns a JPEG whose frame states other bits, or another number of components."""
    start, changed = data.index(b"\xff\xc0"), bytearray(data)
    changed[start + 4] = changes.get("bits", 8)
    changed[start + 9] = changes.get("components", 3)
    return bytes(changed)


def _partial_gif() -> bytes:
    """Returns a GIF whose only frame is smaller than its canvas."""
    data = bytearray(encoded(scene(30, 25).quantize(64), "GIF"))
    data[6:10] = struct.pack("<HH", 60, 40)
    return bytes(data)


def _heic(image: Image.Image, **options: Any) -> bytes:
    import pillow_heif

    pillow_heif.register_heif_opener()
    image.save(buffer := io.BytesIO(), "HEIF", **options)
    return buffer.getvalue()


def pictures() -> dict[str, bytes]:
    """Returns a file of each kind that can be made here."""
    cmyk = encoded(scene().convert("CMYK"), "JPEG")
    colours = scene().quantize(64)
    exif = Image.Exif()
    exif[0x0112] = 6
    return {
        "JPEG": encoded(scene(), "JPEG"),
        "JPEG, progressive": encoded(scene(), "JPEG", progressive=True),
        "JPEG, grey": encoded(scene().convert("L"), "JPEG"),
        "JPEG, CMYK of Adobe": cmyk,
        "JPEG, CMYK": without(b"\xff\xee", cmyk),
        "JPEG with EXIF orientation": turned(6),
        "JPEG of 12 bits": _frame(encoded(scene(), "JPEG"), bits=12),
        "JPEG of 2 components": _frame(encoded(scene(), "JPEG"), components=2),
        "PNG": encoded(scene(), "PNG"),
        "PNG, black and white": encoded(scene().convert("1"), "PNG"),
        "PNG, palette": encoded(colours, "PNG"),
        "PNG, transparent palette": encoded(colours, "PNG", transparency=bytes(range(64))),
        "PNG, alpha channel": encoded(with_alpha(), "PNG"),
        "PNG, grey and alpha": encoded(with_alpha("L"), "PNG"),
        "PNG, 16-bit grey": encoded(deep(), "PNG"),
        "PNG, 16-bit colour": _deep_png(),
        "PNG, animated": _animated("PNG"),
        "PNG with EXIF orientation": turned(6, "PNG"),
        "GIF": encoded(colours, "GIF"),
        "GIF, transparent": encoded(colours, "GIF", transparency=3),
        "GIF, animated": _animated("GIF"),
        "GIF whose first frame is smaller": _partial_gif(),
        "BMP": encoded(scene(), "BMP"),
        "BMP, palette": encoded(colours, "BMP"),
        "BMP, grey": encoded(scene().convert("L"), "BMP"),
        "BMP, black and white": encoded(scene().convert("1"), "BMP"),
        "WebP": encoded(scene(), "WEBP"),
        "WebP, lossless": encoded(scene(), "WEBP", lossless=True),
        "WebP, alpha channel": encoded(with_alpha(), "WEBP"),
        "WebP, lossless with alpha channel": encoded(with_alpha(), "WEBP", lossless=True),
        "WebP, animated": _animated("WEBP", lossless=True),
        "WebP with EXIF orientation": turned(6, "WEBP"),
        "AVIF": encoded(scene(), "AVIF"),
        "AVIF, alpha channel": encoded(with_alpha(), "AVIF"),
        "AVIF, animated": _animated("AVIF"),
        "AVIF with orientation": turned(6, "AVIF"),
        "HEIC": _heic(scene()),
        "HEIC with orientation": _heic(scene(), exif=exif.tobytes()),
        "anything else, TIFF, SVG, PDF or video": encoded(scene(), "JPEG2000"),
    }


def stored(data: bytes, size: int = 0) -> StoredImage | str:
    """Returns a picture as it is stored, or why it is refused."""
    codec = Codec(image_size=size, resize_mode="crop", encoding="keep", max_pixels=10**6)
    try:
        return codec.store(data, "x")
    except BadRecordError as error:
        return error.reason


def served(data: bytes, shape: tuple[int, int, int]) -> Any:
    """Returns the pixels that the exported model sees, uint8 of the shape; raises TensorFlow's error."""
    from shardline.trainer.data.decode import decode_image
    from shardline.trainer.data.features import Feature

    return decode_image(data, Feature("image", "uint8", shape, "png", "crop")).numpy()


def outcome(data: bytes) -> Outcome:
    """Returns what becomes of a picture, here and in the exported model."""
    import tensorflow as tf

    found = stored(data)
    if isinstance(found, str):
        return Outcome(f"{REFUSED}: {found.partition(' (')[0]}", "", "")
    trained = tf.io.decode_image(found.data, channels=found.channels, expand_animations=False).numpy()
    try:
        difference = np.abs(served(data, trained.shape).astype(int) - trained).mean()
    except tf.errors.OpError:
        seen = REFUSED
    else:
        # A JPEG that was turned is encoded again.
        seen = (
            SAME if difference <= (2 if found.encoding == "jpeg" else 0) else f"differs by {difference:.1f}"
        )
    way = found.encoding.upper() if found.data is not data else "unchanged"
    return Outcome(
        way + (", upright" if "exif orientation" in found.converted else ""), ", ".join(found.converted), seen
    )


def table() -> str:
    """Returns the table of docs/images.md: pictures that are stored and served alike share a row."""
    rows = ["| Picture | Stored as | Counted as | In the exported model |", "|---|---|---|---|"]
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, data in pictures().items():
        stored_as, counted, seen = outcome(data)
        found.setdefault((stored_as, seen), []).append((name, counted))
    for (stored_as, seen), same in found.items():
        words = dict.fromkeys(word for _, counted in same for word in counted.split(", ") if word)
        kinds: dict[str, list[str]] = {}
        for name, _ in same:
            kind, _, variant = name.partition(", ")
            kinds.setdefault(kind, []).append(variant or "plain")
        shown = [k if v == ["plain"] else f"{k} ({', '.join(v)})" for k, v in kinds.items()]
        rows.append(f"| {'; '.join(shown)} | {stored_as} | {', '.join(words)} | {seen} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")
