"""Kinds and classes of labels, found from columns, and their targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shardline.components.preprocess.schema import encode_targets, find_labels, parse_labels
from shardline.trainer.base.errors import SourceError
from shardline.trainer.manifest import Label

TYPES = {
    "int64": pa.int64(), "float32": pa.float64(), "string": pa.string(), "strings": pa.list_(pa.string())
}  # fmt: skip


def found(kind: str, values: Sequence[Any], wanted: str = "x") -> Label:
    half = len(values) // 2
    parts = [pa.array(values[:half], TYPES[kind]), pa.array(values[half:], TYPES[kind])]
    (label,) = find_labels(parse_labels(wanted), {"x": kind, "y": "int64"}, lambda _: parts)
    return label


def encoded(kind: str, values: Sequence[Any], wanted: str = "x") -> tuple[list[Any], dict[int, str]]:
    """The targets, None where a row has a fault, which comes second."""
    (setting,) = parse_labels(wanted)
    arrays = [pa.array(values, TYPES[kind])]
    # A slice: rows count from its start.
    stored, faults = encode_targets(found(kind, values, wanted), setting, [arrays[0].slice(1)])
    reasons = {row: each.reason(row) for each in reversed(faults) for row in np.flatnonzero(each.mask)}
    return [None if row in reasons else value for row, value in enumerate(stored.to_pylist())], reasons


def test_the_kind_follows_from_the_values_where_they_leave_no_doubt() -> None:
    assert found("string", ["b", "a", "", None]) == Label("label", "class", ("a", "b"))
    assert found("float32", [1.5, 1.0]) == Label("label", "regression", ("x",))
    assert found("float32", [float(value) for value in range(60)]).kind == "regression"
    assert found("int64", [0, 2, 0, None]) == Label("label", "class", ("0", "2"))
    assert found("strings", [["b"], [], ["a", "b"]]) == Label("label", "multilabel", ("a", "b"))


@pytest.mark.parametrize(
    ("kind", "values", "classes", "expected"),
    [
        ("int64", [5, 1, 2, 10], ("1", "2", "5", "10"), [0, 1, 3]),
        ("int64", [1, -1, 0], ("-1", "0", "1"), [0, 1]),
        ("int64", [0, 1, 99_999_999], ("0", "1", "99999999"), [1, 2]),
        ("float32", [1.0, -0.0, None, float("nan"), 1.0], ("0", "1"), [0, None, None, 1]),
        ("string", ["cat ", "cat", "\tdog", "", None], ("cat", "dog"), [0, 1, None, None]),
        ("string", ["café", "cafe\u0301", "tea"], ("café", "tea"), [0, 1]),
    ],
)
def test_classes_are_the_values_that_occur(
    kind: str, values: list[Any], classes: tuple[str, ...], expected: list[int | None]
) -> None:
    assert found(kind, values) == found(kind, values, "class:x") == Label("label", "class", classes)
    targets_found, reasons = encoded(kind, values)
    assert targets_found == expected
    assert set(reasons.values()) <= {"has no value in column 'x'"}


def test_a_number_that_is_not_whole_is_no_class() -> None:
    with pytest.raises(SourceError, match=r"'x' has 1\.5 in row 3, .* label=regression:x"):
        found("float32", [0.0, 1.0, 1.5], "class:x")


@pytest.mark.parametrize("values", [list(range(51)) * 20, list(range(20)) * 9])
def test_many_whole_numbers_are_never_silently_classes(values: list[int]) -> None:
    with pytest.raises(SourceError, match="label=regression:x, or classes, label=class:x"):
        found("int64", values)
    assert found("int64", values, "class:x").kind == "class"
    assert found("int64", values, "regression:x") == Label("label", "regression", ("x",))


def test_too_many_classes_are_refused() -> None:
    with pytest.raises(SourceError, match="more than 100,000 different values"):
        found("int64", range(100_001), "class:x")


def test_numbers_to_predict_are_finite_in_32_bits() -> None:
    values = [0.5, 1e39, None, float("nan"), float("-inf"), -2.5]
    result, reasons = encoded("float32", values, "regression:x")
    assert result == [None, None, None, None, -2.5]
    assert "has 1e+39 in column 'x'" in reasons[0]
    assert "no value" in reasons[1]
    assert "-inf" in reasons[3]
    assert encoded("int64", [0, 3], "regression:x")[0] == [3.0]


def test_several_names_are_0_or_1_for_each() -> None:
    values = ["b", "a| b", "", None, "cafe\u0301|", "café"]
    assert found("string", values, "multilabel:x").outputs == ("a", "b", "café")
    result, reasons = encoded("string", values, "multilabel:x")
    assert result == [[1, 1, 0], [0, 0, 0], None, [0, 0, 1], [0, 0, 1]]
    assert reasons == {2: "has no value in column 'x'"}
    assert encoded("strings", [["b"], ["a ", "b"], [], None])[0] == [[1, 1], [0, 0], None]


def test_a_name_that_is_not_of_the_label_is_a_fault() -> None:
    label, (setting,) = Label("label", "multilabel", ("a", "b")), parse_labels("multilabel:x")
    _, faults = encode_targets(label, setting, [pa.array(["a", "c|b", ""])])
    assert [(fault.mask.tolist(), fault.reason(1)) for fault in faults] == [
        ([False, True, False], "has 'c|b' in column 'x', not only its names")
    ]


def test_columns_of_0_and_1_are_several_labels() -> None:
    (setting,) = parse_labels("multilabel:x,y")
    label = found("int64", [0], "multilabel:x,y")
    assert label == Label("label", "multilabel", ("x", "y"))
    arrays = [pa.array(["0", " True", "no", None]), pa.array([1.0, 0.0, 1.0, 0.5])]
    stored, faults = encode_targets(label, setting, arrays)
    assert stored.to_pylist()[:2] == [[0, 1], [1, 0]]
    assert [fault.mask.tolist() for fault in faults] == [
        [False, False, False, True], [False, False, True, True], [False, False, False, True]
    ]  # fmt: skip
    assert faults[1].reason(2) == "has 'no' in column 'x', not 0 or 1"


def test_names_with_a_bar_between_them_are_asked_for() -> None:
    values = ["cat", "dog", "cat|dog"]
    with pytest.raises(SourceError, match=r"has 'cat\|dog': say whether .* label=multilabel:"):
        found("string", values)
    kinds = [found("string", values, wanted).kind for wanted in ("class:x", "multilabel:x")]
    assert kinds == ["class", "multilabel"]
    assert found("string", ["a|b", "c"]).kind == "class"


def test_a_type_that_does_not_fit_the_kind_is_refused() -> None:
    with pytest.raises(SourceError, match="column 'x' is lists of text; as a label of kind regression"):
        found("strings", [["a"]], "regression:x")
    with pytest.raises(SourceError, match="column 'x' is lists of text; as a label of kind multilabel"):
        found("strings", [["a"]], "multilabel:x,y")


@pytest.mark.parametrize("wanted", ["x", "regression:x"])
def test_text_in_a_column_of_numbers_is_named_by_its_row(wanted: str) -> None:
    with pytest.raises(SourceError, match="column 'x' has 'n/a' in row 3, which is no number; correct it"):
        found("string", ["1", "", "n/a", "2.5", "-1e3"], wanted)
    assert found("string", ["1", "n/a"], "class:x").outputs == ("1", "n/a")


def test_text_that_is_another_in_each_row_is_not_silently_classes() -> None:
    values = [f"n{number}" for number in range(20)]
    with pytest.raises(SourceError, match=r"'x' has 20 different texts in 20 rows, .* label=class:x"):
        found("string", values)
    assert len(found("string", values, "class:x").outputs) == 20
    assert len(found("string", values * 2).outputs) == 20
