"""Areas under curves, log loss and the five most probable: as scikit-learn has them, and their intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics

from shardline.components.validate.metrics.intervals import measure_roc_pr
from shardline.components.validate.metrics.outcomes import MAX_CURVES, ClassOutcomes
from tests.helpers.labels import class_label


def outcomes(seed: int, examples: int, classes: int, digits: int = 9, noise: float = 1.0) -> ClassOutcomes:
    """Returns outcomes; few digits of the probabilities make many of them equal."""
    labels = np.random.default_rng(seed).integers(0, classes, examples)
    logits = np.random.default_rng(seed + 1).normal(0, noise, (examples, classes))
    logits[np.arange(examples), labels] += 1
    odds = np.exp(logits)
    probabilities = (odds / odds.sum(axis=1, keepdims=True)).round(digits).astype(np.float32)
    label = class_label(f"c{number}" for number in range(classes))
    return ClassOutcomes(label, labels, probabilities, {}, predicted=probabilities.argmax(axis=1))


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    examples=st.integers(2, 80),
    classes=st.integers(2, 8),
    digits=st.integers(1, 9),
)
def test_as_scikit_learn_has_them(seed: int, examples: int, classes: int, digits: int) -> None:
    found = outcomes(seed, examples, classes, digits)
    labels, probabilities = found.true, found.outputs
    areas = measure_roc_pr(labels, probabilities)
    assert areas.classes.tolist() == [c for c in range(classes) if 0 < (labels == c).sum() < examples]
    for index, label in enumerate(areas.classes):
        one = labels == label, probabilities[:, label]
        assert areas.roc[index] == pytest.approx(metrics.roc_auc_score(*one), abs=1e-9)
        assert areas.pr[index] == pytest.approx(metrics.average_precision_score(*one), abs=1e-9)
    measured = found.score()
    rows = probabilities.astype(np.float64)
    there = rows.sum(axis=1) > 0
    rows = rows[there] / rows[there].sum(axis=1, keepdims=True)
    loss = metrics.log_loss(labels[there], rows, labels=range(classes)) if there.any() else None
    assert measured.get("log_loss") == pytest.approx(loss, abs=1e-9)
    average = {"average": "macro", "zero_division": 0.0}
    assert measured["accuracy"] == metrics.accuracy_score(labels, found.predicted)
    for name in ("precision", "recall", "f1"):
        expected = getattr(metrics, f"{name}_score")(labels, found.predicted, **average)
        assert measured[f"macro_{name}"] == pytest.approx(expected, abs=1e-9)
    expected = metrics.f1_score(labels, found.predicted, average="weighted", zero_division=0.0)
    assert measured["weighted_f1"] == pytest.approx(expected, abs=1e-9)
    if classes > 5:
        top = metrics.top_k_accuracy_score(labels, probabilities, k=5, labels=range(classes))
        assert measured["top5_accuracy"] == pytest.approx(top, abs=1e-9)


def test_the_influence_of_an_example_is_the_derivative_by_its_weight() -> None:
    found = outcomes(3, 40, 3, digits=1)
    areas = measure_roc_pr(found.true, found.outputs)
    assert areas.influence.sum(axis=0) == pytest.approx([0, 0], abs=1e-12)
    for example in (0, 7, 23):
        weights = np.ones(40)
        weights[example] += (step := 1e-6)
        moved = [
            np.mean([measure(found.true == c, found.outputs[:, c], sample_weight=weights) for c in range(3)])
            for measure in (metrics.roc_auc_score, metrics.average_precision_score)
        ]
        slopes = (np.array(moved) - areas.means) / step
        assert slopes == pytest.approx(areas.influence[example], abs=1e-5)


def test_intervals_are_those_of_a_bootstrap_of_the_areas_themselves() -> None:
    found = outcomes(5, 400, 3)
    intervals = found.summarize(20)["intervals"]
    random = np.random.default_rng(0)
    resampled = []
    for _ in range(300):
        chosen = random.integers(400, size=400)
        areas = measure_roc_pr(found.true[chosen], found.outputs[chosen])
        resampled.append(areas.means)
    for name, values in zip(("roc_auc", "pr_auc"), np.transpose(resampled), strict=True):
        lower, upper = np.percentile(values, (2.5, 97.5))
        width = upper - lower
        assert intervals[name] == pytest.approx((lower, upper), abs=0.2 * width)


def test_a_champion_has_leads_in_probabilities_too() -> None:
    better, worse = outcomes(5, 400, 3, noise=0.5), outcomes(5, 400, 3, noise=1.5)
    leads = better.leads(worse)
    for name, rising in (("log_loss", False), ("roc_auc", True), ("pr_auc", True)):
        lead = leads[name]
        difference = better.summarize(20)["metrics"][name] - worse.summarize(20)["metrics"][name]
        assert lead.difference == pytest.approx(difference, abs=1e-9)
        assert (lead.difference > 0) == rising
        assert lead.p < 0.01
        assert lead.interval[0] < lead.difference < lead.interval[1]


def test_curves_are_those_of_the_smallest_areas() -> None:
    found = outcomes(5, 600, 20)
    fields = found.summarize(20)
    areas = measure_roc_pr(found.true, found.outputs)
    assert len(fields["roc"]) == len(fields["precision_recall"]) == MAX_CURVES
    assert {curve.area for curve in fields["roc"]} == set(np.sort(areas.roc)[:MAX_CURVES].tolist())
    for curve in fields["roc"]:
        assert curve.x[0] == curve.y[0] == 0
        assert curve.x[-1] == curve.y[-1] == 1


def test_outputs_that_are_not_finite_have_no_part_in_areas() -> None:
    found = outcomes(5, 60, 3)
    found.outputs[::2] = np.nan
    sound = found.select(found.finite)
    fields = found.summarize(20)
    assert fields["non_finite"] == 30
    assert fields["metrics"]["roc_auc"] == measure_roc_pr(sound.true, sound.outputs).means[0]


def right(probabilities: Any, **columns: Any) -> ClassOutcomes:
    """Returns outcomes of two classes, all of the first, all of them right."""
    found = np.array(probabilities, np.float32)
    nothing = np.zeros(len(found), np.int64)
    arrays = {name: np.array(values) for name, values in columns.items()}
    return ClassOutcomes(class_label(("no", "yes")), nothing, found, arrays, predicted=nothing)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param([1.005, -0.005], id="outside 0 to 1"),
        pytest.param([0.0, 0.0], id="a sum of 0"),
        pytest.param([-0.5, -0.5], id="all below 0"),
        pytest.param([2.0, -2.0], id="a sum of 0 of other than 0"),
    ],
)
def test_rows_that_are_no_probabilities_have_a_log_loss(row: list[float]) -> None:
    found = right([row, [0.5, 0.5], [0.5, 0.5]]).score()

    halves, ones = (2, 1) if max(row) > 0 else (2, 0)
    assert found["log_loss"] == pytest.approx(np.log(2) * halves / (halves + ones), abs=1e-6)


@pytest.mark.parametrize("distinct", [3, 100])
def test_values_that_are_not_finite_are_a_slice(distinct: int) -> None:
    prices = [*(float(i % distinct) for i in range(300)), np.nan, np.nan, np.inf, -np.inf]
    found = right([[1, 0]] * 304, price=prices).slices(1)

    sizes = {item.name: item.examples for item in found if item.name.startswith("price=")}
    assert sizes.pop("price=missing") == 4
    assert sum(sizes.values()) == 300
    assert len(sizes) == (3 if distinct == 3 else 4)
    assert not any("inf" in name or "nan" in name for name in sizes)
