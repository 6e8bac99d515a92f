"""The setting that names labels, and the kind that a column's values are of."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from shardline.components.preprocess.plan.survey import Targets
from shardline.components.preprocess.schema import LabelSetting, describe_label, parse_labels, tally_label
from shardline.components.preprocess.sources.example import Example, ExampleColumns
from shardline.trainer.base.errors import BadRecordError, SettingsError, SourceError
from shardline.trainer.manifest import Label, Tally, find_constant

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
    assert parse_labels(text) == wanted


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
        parse_labels(text)


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
        ExampleColumns([label], []).add(Example("one", value))


@pytest.mark.parametrize(
    ("label", "value", "message"),
    [
        (PRICE, 3.0, "all 2 examples have the value 3 of 'price'; a constant cannot be learned"),
        (TAGS, ["x", "y", "z"], "all of the 2 examples have 'x'"),
        (TAGS, [], "none of the 2 examples have 'x'"),
    ],
)
def test_what_is_the_same_for_all_cannot_be_learned(label: Label, value: Any, message: str) -> None:
    rows, targets = ExampleColumns([label], []), Targets([label])
    for name in ("one", "two"):
        rows.add(Example(name, value))
    targets.add(rows.flush().columns)
    with pytest.raises(SourceError, match=message):
        targets.check_varied(2)


def test_parts_of_a_dataset_add_up() -> None:
    values = np.random.default_rng(0).normal(5, 3, (100, 1))
    parts = [values[:1], values[1:40], values[40:]]
    merged = Tally.merge([(len(part), tally_label(PRICE, part.tolist())) for part in parts])
    (whole,) = tally_label(PRICE, values.tolist()).spreads
    assert merged.spreads[0].deviation == pytest.approx(whole.deviation, rel=1e-12)
    assert merged.spreads[0].mean == pytest.approx(values.mean(), rel=1e-12)
    assert Tally.merge([(2, Tally((1, 1))), (3, Tally((0, 3)))]) == Tally((1, 4))


def test_a_label_is_described_in_a_line() -> None:
    spread = tally_label(PRICE, [[3.25], [88.0]])
    assert describe_label(PRICE, [spread]) == "price, regression, 3.25 to 88 USD"
    assert describe_label(KIND, [Tally((1, 1))]) == "kind, class of 2: a, b"


def test_a_split_in_which_one_answer_is_always_right_cannot_judge() -> None:
    def constant(label: Label, values: list[list[float]], trained: list[list[float]]) -> list[str]:
        (now, before), name = (tally_label(label, rows) for rows in (values, trained)), label.name
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
