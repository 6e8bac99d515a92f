"""Sources with anything in them: examples, or one line, never a traceback."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardline.components.preprocess.run import plan_dataset
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import open_source
from shardline.components.preprocess.sources.columns import Columns
from shardline.components.preprocess.tfrecord import mask
from shardline.trainer.base.errors import BadRecordError, ShardlineError, SourceError
from tests.helpers.datasets import serialize
from tests.helpers.mutations import JSON
from tests.helpers.preprocessing import run

tries = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))

CSV = b"label,key,image,weight\ncat,1,a.png,0.5\ndog,2,b.png,1.5\ncat,3,c.png,2.5\n"
WORDS = [b",", b'"', b"\n", b"\0", b"\xff", b"label", b"image", b"key", b"nan", b"1e999", b"-1", b"../../x"]


def parquet() -> bytes:
    table = pa.table({"label": ["cat", "dog"] * 50, "key": list(map(str, range(100))), "x": np.arange(100.0)})
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def records() -> bytes:
    made = []
    for number in range(4):
        data = serialize({"image": b"image", "label": number % 2, "key": str(number)})
        length = len(data).to_bytes(8, "little")
        made += length, mask(google_crc32c.value(length)), data, mask(google_crc32c.value(data))
    return b"".join(made)


PARQUET, RECORDS = parquet(), records()


def outcome(source: str, directory: Path, **more: object) -> str:
    """Reads a source to its end; returns what it is refused with, "" where it is not."""
    skip = {"on_bad_record": "skip", "max_bad_fraction": 1.0, "processes": 1}
    wanted = PreprocessSettings(source=source, **skip, **more)
    try:
        for _ in open_source(wanted):
            pass
        plan_dataset(wanted, directory / "out", overwrite=True)
    except ShardlineError as error:
        return str(error)
    return ""


@st.composite
def spoiled(draw: st.DrawFn, data: bytes) -> bytes:
    """Returns bytes with some of them replaced, removed or added."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = at + draw(st.integers(0, 12))
        data = data[:at] + draw(st.sampled_from(WORDS) | st.binary(max_size=12)) + data[end:]
    return data


@tries
@given(content=spoiled(CSV))
@pytest.mark.parametrize("form", ["table", "labels"])
def test_any_csv(tmp_path: Path, form: str, content: bytes) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(content if form == "table" else content.replace(b"image", b"path"))
    source = f"table:{path}" if form == "table" else f"images:{tmp_path}"
    assert "\n" not in outcome(source, tmp_path / "outer", labels="" if form == "table" else str(path))


@tries
@given(rows=st.lists(st.dictionaries(st.sampled_from(["label", "key", "image", "x"]), JSON), max_size=4))
def test_any_jsonl(tmp_path: Path, rows: list[object]) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"label": "a", "key": "k"}, *rows])))
    assert "\n" not in outcome(f"table:{path}", tmp_path / "outer")


@tries
@given(data=st.data())
@pytest.mark.parametrize(
    ("form", "whole", "pack"),
    [("table", PARQUET, bytes), ("tfrecord", RECORDS, bytes), ("tfrecord", RECORDS, gzip.compress)],
    ids=["parquet", "tfrecord", "tfrecord.gz"],
)
def test_any_binary_file(tmp_path: Path, form: str, whole: bytes, pack: Any, data: st.DataObject) -> None:
    path = tmp_path / ("x.parquet" if form == "table" else "x.tfrecord")
    path.write_bytes(pack(data.draw(spoiled(whole))))
    assert "\n" not in outcome(f"{form}:{path}", tmp_path / "outer")


def test_a_flipped_bit_in_the_footer_of_parquet_does_not_end_the_process(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"label": ["cat", "dog"] * 50, "n": [*range(99), None]}), path)
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    child = os.fork()  # Arrow would end this one
    if not child:
        for place in range(footer, len(content)):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with contextlib.suppress(SourceError):
                Columns(str(path))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_missing_whole_numbers_are_found_without_statistics(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"label": [1, 2], "n": [1, None]}), path, write_statistics=False)
    assert Columns(str(path)).scan.gaps == ("n",)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("source", ["table:x.csv", "table:x.jsonl", "tfrecord:x.tfrecord", "images:."])
def test_a_pipe_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x.csv", "x.jsonl", "x.tfrecord"):
        os.mkfifo(name)
    labels = "x.csv" if source == "images:." else ""
    assert "it is not a file but a pipe" in outcome(source, tmp_path / "outer", labels=labels)


@pytest.mark.timeout(60)
def test_an_image_that_is_a_pipe_is_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"label": "a", "image": "pipe"}\n{"label": "b", "image": "pipe"}\n')
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadRecordError, match="empty file"):
        run(f"table:{tmp_path / 'x.jsonl'}", tmp_path / "out", split={"train": 1.0})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b"[" * 100_000, "changed from object to array in row 1"),
        (
            "x.jsonl",
            b'{"label": "a", "x": 12345678901234567890}',
            "a number of more than 64 bits in column 'x'",
        ),
        ("x.jsonl", b'{"label": "' + b"a" * (65 << 20), "has a row of more than 64 MiB"),
    ],
    ids=["deep", "large number", "long line"],
)
def test_what_no_table_holds(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        open_source(PreprocessSettings(source=f"table:{tmp_path / name}"))
