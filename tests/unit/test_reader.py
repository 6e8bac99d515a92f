"""TFRecord files of TensorFlow's own writer, whole and damaged in every way."""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import google_crc32c
import pytest
import tensorflow as tf

from shardline.components.preprocess import tfrecord
from shardline.components.preprocess.tfrecord import Record, detect_compression, read_records
from shardline.trainer.base.errors import BadRecordError, SourceError

RECORDS = [b"", b"x", os.urandom(800), os.urandom(3 << 20), b"\x00" * 100, b"last"]


def write(path: Path, records: Sequence[bytes] = RECORDS, compression: str = "") -> Path:
    with tf.io.TFRecordWriter(str(path), options=compression.upper()) as writer:
        for record in records:
            writer.write(record)
    return path


def sound(path: Path, compression: str = "") -> Iterator[Record]:
    """Yields the records of a file, of which the first that is damaged is raised."""
    for record in read_records(path, compression=compression):
        if isinstance(record, BadRecordError):
            raise record
        yield record


@pytest.mark.parametrize("compression", ["", "gzip"])
@pytest.mark.parametrize("block", [1, 11, 4096, 1 << 20])
def test_records_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, block: int
) -> None:
    monkeypatch.setattr(tfrecord, "_BLOCK", block)
    records = RECORDS if block > 11 else [record for record in RECORDS if len(record) < 1000]
    path = write(tmp_path / "records", records, compression)
    assert detect_compression(path) == compression
    found = list(sound(path, compression=compression))
    assert [record.data for record in found] == records
    assert [record.number for record in found] == list(range(len(records)))
    plain = gzip.decompress(path.read_bytes()) if compression else path.read_bytes()
    for record in found:
        assert plain[record.offset : record.offset + len(record.data)] == record.data


def test_a_first_record_that_looks_like_gzip_is_a_record(tmp_path: Path) -> None:
    path = write(tmp_path / "records", [bytes(0x088B1F)])
    assert path.read_bytes().startswith(b"\x1f\x8b\x08")
    assert detect_compression(path) == ""
    path = write(tmp_path / "empty", [])
    assert (detect_compression(path), list(sound(path))) == ("", [])


def test_every_bit_is_checked(tmp_path: Path) -> None:
    records = [b"first", b"second", b"third"]
    whole = write(tmp_path / "whole", records).read_bytes()
    path = tmp_path / "damaged"
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(SourceError, match=r"damaged. (is damaged at )?record \d|damaged record \d"):
            list(sound(path))


def test_a_cut_at_any_byte_is_found(tmp_path: Path) -> None:
    records = [b"first", b"second"]
    whole = write(tmp_path / "whole", records).read_bytes()
    border = 16 + len(records[0])
    path = tmp_path / "cut"
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        if size == border:
            assert [record.data for record in sound(path)] == records[:1]
            continue
        with pytest.raises(SourceError, match=f"at record {int(size > border)}: the file ends in the middle"):
            list(sound(path))


def test_damaged_data_can_be_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "records", [b"first", b"second", b"third"])
    content = bytearray(path.read_bytes())
    content[21 + 12] ^= 1  # the first byte of the second record's data
    path.write_bytes(content)
    with pytest.raises(BadRecordError, match="records record 1': the data do not match their checksum"):
        list(sound(path))
    first, damage, third = read_records(path)
    assert isinstance(first, Record)
    assert isinstance(damage, BadRecordError)
    assert isinstance(third, Record)
    assert [(first.number, first.data), (third.number, third.data)] == [(0, b"first"), (2, b"third")]
    assert (damage.name, damage.reason) == (f"{path} record 1", "the data do not match their checksum")


def test_damaged_gzip(tmp_path: Path) -> None:
    path = write(tmp_path / "records", compression="gzip")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SourceError, match="records' is damaged or not a gzip file: Compressed file ended"):
        list(sound(path, compression="gzip"))
    path.write_bytes(whole[:-6] + bytes(6))
    with pytest.raises(SourceError, match="is damaged or not a gzip file: CRC check failed"):
        list(sound(path, compression="gzip"))
    with pytest.raises(SourceError, match="at record 0: its length does not match"):
        list(sound(write(path, compression="gzip")))
    with pytest.raises(SourceError, match="is damaged or not a gzip file: Not a gzipped file"):
        list(sound(write(path), compression="gzip"))


def test_a_length_that_no_record_has_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    length = struct.pack("<Q", 1 << 60)
    crc = google_crc32c.value(length)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    (tmp_path / "huge").write_bytes(length + struct.pack("<I", masked))
    with pytest.raises(SourceError, match="at record 0"):
        list(sound(tmp_path / "huge"))


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("path,label\na.jpg,cat\n")
    with pytest.raises(SourceError, match="text' is not a TFRecord file: it does not start with a record"):
        detect_compression(tmp_path / "text")
    with pytest.raises(SourceError, match=r"cannot read '.*absent': No such file"):
        list(sound(tmp_path / "absent"))
    with pytest.raises(SourceError, match=r"cannot read '.*': Is a directory"):
        list(sound(tmp_path))
