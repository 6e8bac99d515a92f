"""Quantiles: pinball loss as scikit-learn has it, coverage, slices, crossings, and what a gate says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.metrics import mean_pinball_loss

from shardline.components.validate.evaluate import Assessment
from shardline.components.validate.gate.champion import compare
from shardline.components.validate.gate.gate import Gate
from shardline.components.validate.gate.judged_rule import JudgedRule
from shardline.components.validate.gate.rules import parse_rule
from shardline.components.validate.gate.verdict import judge
from shardline.components.validate.metrics.evaluation import Evaluation
from shardline.components.validate.metrics.regression import RegressionOutcomes
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.data.features import REGRESSION, Label

PRICE = Label("label", REGRESSION, ("price",))
SHARES = (0.1, 0.5, 0.9)
N = 600
COSTS = {"peak_memory_mb": 1.0}


def outcomes(wide: float = 1.0, shares: tuple[float, ...] = SHARES, noise: float = 0.0) -> RegressionOutcomes:
    """Returns normally distributed numbers, and quantiles of a deviation `wide` times as large."""
    middle = np.random.default_rng(0).normal(100, 20, (N, 1))
    true = middle + np.random.default_rng(1).normal(0, 10, (N, 1))
    middle = middle + np.random.default_rng(2).normal(0, noise, (N, 1))
    values = middle + 10 * wide * norm.ppf(shares)
    columns: dict[str, Any] = {"sex": np.array(["f", "m"] * (N // 2))}
    quantiles = values if shares else None
    return RegressionOutcomes(PRICE, true, middle, columns, quantiles=quantiles, shares=shares)


def measured(found: RegressionOutcomes) -> Assessment:
    fields = found.summarize(10)
    fields["metrics"] |= COSTS
    evaluation = Evaluation(
        fingerprint="sha256:0", split="test", kind=REGRESSION, outputs=PRICE.outputs, **fields
    )
    return Assessment(evaluation, {"label": found})


def verdicts(evaluation: Evaluation, *rules: str) -> list[JudgedRule]:
    gate = Gate(rules=()).with_rules(rules).for_labels([PRICE])
    return list(judge(evaluation, gate, champion="v1").rules)


@pytest.mark.parametrize("shares", [SHARES, (0.5,), (0.05, 0.25, 0.75, 0.95)])
def test_the_loss_is_that_of_scikit_learn(shares: tuple[float, ...]) -> None:
    one = outcomes(shares=shares)
    assert one.quantiles is not None
    expected = np.mean(
        [
            mean_pinball_loss(one.true[:, 0], one.quantiles[:, index], alpha=share)
            for index, share in enumerate(shares)
        ]
    )
    assert one.score()["pinball_loss"] == pytest.approx(expected, abs=1e-9)
    lower, upper = one.intervals()["pinball_loss"]
    assert lower < expected < upper
    assert ("coverage" in one.score()) == (len(shares) > 1)


def test_coverage_is_the_share_inside_the_outermost_quantiles() -> None:
    right, narrow = outcomes().score(), outcomes(wide=0.5).score()
    assert right["coverage"] == pytest.approx(0.8, abs=0.04)
    assert right["coverage_error"] == pytest.approx(abs(right["coverage"] - 0.8), abs=1e-9)
    assert narrow["coverage"] == pytest.approx(norm.cdf(0.64) - norm.cdf(-0.64), abs=0.04)
    lower, upper = outcomes(wide=0.5).intervals()["coverage_error"]
    assert lower < narrow["coverage_error"] < upper
    assert narrow["rmse"] == right["rmse"]


def test_rules_about_quantiles_know_their_direction() -> None:
    found = compare(measured(outcomes()), measured(outcomes(wide=0.3, noise=20)))
    rules = (
        "coverage_error <= 0.05",
        "coverage >= 0.7",
        "pinball_loss < champion (p < 0.05)",
        "coverage_error < champion (p < 0.05)",
        "pinball_loss <= champion (within 1 %)",
        "quantile_crossings == 0",
        "rmse < champion (p < 0.05)",
    )
    judged = verdicts(found, *rules)
    assert [rule.verdict for rule in judged] == ["passed"] * len(rules), judged
    assert judged[1].interval
    assert judged[5].interval is None  # no example crosses
    back = compare(measured(outcomes(wide=0.3, noise=20)), measured(outcomes()))
    assert {rule.verdict for rule in verdicts(back, *rules[:5])} == {"failed"}


@pytest.mark.parametrize("shares", [(), (0.2, 0.5, 0.8)], ids=["none", "others"])
def test_losses_of_other_quantiles_are_not_compared(shares: tuple[float, ...]) -> None:
    found = compare(measured(outcomes()), measured(outcomes(shares=shares)))
    judged = verdicts(found, "pinball_loss <= champion", "rmse <= champion")
    assert [rule.verdict for rule in judged] == ["unmeasured", "passed"]
    assert judged[0].note == "champion: it was not measured"
    assert "pinball_loss" not in found.leads
    assert "rmse" in found.leads


def test_quantiles_that_cross_are_counted_and_reported_and_not_sorted() -> None:
    one = outcomes()
    assert one.quantiles is not None
    one.quantiles[:7] = one.quantiles[:7, ::-1]
    found = measured(one).evaluation
    assert found.metrics["quantile_crossings"] == 7
    assert found.metrics["coverage"] < outcomes().score()["coverage"]
    warnings = judge(found, Gate(rules=())).warnings
    assert warnings == ("Quantiles of 7 of 600 examples cross: a lower one is above a higher one",)


def test_an_example_with_a_quantile_that_is_not_finite_is_not_finite() -> None:
    one = outcomes()
    assert one.quantiles is not None
    one.quantiles[3, 2] = np.nan
    assert one.summarize(10)["non_finite"] == 1


def test_calibration_is_the_share_of_the_truth_below_each_quantile() -> None:
    (number,) = measured(outcomes()).evaluation.numbers
    assert [share for share, _ in number.calibration] == [*SHARES]
    assert [below for _, below in number.calibration] == pytest.approx(SHARES, abs=0.04)
    (number,) = measured(outcomes(shares=())).evaluation.numbers
    assert number.calibration == ()


@pytest.mark.parametrize(
    ("rule", "quantiles", "message"),
    [
        ("coverage >= 0.8", {}, "the model predicts no quantiles; it has rmse, mae, .*r2: train it with"),
        ("coverage >= 0.8", {"label": (0.5,)}, "one quantile; it has rmse, .*r2, pinball_loss: train"),
    ],
)
def test_a_rule_about_quantiles_that_a_model_lacks_is_refused(
    rule: str, quantiles: dict[str, tuple[float, ...]], message: str
) -> None:
    gate = Gate().with_rules([rule]).for_labels([PRICE])
    with pytest.raises(SettingsError, match=message):
        gate.check_quantiles([PRICE], quantiles)
    gate.check_quantiles([PRICE], {"label": SHARES})


def test_the_trivial_answer_has_no_quantiles() -> None:
    with pytest.raises(SettingsError, match=r"no metric 'pinball_loss' of the baseline"):
        parse_rule("pinball_loss < baseline")
