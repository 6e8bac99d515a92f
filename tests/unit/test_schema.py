"""Schemas: what a file may say, and what of some values does not fit it."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from shardline.components.preprocess.inspect.profile import _widened
from shardline.components.preprocess.schema import Schema, SchemaCheck, read_schema
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.trainer.base.errors import SettingsError, SourceError
from shardline.trainer.manifest import Anomaly, Feature, Label


def write(path: Path, *fields: Any, **more: Any) -> str:
    path.write_text(json.dumps({"fields": fields, **more}))
    return str(path)


def schema(*fields: dict[str, Any], missing: tuple[str, ...] = ("",)) -> Schema:
    from shardline.components.preprocess.schema.schema import _field

    made = [_field({"type": "number", **field}, "schema") for field in fields]
    return Schema("s.json", "sha256:0", {field.name: field for field in made}, missing)


def found(
    wanted: Schema,
    values: dict[str, list[Any]],
    *,
    dtype: str = "float32",
    labels: tuple[Label, ...] = (),
    targets: dict[str, pa.Array] | None = None,
    column: str = "",
) -> dict[str, Anomaly]:
    """Returns the anomalies of columns, by column and problem; examples are called k0, k1, ..."""
    features = [Feature(name, dtype) for name in values]
    types = {"float32": pa.float64(), "int64": pa.int64(), "string": pa.string()}
    columns = {name: pa.array(column, types[dtype]) for name, column in values.items()} | (targets or {})
    count = len(next(iter(columns.values())))
    first, later = (SchemaCheck(wanted, features, labels, column) for _ in range(2))
    for check, part in ((first, slice(2)), (later, slice(2, None))):  # as in two processes
        keys = [f"k{index}" for index in range(count)][part]
        check.add(keys, {name: column[part] for name, column in columns.items()})
    first.merge(json.loads(json.dumps(later.found())))
    return {f"{one.column} {one.problem}": one for one in first.anomalies()}


def test_a_schema_describes_columns(tmp_path: Path) -> None:
    path = write(
        tmp_path / "s.json",
        {"name": "age", "type": "integer", "title": "Years", "constraints": {"minimum": 0, "maximum": 120}},
        {"name": "bmi", "type": "number", "shardline:maxMissing": 0.05},
        missingValues=["", "-999"],
    )
    wanted = read_schema(path)
    assert list(wanted.fields) == ["age", "bmi"]
    assert (wanted.fields["bmi"].max_missing, wanted.missing) == (0.05, ("", "-999"))
    assert wanted.digest == f"sha256:{hashlib.sha256(Path(path).read_bytes()).hexdigest()}"


def constrained(kind: str, **constraints: Any) -> dict[str, Any]:
    return {"name": "a", "type": kind, "constraints": constraints}


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (3, "must be an object"),
        ({"type": "number"}, "must be an object"),
        ({"name": "a"}, "type must be 'number', 'integer', 'string', 'boolean', 'list' or 'any', got ''"),
        ({"name": "a", "type": "float"}, "or 'any', got 'float'"),
        ({"name": "a", "type": "number", "format": "x"}, "unknown key format; there are name, type"),
        (constrained("number", unique=True), "unknown key constraints.unique; there are required, minimum"),
        (constrained("string", minimum=1), "unknown key constraints.minimum; "),
        (constrained("number", minimum="1"), "constraints.minimum must be a finite number, got '1'"),
        (constrained("number", minimum=2, maximum=1), "minimum 2 is above"),
        (constrained("number", enum=["x"]), "enum[0] must be a finite number"),
        (constrained("string", enum=[]), "enum must be a list of one or more"),
        (constrained("string", pattern="("), "pattern must be"),
        (constrained("string", pattern=")(|x"), "pattern must be"),
        (constrained("string", pattern="(?=a)a"), "of RE2"),
        (constrained("string", pattern="a{99999}"), "pattern must be"),
        (constrained("string", pattern="a{,3}"), "pattern must be"),
        (constrained("string", pattern="a{1,99999999999}"), "pattern must be"),
        (constrained("string", pattern=3), "pattern must be"),
        (constrained("string", enum=["\ud800"]), "enum[0] must be text"),
        (constrained("number", enum=[10**400]), "enum[0] must be a finite number"),
        (constrained("string", minLength=-1), "minLength must be"),
        (constrained("number", required=1), "required must be"),
        ({"name": "a", "type": "number", "constraints": 3}, "constraints must be a mapping, got 3"),
        (
            {"name": "a", "type": "number", "shardline:maxMissing": 2},
            "shardline:maxMissing must be 0 to 1, got 2",
        ),
        ({"name": "image", "type": "string"}, "check_images"),
    ],
)
def test_what_is_not_checked_is_refused(tmp_path: Path, field: Any, message: str) -> None:
    path = write(tmp_path / "s.json", field)
    with pytest.raises(SettingsError) as caught:
        read_schema(path)
    assert message in str(caught.value)
    assert path in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is no Table Schema"),
        ('{"fields": []}', "is no Table Schema"),
        ('{"fields": [{"name": "a", "type": "any"}, {"name": "a", "type": "any"}]}', "two fields 'a'"),
        (
            '{"fields": [{"name": "a", "type": "any"}], "primaryKey": "a"}',
            "unknown key primaryKey; there are fields",
        ),
        (
            '{"fields": [{"name": "a", "type": "any"}], "missingValues": [1]}',
            r"missingValues\[0\] must be text, got 1",
        ),
    ],
)
def test_a_file_that_is_no_schema_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(SettingsError, match=message):
        read_schema(str(tmp_path / "s.json"))
    with pytest.raises(SourceError, match="cannot read"):
        read_schema(str(tmp_path / "none.json"))
    with pytest.raises(SettingsError, match="on_anomaly must be 'fail' or 'warn', got 'stop'"):
        PreprocessSettings(source="digits", on_anomaly="stop")


def test_numbers_have_a_range_and_may_be_missing() -> None:
    wanted = schema({"name": "a", "constraints": {"minimum": 0, "maximum": 0.1}}, missing=("", "-999"))
    anomalies = found(wanted, {"a": [0.05, 7.0, -1.0, -999.0, math.nan, 0.10000000149, 9.0]})
    assert list(anomalies) == ["a maximum", "a minimum"]
    assert str(anomalies["a maximum"]) == (
        "column 'a': expected at most 0.1; 2 of 7 examples have something else, first 'k1' with 7.0"
    )
    assert (anomalies["a minimum"].examples, anomalies["a minimum"].key) == (1, "k2")


def test_limits_beyond_32_bits_hold(recwarn: Any) -> None:
    limits = {"minimum": -1e300, "maximum": 1e300, "enum": [1, 1e300]}
    assert not found(schema({"name": "a", "constraints": limits}), {"a": [1.0, 1.0]})
    whole = schema({"name": "a", "type": "integer", "constraints": {"maximum": 10**30}})
    assert not found(whole, {"a": [2**63 - 1, 1]}, dtype="int64")


def test_missing_values_are_counted() -> None:
    values = {"a": [1.0, math.nan, math.nan, 4.0]}
    anomalies = found(schema({"name": "a", "constraints": {"required": True}}), values)
    assert str(anomalies["a required"]) == (
        "column 'a': expected a value; 2 of 4 examples have none, first 'k1'"
    )
    assert not found(schema({"name": "a", "shardline:maxMissing": 0.5}), values)
    [anomaly] = found(schema({"name": "a", "shardline:maxMissing": 0.05}), values).values()
    assert (anomaly.problem, anomaly.expected) == ("missing values", "a value in all but 5 %")


def test_texts_have_an_enum_a_form_and_a_length() -> None:
    constraints = {"enum": ["x", "yy"], "pattern": "[a-y]+", "maxLength": 2, "minLength": 2}
    wanted = schema({"name": "a", "type": "string", "constraints": constraints})
    anomalies = found(wanted, {"a": ["yy", "", "zzz", "x"]}, dtype="string")
    assert {name: (one.examples, one.value) for name, one in anomalies.items()} == {
        "a enum": (1, "'zzz'"),
        "a pattern": (1, "'zzz'"),
        "a minLength": (1, "'x'"),
        "a maxLength": (1, "'zzz'"),
    }


def test_a_pattern_ends_and_is_of_the_whole_text() -> None:
    wanted = schema({"name": "a", "type": "string", "constraints": {"pattern": "(a+)+|x"}})
    values = ["a" * 50 + "!", "x\n", "x", "aaa"]
    assert found(wanted, {"a": values}, dtype="string")["a pattern"].examples == 2


def test_a_vector_is_checked_as_one_value() -> None:
    wanted = schema({"name": "a", "constraints": {"maximum": 5}, "shardline:maxMissing": 0})
    check = SchemaCheck(wanted, [Feature("a", "float32", (2,))], ())
    values = [[9.0, 9.0], [math.nan, 1.0], [math.nan, math.nan]]
    check.add(["k0", "k1", "k2"], {"a": pa.array(values, pa.list_(pa.float64(), 2))})
    assert [(one.problem, one.key, one.value) for one in check.anomalies()] == [
        ("maximum", "k0", "[9.0, 9.0]"), ("missing values", "k2", "")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dtype", "values", "first"),
    [
        ("number", "string", ["1", "NA", "high", "low"], (2, "'high'")),
        ("number", "string", ["1", "2", "", "3"], (3, "'1'")),  # numbers as text are no numbers to a model
        ("integer", "float32", [1.0, 2.5, math.nan, 3.0], (1, "2.5")),
        ("integer", "int64", [1, 2, 3, 4], None),
        ("boolean", "int64", [0, 1, 2, 0], (1, "2")),
        ("boolean", "string", ["true", "False", "", "perhaps"], (1, "'perhaps'")),
        ("number", "string", ["1", "true", "2", "3"], (1, "'true'")),
        ("boolean", "float32", [0.0, 1.0, math.nan, 0.0], None),
        ("string", "int64", [7, 8, 9, 9], (4, "7")),  # codes that are now all digits
        ("list", "int64", [7, 8, 9, 9], (4, "7")),
        ("any", "int64", [7, 8, 9, 9], None),
        ("any", "string", ["a", "b", "", "c"], None),
    ],
)
def test_values_of_another_type_are_found(
    kind: str, dtype: str, values: list[Any], first: tuple[int, str] | None
) -> None:
    anomalies = found(schema({"name": "a", "type": kind}), {"a": values}, dtype=dtype)
    assert list(anomalies) == (["a type"] if first else [])
    assert [(one.examples, one.value) for one in anomalies.values()] == ([first] if first else [])


def test_columns_are_missing_or_new() -> None:
    anomalies = found(schema({"name": "a"}, {"name": "b"}), {"b": [1.0], "c": [2.0]})
    assert list(anomalies) == ["a missing column", "c new column"]
    assert [one.blocks for one in anomalies.values()] == [True, False]
    assert str(anomalies["a missing column"]) == "column 'a': no such column in the source"


def classes(*indices: int) -> dict[str, pa.Array]:
    return {"label": pa.array(indices)}


def test_classes_are_known_by_their_names() -> None:
    label = Label("label", "class", ("cat", "dog", "yak"))
    field = {"name": "label", "type": "string", "constraints": {"enum": ["cat", "dog"]}}
    [anomaly] = found(schema(field), {}, labels=(label,), targets=classes(0, 2, 1, 2)).values()
    assert (anomaly.problem, anomaly.examples, anomaly.key, anomaly.value) == ("enum", 2, "k1", "'yak'")
    # A schema of the table's own columns calls it by its column.
    called = schema({**field, "name": "species"})
    assert list(found(called, {}, labels=(label,), targets=classes(0, 2), column="species")) == [
        "species enum"
    ]
    indices = Label("label", "class", ("0", "1", "2"))
    bounded = schema({"name": "label", "type": "integer", "constraints": {"maximum": 1}})
    assert list(found(bounded, {}, labels=(indices,), targets=classes(0, 1, 2))) == ["label maximum"]


def test_several_labels_have_a_field_each() -> None:
    labels = (Label("tags", "multilabel", ("a", "b")), Label("size", "regression", ("width", "height")))
    wanted = schema(
        {"name": "tags", "type": "list", "constraints": {"enum": ["a"], "required": True}},
        {"name": "width", "constraints": {"maximum": 5}},
        {"name": "height", "constraints": {"maximum": 5}},
    )
    targets = {
        "tags": pa.array([[1, 0], [1, 1], [0, 1], [0, 0]], pa.list_(pa.int64(), 2)),
        "size": pa.array([[1.0, 2.0], [1.0, 9.0], [1.0, 2.0], [1.0, 2.0]], pa.list_(pa.float64(), 2)),
    }
    anomalies = found(wanted, {}, labels=labels, targets=targets)
    assert {name: (one.examples, one.value) for name, one in anomalies.items()} == {
        "tags enum": (2, "['a', 'b']"), "tags required": (1, ""), "height maximum": (1, "9.0")
    }  # fmt: skip


def test_a_key_is_checked_where_a_field_is_called_so() -> None:
    field = {"name": "key", "type": "string", "constraints": {"pattern": "k[02]"}}
    assert found(schema(field, {"name": "a"}), {"a": [1.0, 2.0, 3.0]})["key pattern"].key == "k1"


@pytest.mark.parametrize(
    ("least", "largest", "whole", "expected"),
    [
        (18.0, 42.2, False, (15.5, 44.7)),
        (0.0, 1.0, False, (0, 1.1)),  # what is never negative stays so
        (-2.0, 0.0, False, (-2.2, 0)),
        (0.1, 0.1, False, (0.1, 0.1)),  # always the same
        (0.10000000149, 0.10000000149, False, (0.1, 0.1000001)),
        (0.0, 0.0, False, (0, 0)),
        (0, 1, True, (0, 1)),  # codes and flags stay as they are
        (10, 110, True, (0, 120)),
        (-5, 15, True, (-7, 17)),
    ],
)
def test_ranges_are_widened(least: float, largest: float, whole: bool, expected: tuple[float, float]) -> None:
    assert _widened(least, largest, whole=whole) == pytest.approx(expected)
