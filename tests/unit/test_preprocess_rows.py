"""Rows: in order whatever the order in which they come, and the same from memory and from files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shardline.components.preprocess import rows
from shardline.components.preprocess.rows import HEAD, Buckets
from shardline.components.preprocess.sources import WHOLE_FILE


def _row(number: int) -> bytes:
    digest = random.Random(number).randbytes(16)
    key, path, features = b"key%d" % number, b"p" * (number % 3), b"f" * (number % 700)
    return HEAD.pack(
        digest, 1, len(key), len(path), len(features), number, 2, number, WHOLE_FILE, 3, b"known%03d" % number
    ) + b"".join((key, path, features))


ROWS = [_row(number) for number in range(1000)]


def test_a_row_is_taken_apart() -> None:
    assert rows.identity(ROWS[7]) == b"known007"
    assert rows.fields(ROWS[7]) == (b"key7", b"p", b"f" * 7, 7, 2, 7, WHOLE_FILE)


@pytest.mark.parametrize("in_memory", [1, 64, 333, 999, 1000, 5000])
def test_buckets_give_all_rows_in_order(
    tmp_path: Path, in_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_ROWS_IN_MEMORY", in_memory)
    buckets = Buckets(tmp_path / "buckets")
    for row in random.Random(0).sample(ROWS, len(ROWS)):
        buckets.append(row)
    for _ in range(2):
        assert [row for block in buckets for row in block] == sorted(ROWS)


@pytest.mark.parametrize("block", [1, 100, 1 << 18])
def test_rows_are_read_in_blocks(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_BLOCK", block)
    (tmp_path / "rows").write_bytes(b"".join(ROWS[:300]))
    assert list(rows.read(tmp_path / "rows")) == ROWS[:300]
    fields = [each for some in rows.read_fields(tmp_path / "rows") for each in some]
    assert fields == list(map(rows.fields, ROWS[:300]))
