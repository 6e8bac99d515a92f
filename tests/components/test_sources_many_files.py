"""Tables of many files: patterns, partitions in their paths, and compressed files."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from shardline.components.changes import fill_in_date, fingerprint
from shardline.components.preprocess.run import preprocess
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources.example import Example
from shardline.trainer.base.errors import SourceError
from tests.helpers import sources


def rows(start: int, count: int = 4) -> pa.Table:
    numbers = range(start, start + count)
    return pa.table(
        {"x": [float(n) for n in numbers], "label": ["even" if n % 2 == 0 else "odd" for n in numbers]}
    )


def read(source: str) -> dict[str, Example]:
    return {one.key: one for one in sources.read(sources.opened(source))}


@pytest.fixture
def days(tmp_path: Path) -> Path:
    """Returns a directory of Parquet files, one for each month and day."""
    for month, day, start in ((10, "a", 0), (11, "a", 10), (11, "b c", 20)):
        folder = tmp_path / "year=2026" / f"month={month}" / f"day={day.replace(' ', '%20')}"
        folder.mkdir(parents=True)
        pyarrow.parquet.write_table(rows(start), folder / "part-0.parquet")
    return tmp_path


def test_partitions_in_the_paths_are_columns(days: Path) -> None:
    source = sources.opened(f"table:{days}/**/*.parquet")
    assert {feature.name: feature.dtype for feature in source.features} == {
        "x": "float32", "year": "int64", "month": "int64", "day": "string",
    }  # fmt: skip
    found = read(f"table:{days}/**/*.parquet")
    assert found["year=2026/month=11/day=b%20c/part-0.parquet row 2"].features == {
        "x": 21.0, "year": 2026, "month": 11, "day": "b c",
    }  # fmt: skip
    assert len(found) == 12
    assert len(read(f"table:{days}/year=2026/month=11/*/*.parquet")) == 8


def test_keys_stay_when_a_file_comes(days: Path) -> None:
    before = read(f"table:{days}/**/*.parquet")
    (days / "year=2025/month=1/day=x").mkdir(parents=True)
    pyarrow.parquet.write_table(rows(50), days / "year=2025/month=1/day=x/part-0.parquet")
    assert before.items() <= read(f"table:{days}/**/*.parquet").items()


def test_a_file_that_comes_or_changes_is_another_content(days: Path) -> None:
    settings = PreprocessSettings(source=f"table:{days}/**/*.parquet")
    first = fingerprint(settings).digest
    assert fingerprint(settings).digest == first
    pyarrow.parquet.write_table(rows(60), days / "year=2026/month=11/day=a/part-1.parquet")
    assert fingerprint(settings).digest != first


@pytest.mark.parametrize(("end", "codec"), [(".gz", "gzip"), (".zst", "zstd")])
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_compressed_text_files(tmp_path: Path, suffix: str, end: str, codec: str) -> None:
    lines = (
        b"x,label\n1.5,a\n2.5,b\n" if suffix == "csv" else b'{"x":1.5,"label":"a"}\n{"x":2.5,"label":"b"}\n'
    )
    path = tmp_path / f"table.{suffix}{end}"
    with pa.CompressedOutputStream(str(path), codec) as out:
        out.write(lines)
    found = read(f"table:{path}")
    assert [one.features["x"] for one in found.values()] == [1.5, 2.5]


def test_types_that_differ_are_joined_or_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y,label\n1,1,a\n2,2,b\n")
    (tmp_path / "b.csv").write_text("x,y,label\n1.5,one,a\n")
    source = sources.opened(f"table:{tmp_path}/*.csv")
    assert {feature.name: feature.dtype for feature in source.features} == {"x": "float32", "y": "string"}
    (tmp_path / "c.csv").write_text("x,label\n1,a\n")
    with pytest.raises(SourceError, match=r"c\.csv' has no column 'y', which .*a\.csv' has"):
        sources.opened(f"table:{tmp_path}/*.csv")
    with pytest.raises(SourceError, match="no file"):
        sources.opened(f"table:{tmp_path}/*.parquet")


def test_a_bad_row_is_named_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,label\n1,a\n2,b\n")
    (tmp_path / "b.csv").write_text("x,label\n1,a\n2,\n")
    with pytest.raises(SourceError, match=r"b\.csv row 2': has no value in column 'label'"):
        preprocess(PreprocessSettings(source=f"table:{tmp_path}/*.csv"), tmp_path / "out")


def test_a_window_of_days_reads_the_days_that_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for day in ("2026-11-18", "2026-11-20", "2026-11-21"):
        (tmp_path / f"day={day}").mkdir()
        pyarrow.parquet.write_table(rows(int(day[-2:])), tmp_path / f"day={day}" / "part-0.parquet")
    window = fill_in_date("{last 3 days}", datetime(2026, 11, 20, tzinfo=UTC))
    found = read(f"table:{tmp_path}/day={window}/*.parquet")
    assert {one.features["day weekday"] for one in found.values()} == {2.0, 4.0}
    assert "no file for 1 of 3 alternatives: 2026-11-19" in capsys.readouterr().out
    with pytest.raises(SourceError, match="no file matches"):
        read(f"table:{tmp_path}/day={{2025-01-01,2025-01-02}}/*.parquet")
