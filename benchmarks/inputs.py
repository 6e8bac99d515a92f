"""Inputs of the preprocessing benchmark, made from a seed."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa
from PIL import Image

from benchmarks.packed import CLASSES
from shardline.components.preprocess.tfrecord import as_example, encode, head

_DISTINCT_PHOTOS = 200
_SIDE = 27


def write_photos(directory: Path, count: int, seed: int = 0) -> None:
    """Writes JPEG files of 270 to 330 pixels and 33 kB on average into five class folders.

    A few hundred are encoded; every file is one of them with a comment of its own, so that no two are equal.
    """
    rng = np.random.default_rng(seed)
    encoded = [_encode_photo(rng) for _ in range(min(count, _DISTINCT_PHOTOS))]
    for label in range(CLASSES):
        (directory / f"class{label}").mkdir(parents=True)
    for index in range(count):
        photo, text = encoded[index % len(encoded)], f"photo {index:08d}".encode()
        comment = b"\xff\xfe" + struct.pack(">H", len(text) + 2) + text
        path = directory / f"class{index % CLASSES}" / f"{index:06d}.jpg"
        path.write_bytes(photo[:2] + comment + photo[2:])


def _encode_photo(rng: np.random.Generator) -> bytes:
    height, width = rng.integers(270, 331, 2)
    coarse = rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((int(width), int(height)), Image.Resampling.BICUBIC)
    noise = rng.normal(0.0, 8.0, (height, width, 3))
    pixels = np.clip(np.asarray(smooth) + noise, 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=90, subsampling="4:2:0")
    return buffer.getvalue()


def write_packed(path: Path, count: int, seed: int = 0) -> None:
    """Writes PNG images of 27 x 27 grey pixels, 824 bytes each, as the rows of one uint8 array (.npy)."""
    rng = np.random.default_rng(seed)
    images = (_encode_png(rng.integers(0, 256, (_SIDE, _SIDE), dtype=np.uint8)) for _ in range(count))
    rows = np.frombuffer(b"".join(images), np.uint8).reshape(count, -1)
    with path.open("wb") as file:
        np.save(file, rows)


def write_records(path: Path, packed: Path) -> None:
    """Writes the images of a packed file as one TFRecord file of tf.train.Example{image, label}."""
    labels = encode({"label": pa.array(range(CLASSES))}).to_pylist()
    with path.open("wb") as file:
        for index, image in enumerate(np.load(packed, mmap_mode="r")):
            record = as_example(head("image", image.nbytes) + image.tobytes() + labels[index % CLASSES])
            length = struct.pack("<Q", len(record))
            file.write(length + _masked_crc32c(length) + record + _masked_crc32c(record))


def _masked_crc32c(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _encode_png(pixels: np.ndarray) -> bytes:
    """Stores the pixels without compression: quick, and the same size for every image."""
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 0)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
