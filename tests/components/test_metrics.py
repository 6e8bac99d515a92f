"""Metrics of outputs that are no proper probabilities, and slices of columns that are no proper numbers."""

import numpy as np
import pytest

from shardline.components.validate.classes import ClassOutcomes, score
from tests.helpers.labels import class_label


def outcomes(probabilities, **columns):
    """Returns outcomes of two classes, all of the first, all of them right."""
    found = np.array(probabilities, np.float32)
    nothing = np.zeros(len(found), np.int64)
    arrays = {name: np.array(values) for name, values in columns.items()}
    return ClassOutcomes(class_label(("no", "yes")), nothing, found, arrays, predicted=nothing)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param([1.005, -0.005], id="beside 0 to 1"),
        pytest.param([0.0, 0.0], id="a sum of 0"),
        pytest.param([-0.5, -0.5], id="all below 0"),
        pytest.param([2.0, -2.0], id="a sum of 0 of other than 0"),
    ],
)
def test_rows_that_are_no_probabilities_have_a_log_loss(row):
    found = score(outcomes([row, [0.5, 0.5], [0.5, 0.5]]), ())

    halves, ones = (2, 1) if max(row) > 0 else (2, 0)
    assert found["log_loss"] == pytest.approx(np.log(2) * halves / (halves + ones), abs=1e-6)


def test_where_no_row_is_a_probability_there_is_no_log_loss():
    assert "log_loss" not in score(outcomes([[0.0, 0.0]] * 3), ())


@pytest.mark.parametrize("distinct", [3, 100])
def test_values_that_are_not_finite_are_a_slice(distinct):
    prices = [*(float(i % distinct) for i in range(300)), np.nan, np.nan, np.inf, -np.inf]
    found = outcomes([[1, 0]] * 304, price=prices).slices(1)

    sizes = {item.name: item.examples for item in found if item.name.startswith("price=")}
    assert sizes.pop("price=missing") == 4
    assert sum(sizes.values()) == 300
    assert len(sizes) == (3 if distinct == 3 else 4)
    assert not any("inf" in name or "nan" in name for name in sizes)
