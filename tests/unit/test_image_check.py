"""Checks of images: what TensorFlow cannot read is refused, and what is sound is not."""

from __future__ import annotations

import time
import tracemalloc
import zlib

import pytest
import tensorflow as tf

from shardline.components.preprocess.images.codec import Codec
from shardline.components.preprocess.images.structure import (
    DAMAGED,
    TRUNCATED,
    UnreadableError,
    check_structure,
    read_header,
)
from shardline.trainer.base.errors import BadRecordError
from tests.helpers import damage

SOUND = damage.sound_pngs() | damage.sound_jpegs()
MISWRITTEN = damage.miswritten_pngs() | damage.miswritten_jpegs()


def reads(data: bytes) -> bool:
    """Returns whether TensorFlow decodes an image, as training does."""
    header = read_header(data)
    try:
        tf.io.decode_image(data, channels=header.channels if header else 3, expand_animations=False)
    except tf.errors.OpError:
        return False
    return True


def passes(data: bytes, check: str) -> bool:
    """Returns whether preprocessing stores an image as it is."""
    codec = Codec(image_size=0, resize_mode="crop", encoding="keep", max_pixels=10**8, check=check)
    try:
        return codec.store(data, b"not sampled")[0] is data
    except BadRecordError:
        return False


def find_fault(data: bytes) -> str:
    try:
        check_structure(data)
    except UnreadableError as fault:
        return str(fault)
    return ""


@pytest.mark.parametrize("kind", SOUND)
def test_a_sound_image_passes(kind: str) -> None:
    assert reads(SOUND[kind])
    for check in ("header", "structure", "decode"):
        assert passes(SOUND[kind], check)
    assert find_fault(SOUND[kind]) == ""


@pytest.mark.parametrize("kind", SOUND)
def test_no_damage_that_training_cannot_read_passes(kind: str) -> None:
    unreadable = [(what, data) for what, data in damage.damaged(SOUND[kind], 80, seed=7) if not reads(data)]
    assert len(unreadable) >= 10
    for check in ("structure", "decode"):
        assert [what for what, data in unreadable if passes(data, check)] == []


@pytest.mark.parametrize("kind", MISWRITTEN)
def test_what_a_writer_spoiled_passes_if_training_reads_it(kind: str) -> None:
    assert passes(MISWRITTEN[kind], "structure") == reads(MISWRITTEN[kind])


def test_a_file_that_was_cut_off_is_called_so() -> None:
    for data in SOUND.values():
        for end in range(60, len(data) - 13, len(data) // 9):
            assert find_fault(data[:end]) == TRUNCATED


def test_a_marker_is_found_wherever_it_is_in_a_long_scan() -> None:
    photo = SOUND["usual"][:-2]
    assert find_fault(photo + bytes(70_000) + b"\xff\xd9") == ""
    for before in range((1 << 16) - len(photo), (1 << 16) + 4):
        spoiled = photo + bytes(before) + b"\xff\xc4" + bytes(100) + b"\xff\xd9"
        assert find_fault(spoiled) == DAMAGED, before


def test_grey_pixels_below_a_gap_are_found_by_decoding() -> None:
    photo = MISWRITTEN["usual: half a scan and an end"]
    assert passes(photo, "structure")
    assert not passes(photo, "decode")


def test_of_the_jpeg_some_are_decoded_always_the_same() -> None:
    codec = Codec(image_size=0, resize_mode="crop", encoding="keep", max_pixels=10**8)
    refused = []
    for number in range(640):
        try:
            codec.store(MISWRITTEN["usual: half a scan and an end"], b"%d.jpg" % number)
        except BadRecordError as error:
            refused.append(error.name)
    assert 2 <= len(refused) <= 30
    assert refused == [
        name for name in (f"{n}.jpg" for n in range(640)) if not zlib.crc32(name.encode()) % 64
    ]


def test_a_decompression_bomb_is_let_go_of() -> None:
    parts = damage.chunks(SOUND["RGB"])
    packer = zlib.compressobj(9)
    bomb = b"".join(packer.compress(bytes(1 << 24)) for _ in range(40)) + packer.flush()  # 640 MiB in 0.6
    data = damage.join([(name, bomb if name == b"IDAT" else content) for name, content in parts])
    tracemalloc.start()
    began = time.monotonic()
    assert find_fault(data) == DAMAGED
    assert time.monotonic() - began < 5
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()
