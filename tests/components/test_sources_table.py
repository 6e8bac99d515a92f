"""Tables as a source: CSV, JSONL and Parquet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import (
    WHOLE_FILE,
    BadExample,
    Example,
    Source,
    Span,
    columns,
    open_source,
)
from shardline.trainer.data.features import Feature
from shardline.trainer.errors import SourceError

FORMATS = ("csv", "jsonl", "parquet")

ROWS = [
    {"species": "setosa", "width": 0.5, "count": 1, "note": 'a,b\n"c"', "sold": True},
    {"species": "virginica", "width": 2, "count": -7, "note": "", "sold": False},
    {"species": "setosa", "width": 1e-3, "count": 2**62, "note": "ä", "sold": True},
]


def opened(path: Path, **features: str) -> Source:
    return open_source(PreprocessSettings(source=f"table:{path}", features=features))


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    else:
        table = pa.Table.from_pylist(list(rows))
        (pyarrow.csv.write_csv if path.suffix == ".csv" else pyarrow.parquet.write_table)(table, str(path))
    return path


def read(source: Source) -> list[Example]:
    """Returns all examples; none may be bad."""
    examples = []
    for example in source:
        assert isinstance(example, Example), example
        examples.append(example)
    return examples


def bad(source: Source) -> list[BadExample]:
    return [example for example in source if isinstance(example, BadExample)]


@pytest.mark.parametrize("suffix", FORMATS)
def test_rows_with_typed_features(tmp_path: Path, suffix: str) -> None:
    source = opened(write(tmp_path / f"table.{suffix}", ROWS), label="species")
    assert source.labels[0].outputs == ("setosa", "virginica")
    sold = "string" if suffix == "csv" else "int64"
    assert source.features == (  # type: ignore[attr-defined]
        Feature("width", "float32"),
        Feature("count", "int64"),
        Feature("note", "string"),
        Feature("sold", sold),
    )
    examples = read(source)
    assert [example.key for example in examples] == ["row 1", "row 2", "row 3"]
    assert [example.label for example in examples] == [0, 1, 0]
    assert {example.image for example in examples} == {None}
    for example, row in zip(examples, ROWS, strict=True):
        expected = {name: row[name] for name in ("width", "count", "note", "sold")}
        if suffix == "csv":
            expected["sold"] = str(row["sold"]).lower()
        assert dict(example.features) == expected
        assert [type(value) for value in example.features.values()][:3] == [float, int, str]
        assert type(example.features["sold"]) in (int, str)


@pytest.mark.parametrize("suffix", FORMATS)
def test_whole_numbers_as_labels_keep_their_value(tmp_path: Path, suffix: str) -> None:
    rows = [{"label": label, "x": 1.0} for label in (3, 0, 3)]
    source = opened(write(tmp_path / f"table.{suffix}", rows))
    assert source.labels[0].outputs == ("0", "1", "2", "3")
    assert [example.label for example in read(source)] == [3, 0, 3]


@pytest.mark.parametrize("suffix", FORMATS)
def test_key_and_image_are_columns(tmp_path: Path, suffix: str) -> None:
    rows = [{"label": "a", "image": "b/../1.jpg", "id": 10 + i, "x": i} for i in range(2)]
    path = write(tmp_path / f"table.{suffix}", rows)
    examples = read(opened(path, key="id"))
    assert [example.key for example in examples] == ["10", "11"]
    assert examples[0].image == Span(str(tmp_path / "1.jpg"), 0, WHOLE_FILE)
    assert dict(examples[1].features) == {"x": 1}


def test_only_the_features_that_are_asked_for(tmp_path: Path) -> None:
    source = opened(write(tmp_path / "table.parquet", ROWS), label="species", number="count")
    assert [dict(example.features) for example in read(source)] == [{"number": row["count"]} for row in ROWS]


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_type_is_found_however_late(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole numbers for many blocks, and then a float."""
    monkeypatch.setattr(columns, "_JSON_ROWS", 100)
    rows = [{"label": "a", "x": i} for i in range(200_000)] + [{"label": "b", "x": 0.5}]
    if suffix == "parquet":
        rows = [row | {"x": float(row["x"])} for row in rows]
    source = opened(write(tmp_path / f"table.{suffix}", rows))
    assert source.features == (Feature("x", "float32"),)  # type: ignore[attr-defined]
    examples = read(source)
    assert len(examples) == 200_001
    assert {type(example.features["x"]) for example in examples} == {float}
    assert examples[-1].key == "row 200001"
    assert examples[-1].features["x"] == 0.5


def test_dictionaries_and_large_strings_of_parquet(tmp_path: Path) -> None:
    table = pa.table(
        {
            "label": pa.array(["b", "a", "b"]).dictionary_encode(),
            "text": pa.array(["x", "y", "z"], pa.large_string()),
            "small": pa.array([1, 2, 3], pa.uint8()),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "table.parquet")
    source = opened(tmp_path / "table.parquet")
    assert source.labels[0].outputs == ("a", "b")
    assert dict(read(source)[2].features) == {"text": "z", "small": 3}


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_missing_value_is_named_by_row_and_column(tmp_path: Path, suffix: str) -> None:
    rows = [
        {"label": "a", "x": 1.5, "n": 1},
        {"label": "b", "x": None, "n": 1},
        {"label": "a", "x": 2.5, "n": None},
    ]
    path = write(tmp_path / f"table.{suffix}", [*rows, {"label": None, "x": 1.0, "n": 1}])
    assert bad(opened(path)) == [
        BadExample(f"{path} row 4", "has no value in column 'label'"),
    ]
    found = [example.features for example in opened(path) if isinstance(example, Example)]
    if suffix == "parquet":
        assert [str(features["x"]) for features in found] == ["1.5", "nan", "2.5"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"x": 1e39}, "has 1e+39 in column 'x', not a number that 32 bits can hold"),
        ({"x": float("-inf")}, "has -inf in column 'x', not a number that 32 bits can hold"),
        ({"label": -1}, "has label -1 in column 'label', out of range 0..99,999"),
        ({"label": 10**6}, "has label 1000000 in column 'label', out of range 0..99,999"),
        ({"image": "../1.jpg"}, "has an image outside the table's directory in column 'image'"),
        ({"image": "/1.jpg"}, "has an image outside the table's directory in column 'image'"),
        ({"image": ""}, "has no value in column 'image'"),
    ],
)
def test_values_that_cannot_be_used(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    good = {"label": 0, "x": 1.0, "image": "1.jpg"}
    path = write(tmp_path / "table.parquet", [good, good | row, good | {"label": 1}])
    source = opened(path)
    assert bad(source) == [BadExample(f"{path} row 2", reason)]
    assert source.labels[0].outputs == ("0", "1")


def test_a_table_that_has_not_the_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "table.csv", [{"label": 0.5, "when": "2024-01-01", "n": 1}])
    with pytest.raises(
        SourceError, match=r"has no column 'kind' for the label, it has label, when, n; name one of these"
    ):
        opened(path, label="kind")
    assert opened(path).labels[0].kind == "regression"
    with pytest.raises(SourceError, match=r"column 'n' of .* is int64; as image, string is needed"):
        opened(write(tmp_path / "other.csv", [{"label": "a", "n": 1}]), image="n")
    with pytest.raises(SourceError, match="has a column 'label' beside 'when' for it; rename it"):
        opened(path, label="when")


def test_types_that_no_example_has(tmp_path: Path) -> None:
    path = write(tmp_path / "table.parquet", [{"label": "a", "sizes": [1, 2], "x": 1}])
    with pytest.raises(SourceError, match=r"column 'sizes' of .* is list.*; only whole numbers, floats"):
        opened(path)
    assert dict(read(opened(path, number="x"))[0].features) == {"number": 1}
    path = write(tmp_path / "table.jsonl", [{"label": "a", "sizes": [1, 2]}])
    with pytest.raises(SourceError, match=r"column 'sizes' of .* is a list; only whole numbers, floats"):
        opened(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("table.csv", b"", "cannot read '.*table.csv': Empty CSV file"),
        ("table.csv", b"label,label\na,b\n", "has a column 'label' 2 times; rename it"),
        ("table.csv", b"label,x\na,1\nb\n", "cannot read '.*': CSV parse error: Row #3: Expected 2 columns"),
        ("table.csv", b"label,x\na,\xff\n", "cannot read '.*': .*invalid UTF8"),
        ("table.jsonl", b"", "table.jsonl' is empty: it has no column"),
        ("table.jsonl", b'{"label": "a"}\n\n{"label"', "row 2 is not JSON: "),
        ("table.jsonl", b'{"label": "a"}\n[1]\n', r"row 2 is \[1\], not a JSON object"),
        (
            "table.jsonl",
            b'{"label": "a"}\n{"label": 1}\n',
            "row 2: 1 in column 'label' is int64, in the rows before it is string",
        ),
        ("table.parquet", b"PAR1 or not", "cannot read '.*table.parquet': "),
        ("table.xlsx", b"", "table '.*table.xlsx' is none of .csv, .jsonl, .ndjson, .parquet"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        opened(tmp_path / name)


def test_a_table_without_rows_is_empty(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("label,x\n")
    assert list(opened(tmp_path / "table.csv")) == []
    with pytest.raises(SourceError, match=r"cannot read '.*absent.csv': No such file"):
        opened(tmp_path / "absent.csv")
