"""Rows: in order whatever the order in which they come, and the same from memory and from files."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from shardline.components.preprocess.plan import records
from shardline.components.preprocess.plan.records import HEAD, Buckets, Records
from shardline.components.preprocess.sources.example import WHOLE_FILE
from shardline.trainer.manifest import KEY_BYTES


def _rows(count: int) -> Records:
    """Rows with digests that are mostly different, and texts of many lengths."""
    heads, texts, draw = np.zeros(count, HEAD), list[tuple[bytes, ...]](), random.Random(0)
    for number, head in enumerate(heads):
        parts = b"key%d" % number, b"p" * (number % 3), b"f" * (number % 700)
        head["order"], head["order_low"] = draw.getrandbits(64) - draw.getrandbits(64) % 2, number % 7
        head["label"], head["location"], head["offset"], head["length"] = number, 2, number, WHOLE_FILE
        head["key_hash"], head["code"] = number + 1, 1
        texts.append(parts)
    heads["order"][10:300:10] = heads["order"][10]  # the same content under several keys
    return Records.make(heads, *zip(*texts, strict=True))


ROWS = _rows(1000)


def _list(parts: Records) -> list[tuple[object, ...]]:
    texts = zip(*(column.to_pylist() for column in parts.texts), strict=True)
    return [(*head, b"".join(each)) for head, each in zip(parts.heads.tolist(), texts, strict=True)]


IN_ORDER = sorted(_list(ROWS), key=lambda row: (row[0], row[1], row[-2], *row[8:11], *row[6:8], row[2]))


def test_a_record_is_taken_apart() -> None:
    assert records.key_hash_bytes(ROWS.heads[6:8]) == bytes([*[0] * 7, 7, *[0] * 7, 8])
    assert len(records.key_hash_bytes(ROWS.heads)) == KEY_BYTES * 1000
    assert list(ROWS.fields())[7] == (b"key7", b"p", b"f" * 7, 7, 2, 7, WHOLE_FILE)


@pytest.mark.parametrize("together", [1_000, 1 << 24])
@pytest.mark.parametrize("in_memory", [1, 5_000, 30_000, 80_000, 1 << 24])
def test_buckets_yield_all_records_in_order(
    tmp_path: Path, in_memory: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_BYTES_IN_MEMORY", in_memory)
    monkeypatch.setattr(records, "_BYTES_SORTED", together)
    buckets, order = Buckets(tmp_path / "buckets"), np.array(random.Random(0).sample(range(1000), 1000))
    for start in range(0, 1000, 50):
        buckets.append(ROWS.take(order[start : start + 50]))
    for _ in range(2):
        assert [row for block in buckets for row in _list(block)] == IN_ORDER


@pytest.mark.parametrize("together", [1, 100, 4096])
def test_records_are_read_as_they_were_written(tmp_path: Path, together: int) -> None:
    for start in range(0, 300, 30):
        records.append(tmp_path / "rows", ROWS.take(np.arange(start, start + 30)))
    found = list(records.read_records(tmp_path / "rows", together))
    assert [row for block in found for row in _list(block)] == _list(ROWS)[:300]
    assert together / 2 <= max(block.count for block in found) <= together or len(found) == 1
