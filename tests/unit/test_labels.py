"""The setting that names labels, and the kind that a column's values are of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from shardline.components.preprocess.plan.survey import Targets
from shardline.components.preprocess.schema import labels
from shardline.components.preprocess.schema.labels import LabelSetting
from shardline.components.preprocess.write import describe_label, tally
from shardline.trainer.base.errors import BadRecordError, SettingsError, SourceError
from shardline.trainer.data.features import Label, Tally, find_constant

KIND = Label("kind", "class", ("a", "b"))
PRICE = Label("price", "regression", ("price",), ("USD",))
TAGS = Label("tags", "multilabel", ("x", "y", "z"))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", ()),
        ("fare", (LabelSetting("", ("fare",), ()),)),
        ("regression:fare [USD]", (LabelSetting("regression", ("fare",), ("USD",)),)),
        ("fare [USD]", (LabelSetting("regression", ("fare",), ("USD",)),)),
        ("class:kind; regression: x , y [m]",
         (LabelSetting("class", ("kind",)), LabelSetting("regression", ("x", "y"), ("", "m")))),
        ("multilabel:a,b", (LabelSetting("multilabel", ("a", "b")),)),
    ],
)  # fmt: skip
def test_the_setting_is_read(text: str, wanted: tuple[LabelSetting, ...]) -> None:
    assert labels.parse(text) == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("regresion:fare", "kind 'regresion'; there are class, multilabel, regression; did you mean"),
        ("class:a,b", "has 2 columns; several are multilabel:a,b"),
        ("class:kind [m]", "has a unit; only numbers have one"),
        ("regression:a;class:a", "names column 'a' twice"),
        ("regression:a,,b", "has a column without a name"),
        (";", "names no column"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message.replace("?", r"\?")):
        labels.parse(text)


def found(kind: str, values: Sequence[Any], wanted: str = "x") -> Label:
    (label,) = labels.find_labels(labels.parse(wanted), {"x": kind, "y": "int64"}, lambda _: values)
    return label


def test_the_kind_follows_from_the_values_where_they_leave_no_doubt() -> None:
    assert found("string", ["b", "a", "", None]) == Label("label", "class", ("a", "b"))
    assert found("float32", [1.5]) == Label("label", "regression", ("x",))
    assert found("int64", [0, 2, 0, None]) == Label("label", "class", ("0", "1", "2"))
    assert found("strings", [["b"], [], ["a", "b"]]) == Label("label", "multilabel", ("a", "b"))


@pytest.mark.parametrize("values", [list(range(51)) * 20, list(range(20)) * 9])
def test_many_whole_numbers_are_never_silently_classes(values: list[int]) -> None:
    with pytest.raises(SourceError, match="label=regression:x, or classes, label=class:x"):
        found("int64", values)
    assert found("int64", values, "class:x").kind == "class"
    assert found("int64", values, "regression:x") == Label("label", "regression", ("x",))


@pytest.mark.parametrize(
    ("values", "classes"),
    [
        ([0, 1, 3], ("0", "1", "2", "3")),
        ([0, 1, 2, 99_999_999], ("0", "1", "2")),
        ([10_117, 10_115, 9], ("9", "10115", "10117")),
        ([2_000_000_001, 2_000_000_000, -1], ("2000000000", "2000000001")),
        ([1, -1], ("-1", "1")),
        ([0, -7, -1], ("-7", "-1", "0")),
    ],
)
def test_whole_numbers_far_apart_are_names_of_classes(values: list[int], classes: tuple[str, ...]) -> None:
    (label,) = labels.find_labels(labels.parse("class:zip"), {"zip": "int64"}, lambda _: values)
    assert label.class_names == classes


def test_names_with_a_bar_between_them_are_asked_for() -> None:
    def found(wanted: str, values: list[str]) -> str:
        return labels.find_labels(labels.parse(wanted), {"tags": "string"}, lambda _: values)[0].kind

    values = ["cat", "dog", "cat|dog"]
    with pytest.raises(
        SourceError, match=r"has 'cat\|dog': say whether that is several names, label=multilabel:"
    ):
        found("tags", values)
    assert [found(wanted, values) for wanted in ("class:tags", "multilabel:tags")] == ["class", "multilabel"]
    assert found("tags", ["a|b", "c"]) == "class"


def test_columns_of_0_and_1_are_several_labels() -> None:
    assert found("int64", [0], "multilabel:x,y") == Label("label", "multilabel", ("x", "y"))
    assert found("string", ["a|b", "c", ""], "multilabel:x").outputs == ("a", "b", "c")


def test_a_type_that_does_not_fit_the_kind_is_refused() -> None:
    with pytest.raises(
        SourceError, match="column 'x' is lists of text; as a label of kind regression, whole"
    ):
        found("strings", [["a"]], "regression:x")
    with pytest.raises(SourceError, match=r"'x' is floats; as a label of kind class, whole numbers"):
        found("float32", [1.0], "class:x")
    with pytest.raises(SourceError, match="column 'x' is lists of text; as a label of kind multilabel"):
        labels.find_labels(labels.parse("multilabel:x,y"), {"x": "strings", "y": "int64"}, lambda _: [["a"]])


@pytest.mark.parametrize("wanted", ["x", "regression:x"])
def test_text_in_a_column_of_numbers_is_named_by_its_row(wanted: str) -> None:
    with pytest.raises(SourceError, match="column 'x' has 'n/a' in row 3, which is no number; correct it"):
        found("string", ["1", "", "n/a", "2.5", "-1e3"], wanted)
    assert found("string", ["1", "n/a"], "class:x").outputs == ("1", "n/a")


def test_text_that_is_another_in_each_row_is_not_silently_classes() -> None:
    values = [f"n{number}" for number in range(20)]
    with pytest.raises(SourceError, match=r"'x' has 20 different texts in 20 rows, .* label=class:x"):
        found("string", values)
    with pytest.raises(SourceError, match=r"such as '0,5', .*write numbers with a point, not a comma"):
        found("string", [f"{number},5" for number in range(20)])
    assert len(found("string", values, "class:x").outputs) == 20
    assert len(found("string", values * 2).outputs) == 20


def test_the_class_index_is_of_the_first_label_that_is_a_class() -> None:
    other = Label("other", "class", tuple("abcdefgh"))
    targets = Targets([PRICE, KIND, other])
    for kind in (0, 1):
        assert targets.serialize({"price": 1.0, "kind": kind, "other": 7}, "one")[0] == kind
    assert Targets([PRICE]).serialize(2.0, "one")[0] == 0


@pytest.mark.parametrize(
    ("label", "value", "reason"),
    [
        (PRICE, math.nan, "'price' is nan, not a finite number"),
        (PRICE, "12", "'price' is '12', not a number"),
        (PRICE, 1e39, "not a finite number"),
        (PRICE, (1.0, 2.0), "has 2 numbers for 1"),
        (TAGS, ["w"], "has 'w', which is none of its names"),
        (TAGS, [0, 1], "not a 0 or 1 for each"),
        (TAGS, "x", "not a list of names"),
    ],
)
def test_a_value_that_its_label_cannot_have_is_refused(label: Label, value: Any, reason: str) -> None:
    with pytest.raises(BadRecordError, match=reason):
        Targets([label]).serialize(value, "one")


@pytest.mark.parametrize(
    ("label", "value", "message"),
    [
        (PRICE, 3.0, "all 2 examples have the value 3 of 'price'; a constant cannot be learned"),
        (TAGS, ["x", "y", "z"], "all of the 2 examples have 'x'"),
        (TAGS, [], "none of the 2 examples have 'x'"),
    ],
)
def test_what_is_the_same_for_all_cannot_be_learned(label: Label, value: Any, message: str) -> None:
    targets = Targets([label])
    for name in ("one", "two"):
        targets.serialize(value, name)
    with pytest.raises(SourceError, match=message):
        targets.check(2)


def test_parts_of_a_dataset_add_up() -> None:
    values = np.random.default_rng(0).normal(5, 3, (100, 1))
    parts = [values[:1], values[1:40], values[40:]]
    merged = Tally.merge([(len(part), tally(PRICE, part.tolist())) for part in parts])
    (whole,) = tally(PRICE, values.tolist()).spreads
    assert merged.spreads[0].deviation == pytest.approx(whole.deviation, rel=1e-12)
    assert merged.spreads[0].mean == pytest.approx(values.mean(), rel=1e-12)
    assert Tally.merge([(2, Tally((1, 1))), (3, Tally((0, 3)))]) == Tally((1, 4))


def test_a_label_is_described_in_a_line() -> None:
    spread = tally(PRICE, [[3.25], [88.0]])
    assert describe_label(PRICE, [spread]) == "price, regression, 3.25 to 88 USD"
    assert describe_label(KIND, [Tally((1, 1))]) == "kind, class of 2: a, b"


def test_a_split_in_which_one_answer_is_always_right_cannot_judge() -> None:
    def constant(label: Label, values: list[list[float]], trained: list[list[float]]) -> list[str]:
        (now, before), name = (tally(label, rows) for rows in (values, trained)), label.name
        return list(find_constant([label], {name: now}, {name: before}, len(values)))

    assert constant(KIND, [[1], [1]], [[0], [1]]) == ["has no class but 'b' that training has"]
    # Of the other class nothing can be learnt.
    assert constant(KIND, [[0], [1]], [[1], [1]]) == ["has no class but 'b' that training has"]
    assert constant(KIND, [[0], [0]], [[1], [1]]) == ["has no class that training has"]
    assert constant(KIND, [[0], [1]], [[0], [1]]) == []
    assert constant(TAGS, [[0, 1, 1]] * 2, [[1, 0, 0]]) == ["has the same labels in all examples"]
    assert constant(TAGS, [[0, 1, 1], [0, 1, 0]], [[1, 0, 0]]) == []
    assert constant(PRICE, [[3.5], [3.5]], [[1], [2]]) == ["has the same numbers in all examples"]
    assert constant(PRICE, [[3.5], [3.6]], [[1], [2]]) == []
