"""Tables as a source: CSV, JSONL and Parquet."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from shardline.components.preprocess import run
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import formats, open_source
from shardline.components.preprocess.sources.example import WHOLE_FILE, BadExample, Example, Source, Span
from shardline.trainer.base.errors import SettingsError, SourceError
from shardline.trainer.manifest import Feature
from tests.helpers.sources import bad, opened, read

FORMATS = ("csv", "jsonl", "parquet")

ROWS = [
    {"species": "setosa", "width": 0.5, "count": 1, "note": 'a,b\n"c"', "sold": True},
    {"species": "virginica", "width": 2, "count": -7, "note": "", "sold": False},
    {"species": "setosa", "width": 1e-3, "count": 2**62, "note": "ä", "sold": True},
]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    else:
        table = pa.Table.from_pylist(list(rows))
        (pyarrow.csv.write_csv if path.suffix == ".csv" else pyarrow.parquet.write_table)(table, str(path))
    return path


@pytest.mark.parametrize("suffix", FORMATS)
def test_rows_with_typed_features(tmp_path: Path, suffix: str) -> None:
    source = opened(f"table:{write(tmp_path / f'table.{suffix}', ROWS)}", label="species")
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
    for example, row in zip(examples, ROWS, strict=True):
        expected = {name: row[name] for name in ("width", "count", "note", "sold")}
        if suffix == "csv":
            expected["sold"] = str(row["sold"]).lower()
        assert dict(example.features) == expected
        assert [type(value) for value in example.features.values()][:3] == [float, int, str]


@pytest.mark.parametrize("suffix", FORMATS)
def test_key_and_image_are_columns_and_classes_are_the_whole_numbers_that_occur(
    tmp_path: Path, suffix: str
) -> None:
    rows = [{"label": 3 - 3 * i, "image": "b/../1.jpg", "id": 10 + i, "x": i} for i in range(2)]
    source = opened(f"table:{write(tmp_path / f'table.{suffix}', rows)}", key="id")
    examples = read(source)
    assert source.labels[0].outputs == ("0", "3")
    assert [(example.key, example.label) for example in examples] == [("10", 1), ("11", 0)]
    assert examples[0].image == Span(str(tmp_path / "1.jpg"), 0, WHOLE_FILE)
    assert dict(examples[1].features) == {"x": 1}


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_type_is_found_however_late(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole numbers for many blocks, and then a float."""
    monkeypatch.setattr(formats, "BATCH_BYTES", 1000)
    many = 200_000 if suffix == "csv" else 2_000  # Arrow reads a megabyte of CSV at a time
    rows = [{"label": "a", "x": i} for i in range(many)] + [{"label": "b", "x": 0.5}]
    if suffix == "parquet":
        rows = [row | {"x": float(row["x"])} for row in rows]
    source = opened(f"table:{write(tmp_path / f'table.{suffix}', rows)}")
    assert source.features == (Feature("x", "float32"),)  # type: ignore[attr-defined]
    examples = read(source)
    assert len(examples) == many + 1
    assert {type(example.features["x"]) for example in examples} == {float}
    assert examples[-1].key == f"row {many + 1}"
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
    source = opened(f"table:{tmp_path / 'table.parquet'}")
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
    assert bad(opened(f"table:{path}")) == [BadExample(f"{path} row 4", "has no value in column 'label'")]
    found = [example.features for example in opened(f"table:{path}") if isinstance(example, Example)]
    if suffix == "parquet":
        assert [str(features["x"]) for features in found] == ["1.5", "nan", "2.5"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"x": 1e39}, "has 1e+39 in column 'x', not a number that 32 bits can hold"),
        ({"xs": [0.0, -1e39]}, "has -1e+39 in column 'xs', not a number that 32 bits can hold"),
        ({"ns": [7, None]}, "has no value in column 'ns'"),
        ({"image": "../1.jpg"}, "has an image outside the table's directory"),
        ({"image": "/1.jpg"}, "has an image outside the table's directory"),
        ({"image": ""}, "has no value in column 'image'"),
    ],
)
def test_values_that_cannot_be_used(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    good = {"label": 0, "x": 1.0, "image": "1.jpg", "xs": [1.0, 2.0], "ns": [1, 2]}
    path = write(tmp_path / "table.parquet", [good, good | row, good | {"label": 1}])
    source = opened(f"table:{path}")
    assert bad(source) == [BadExample(f"{path} row 2", reason)]
    assert source.labels[0].outputs == ("0", "1")


def test_a_number_of_a_csv_file_beyond_32_bits_is_a_fault_of_its_row(tmp_path: Path) -> None:
    source = table(tmp_path, "x,label\n0.5,a\n1e39,b\n7,b\n")
    assert kinds(source) == {"x": "float32"}
    (fault,) = bad(source)
    assert fault.name.endswith("row 2")
    assert fault.reason == "has 1e+39 in column 'x', not a number that 32 bits can hold"


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_column_with_a_name_of_several_lines_is_refused(tmp_path: Path, suffix: str) -> None:
    rows = [{"a\nb": i, "label": "xy"[i % 2]} for i in range(100)]
    path = write(tmp_path / f"table.{suffix}", rows)
    with pytest.raises(SourceError, match=r"feature 'a\\nb' needs a name of one line; rename its column"):
        run.preprocess(PreprocessSettings(source=f"table:{path}"), tmp_path / "out")
    run.preprocess(PreprocessSettings(source=f"table:{path}", features={"x": "a\nb"}), tmp_path / "out")


def test_a_column_that_no_row_of_a_batch_has_has_gaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "BATCH_BYTES", 1)
    rows = [{"label": i % 2} | {key: i for key in ("a", "b") if (i < 9) == (key == "a")} for i in range(18)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = opened(f"table:{tmp_path / 'x.jsonl'}")
    assert source.features == (Feature("a", "float32"), Feature("b", "float32"))
    assert [str(one.features["b"]) for one in read(source)[7:11]] == ["nan", "nan", "9.0", "10.0"]


def test_whole_numbers_of_more_than_63_bits_are_refused(tmp_path: Path) -> None:
    table = pa.table({"label": ["a", "b"], "x": pa.array([1, 2**64 - 1], pa.uint64())})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(SourceError, match=r"a number of more than 64 bits in column 'x', 1\.8"):
        opened(f"table:{tmp_path / 'x.parquet'}")


def test_a_table_that_has_not_the_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "table.csv", [{"label": 0.5, "when": "2024-01-01", "n": 1}])
    with pytest.raises(
        SourceError, match=r"has no column 'kind' for the label, it has label, when, n; name one of these"
    ):
        opened(f"table:{path}", label="kind")
    assert opened(f"table:{path}").labels[0].kind == "regression"
    with pytest.raises(SourceError, match=r"column 'n' of .* is int64; as image, string is needed"):
        opened(f"table:{write(tmp_path / 'other.csv', [{'label': 'a', 'n': 1}])}", image="n")
    with pytest.raises(SourceError, match="has both 'label' and 'when' as label; rename one"):
        opened(f"table:{path}", label="when")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_lists_of_one_size_are_vectors_and_others_are_refused(tmp_path: Path, suffix: str) -> None:
    rows = [{"label": "a", "sizes": [1, 2], "x": 1}, {"label": "b", "sizes": [3, 4], "x": 1}]
    path = write(tmp_path / f"table.{suffix}", rows)
    assert dict(read(opened(f"table:{path}"))[1].features) == {"sizes": [3, 4], "x": 1}
    path = write(tmp_path / f"table.{suffix}", [*rows, {"label": "b", "sizes": [3], "x": 1}])
    with pytest.raises(SourceError, match=r"column 'sizes' of .* is lists of int64, 1 to 2 values"):
        opened(f"table:{path}")
    assert dict(read(opened(f"table:{path}", number="x"))[0].features) == {"number": 1}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("table.csv", b"label,x\na,1\nb\n", "cannot read '.*': CSV parse error: Row #3: Expected 2 columns"),
        ("table.csv", b"label,x\na,\xff\n", "cannot read '.*': 'utf-8' codec.*; save it as UTF-8"),
        ("table.jsonl", b"", "table.jsonl' is empty: it has no column"),
        ("table.jsonl", b'{"label": "a"}\n\n{"label"', "in row 2; write an object of JSON in each line"),
        ("table.jsonl", b'{"label": "a"}\n[1]\n', "from object to array in row 2; write an object"),
        (
            "table.jsonl",
            b'{"label": "a"}\n{"label": 1}\n',
            "/label. changed from string to number in row 2",
        ),
        ("table.xlsx", b"", "table '.*table.xlsx' is none of .csv, .tsv, .jsonl, .ndjson, .parquet"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        opened(f"table:{tmp_path / name}")


def test_a_table_without_rows_is_empty(tmp_path: Path) -> None:
    for text in ("label,x\n", "label,x"):
        (tmp_path / "table.csv").write_text(text)
        assert list(opened(f"table:{tmp_path / 'table.csv'}")) == []
    with pytest.raises(SourceError, match=r"cannot read '.*absent.csv': No such file"):
        opened(f"table:{tmp_path / 'absent.csv'}")


def table(tmp_path: Path, text: str | bytes, **settings: Any) -> Source:
    path = tmp_path / "table.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return open_source(PreprocessSettings(source=f"table:{path}", **settings))


def kinds(source: Source) -> dict[str, str]:
    return {feature.name: feature.dtype for feature in source.features}  # type: ignore[attr-defined]


def with_quotes(*rows: int, header: str = "id,text,label") -> str:
    """Returns a table of 200 rows, in some of which a text has a quotation mark: the first one's opens."""
    lines = [header]
    for number in range(200):
        mark = '"' if number in rows else ""
        text = f"{mark}t{number}" if number in rows[:1] else f"t{number}{mark}"
        cells = {"id": str(number), "text": text, "label": "ab"[number % 2]}
        lines.append(",".join(cells[name] for name in header.split(",")))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (with_quotes(50, header="id,label,text"), "ends within the quotes that open in line 52;"),
        (with_quotes(50), "ends within the quotes that open in line 52;"),
        (
            'id,text,label\n1,a,b\n2,"c,b\n3,d,a\n4",e,b\n',
            "quotes contain more than a row .*Row #3: Expected 3",
        ),
        (with_quotes(50, 52), "line 52: the quotes that open there contain the next 2 lines"),
        (with_quotes(50, 120, header="text,label"), "line 52: .* contain the next 70 lines"),
        ('"label,x\na,1\n', "ends within the quotes that open in line 1"),
        ('label,x\na,"' + "1,b\n" * 700_000, "ends within the quotes that open in line 2"),
    ],
    ids=range(7),
)
def test_quotes_never_swallow_rows(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        table(tmp_path, text, label="class:label")


def test_lines_and_delimiters_in_quotes_are_text(tmp_path: Path) -> None:
    texts = [
        'say ""hi"", she\n\nsaid',
        "eggs, 2\n3, ham\n4, milk",
        "x = [\n" + " 1,\n" * 30 + "]",
        "a\n" * 70_000,
    ]
    rows = "".join(f'{number},"{text}",{"ab"[number % 2]}\n' for number, text in enumerate(texts * 20))
    found = read(table(tmp_path, f"id,text,label\n{rows}".rstrip("\n")))
    assert [one.features["text"] for one in found] == [text.replace('""', '"') for text in texts] * 20


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_blocks_of_a_file_are_read_apart(tmp_path: Path, monkeypatch: Any, end: str, encoding: str) -> None:
    """Lines and delimiters in quotes, quotes in quotes, and quotes that are a part of a value."""
    monkeypatch.setattr(formats, "BLOCK", 64)
    monkeypatch.setattr(formats, "_COLUMN", 1)
    cells = ['a"b', '"c,\n""d"', "", '"é\n\n"', '""', '"x"" ""y"', "12", '"z"w']
    random.seed(0)
    rows = "".join(f"{number},{','.join(random.choices(cells, k=2))}{end}" for number in range(300))
    (tmp_path / "t.csv").write_bytes(f"id,a,b{end}{rows}".encode(encoding))
    read = formats.find_format("t.csv")
    found = [(block, batch.to_pylist()) for block, batch in read(str(tmp_path / "t.csv"), None, None, None)]
    assert len(found) > 20
    whole = [row for _, each in found for row in each]
    assert [row["id"] for row in whole] == list(map(str, range(300)))
    assert [list(row.values()) for row in whole] == list(csv.reader(io.StringIO(rows, newline="")))
    some = found[1::3]
    again = read(str(tmp_path / "t.csv"), None, iter([block for block, _ in some]), None)
    assert [(block, batch.to_pylist()) for block, batch in again] == some
    assert [whole[block.first - 1 :][: len(each)] for block, each in some] == [each for _, each in some]


@pytest.mark.parametrize("suffix", FORMATS)
def test_whole_numbers_with_gaps_stay_whole(tmp_path: Path, suffix: str, capsys: Any) -> None:
    ids = [17_031_000_000 + number for number in range(199)]
    rows = [{"id": one, "few": one % 7, "label": "ab"[one % 2]} for one in ids]
    rows.append({"id": None, "few": None, "label": "a"})
    source = opened(f"table:{write(tmp_path / f'table.{suffix}', rows)}")
    assert kinds(source) == {"id": "string", "few": "float32"}
    assert [one.features["id"] for one in read(source)] == [*map(str, ids), ""]
    said = capsys.readouterr().out
    assert "column 'id' is text, since it has gaps" in said
    assert "become one" not in said


@pytest.mark.parametrize("suffix", FORMATS)
def test_numbers_that_become_equal_are_reported(tmp_path: Path, suffix: str, capsys: Any) -> None:
    rows = [{"label": 20_000_000 + n % 50, "x": n / 4 + 2**24, "y": n / 4} for n in range(1000)]
    path = write(tmp_path / f"table.{suffix}", rows)
    run.preprocess(PreprocessSettings(source=f"table:{path}", label="regression:label"), tmp_path / "out")
    said = capsys.readouterr().out
    assert "different values become equal: label, x; " in said


def test_values_that_a_number_would_rewrite_are_text(tmp_path: Path, capsys: Any) -> None:
    codes = {"zip": "00123", "hex": "0x1f", "phone": "+49301", "lot": "12E4", "card": "12345678901234567890"}
    numbers = {"a": "-0.5", "b": ".5", "c": "1e-05", "d": "1.50", "e": "1E+5", "f": "-0", "g": "0"}
    names = [*codes, *numbers, "label"]
    rows = [[*codes.values(), *numbers.values(), "01"], *([*"1" * (len(names) - 1), c] for c in "12")]
    text = "\n".join(map(",".join, [names, *rows]))
    source = table(tmp_path, text)
    floats, ints = dict.fromkeys("abcde", "float32"), dict.fromkeys("fg", "int64")
    assert kinds(source) == dict.fromkeys(codes, "string") | floats | ints
    first = read(source)[0].features
    assert {name: first[name] for name in codes} == codes
    assert source.labels[0].outputs == ("01", "1", "2")
    said = capsys.readouterr().out
    for name, value in codes.items():
        assert f"column {name!r} is text, since it has {value!r}" in said
    assert "column 'label' is text, since it has '01'" in said
    said_types = {"zip": "integer", "hex": "integer", "lot": "number", "g": "text", "label": "integer"}
    source = table(tmp_path, text, columns=said_types)
    first = read(source)[0].features
    assert {name: first[name] for name in ("zip", "hex", "lot", "g")} == {
        "zip": 123, "hex": 31, "lot": 120_000.0, "g": "0"
    }  # fmt: skip
    assert source.labels[0].outputs == ("1", "2")
    assert table(tmp_path, "x,label\n1,007\n2,010\n").labels[0].outputs == ("007", "010")


@pytest.mark.parametrize("suffix", FORMATS)
def test_the_type_of_a_column_can_be_set(tmp_path: Path, suffix: str) -> None:
    rows = [{"zip": 12345, "size": 3, "label": "a"}, {"zip": None, "size": 4, "label": "b"}]
    path = write(tmp_path / f"table.{suffix}", rows)
    said = {"zip": "text", "size": "number"}
    for source in (f"table:{path}", f"table:{tmp_path}/*.{suffix}"):
        found = open_source(PreprocessSettings(source=source, columns=said))
        assert kinds(found) == {"zip": "string", "size": "float32"}
        rows = [{"zip": "12345", "size": 3}, {"zip": "", "size": 4}]
        assert [dict(one.features) for one in read(found)] == rows


def test_a_type_that_the_values_have_not_is_refused(tmp_path: Path) -> None:
    for said, message in {
        "y=integer": "column 'y' has '1.5' in row 1, which is no whole number; .*--column y=integer",
        "z=text": "--column z=text .* that is not there; correct",
    }.items():
        with pytest.raises(SourceError, match=message):
            table(tmp_path, "x,y,label\n1,1.5,a\nfoo,2,b\n", columns=dict([said.split("=")]))
    with pytest.raises(SettingsError, match="columns is for tfrecord:GLOB, table:PATH"):
        open_source(PreprocessSettings(source="digits", columns={"x": "text"}))


@pytest.mark.parametrize(("delimiter", "encoding"), [(";", "utf-8-sig"), ("\t", "utf-16"), (",", "utf-16")])
def test_other_delimiters_and_encodings(tmp_path: Path, delimiter: str, encoding: str) -> None:
    lines = ['"x"| näme |label', '1|"a,;\tb"|a', "2|ü|b"]
    source = table(tmp_path, "\r\n".join(lines).replace("|", delimiter).encode(encoding))
    assert [dict(one.features) for one in read(source)] == [{"x": 1, "näme": "a,;\tb"}, {"x": 2, "näme": "ü"}]


def test_keys_and_groups_are_text_whatever_dates_or_numbers_they_look_like(tmp_path: Path) -> None:
    text = "id;when;label\n1,5;01/02/2024;a\n2,5;03/04/2024;b\n"
    source = table(tmp_path, text, features={"key": "when"}, group="id")
    assert [(one.key, dict(one.features)) for one in read(source)] == [
        ("01/02/2024", {"id": "1,5"}),
        ("03/04/2024", {"id": "2,5"}),
    ]
    with pytest.raises(
        SourceError, match="column 'when' has dates such as '01/02/2024', where the day or the"
    ):
        table(tmp_path, text)


def test_classes_below_zero(tmp_path: Path) -> None:
    source = table(tmp_path, "x,label\n1,-1\n2,1\n3,1\n")
    assert source.labels[0].outputs == ("-1", "1")
    assert [one.label for one in read(source)] == [0, 1, 1]


def test_a_column_with_the_name_of_a_part_of_a_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="has a column 'day year', as which a part of a time is stored"):
        table(tmp_path, "day,day year,label\n2026-11-30,1,a\n2026-12-01,2,b\n")
