"""Intervals and p values: published examples, coverage, groups, and models that agree on every example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from shardline.components.validate.metrics.intervals import (
    Estimate,
    Floats,
    effective_size,
    find_interval,
    find_lead,
    jackknife,
    measure_roc_pr,
    mid_p,
    p_below,
    p_within,
    paired_share,
    share_interval,
    tango,
)
from shardline.components.validate.metrics.outcomes import ClassOutcomes
from tests.helpers.labels import class_label

GROUPS = np.repeat(np.arange(20), 50)


def rmse(errors: Floats, groups: Any = None) -> Estimate:
    terms = np.column_stack([errors**2, np.ones(len(errors))])
    return jackknife(terms, lambda sums: {"": np.sqrt(sums[..., 0] / sums[..., 1])}, groups)[""]


def misses(
    draw: Callable[[np.random.Generator], Any], truth: float, times: int = 2000
) -> tuple[float, float]:
    """Returns how often intervals of drawn data, or leads, are above and below the truth, in percent."""
    random = np.random.default_rng(7)
    found = [draw(random) for _ in range(times)]
    ends = np.array([getattr(each, "interval", each) for each in found])
    return 100 * float((ends[:, 0] > truth).mean()), 100 * float((ends[:, 1] < truth).mean())


def test_two_shares_of_the_same_examples_are_compared_as_published() -> None:
    """Airway hyper-responsiveness of 21 children before and after (Fagerland et al., 2014, table 2)."""
    assert tango(1, 7, 21) == pytest.approx((-0.517, -0.026), abs=5e-4)
    assert 2 * mid_p(7, 8, 0.5) == pytest.approx(0.0391, abs=5e-5)


def test_the_mid_p_value_counts_half_of_what_was_seen() -> None:
    for right, examples, share in ((3, 10, 0.5), (0, 4, 0.2), (4, 4, 0.9)):
        drawn = stats.binom(examples, share)
        assert mid_p(right, examples, share) == pytest.approx(drawn.sf(right) + drawn.pmf(right) / 2)
    assert mid_p(2.5, 5, 0.5) == pytest.approx(0.5)


def test_an_area_has_the_error_of_delong() -> None:
    random = np.random.default_rng(3)
    true = np.repeat([0, 1], (120, 80))
    scores = random.normal(size=200) + true
    areas = measure_roc_pr(true[:, None], scores[:, None])
    wins = (scores[true == 1][:, None] > scores[true == 0]).astype(float)
    error = np.sqrt(wins.mean(axis=1).var(ddof=1) / 80 + wins.mean(axis=0).var(ddof=1) / 120)
    ours = Estimate(areas.means[0], 200 * areas.influence[:, 0])
    found = find_lead("roc_auc", ours, Estimate(0.5, np.zeros(200)))
    assert found is not None
    assert found.error == pytest.approx(error, rel=0.01)


@pytest.mark.parametrize("examples", [50, 167, 1000])
@pytest.mark.parametrize("differ", [0.04, 0.1])
def test_equal_models_are_said_to_differ_in_5_of_100_cases(examples: int, differ: float) -> None:
    def answers(random: np.random.Generator) -> Any:
        hard = random.random(examples) < 0.03
        ours, theirs = (~hard & (random.random(examples) > differ / 2) for _ in range(2))
        return paired_share(ours, theirs, None)

    def errors(random: np.random.Generator) -> Any:
        same = random.standard_normal(examples)
        return find_lead("rmse", *(rmse(same + random.normal(0, differ * 5, examples)) for _ in range(2)))

    assert max(misses(answers, 0.0)) <= 3.2
    assert misses(errors, 0.0) == pytest.approx((2.5, 2.5), abs=1.1)


def test_a_loss_is_more_than_allowed_where_the_whole_interval_of_the_lead_is_worse() -> None:
    random, right = np.random.default_rng(5), np.arange(400) < 360
    share = paired_share(right & (random.random(400) > 0.1), right, None)
    error = find_lead("rmse", *(rmse(random.normal(0, spread, 30)) for spread in (2, 1)))
    assert share is not None
    assert error is not None
    assert p_within(share, -share.interval[1]) == pytest.approx(0.025, abs=1e-9)
    assert p_within(error, error.interval[0], lower_is_better=True) == pytest.approx(0.025, abs=1e-9)
    assert p_within(share, 0.0) >= 1 - share.p  # McNemar's


def test_one_error_has_an_interval_that_misses_on_both_sides() -> None:
    def symmetric(random: np.random.Generator) -> Any:
        it = rmse(random.standard_normal(50))
        return it.value + 2.01 * np.array([-1, 1]) * it.influence.std() / 7

    found = misses(lambda random: find_interval("rmse", rmse(random.standard_normal(50))), 1.0)
    plain = misses(symmetric, 1.0)
    assert found == pytest.approx((2.5, 2.5), abs=1.1)
    assert plain[1] > 4


def test_rows_of_twenty_patients_are_no_thousand_examples() -> None:
    """20 patients with 50 rows each: the share of one model, and the lead over an equally good one."""

    def right(random: np.random.Generator) -> Any:
        return random.random(1000) < random.beta(8, 2, 20)[GROUPS]

    by_rows = misses(lambda random: share_interval(right(random), None), 0.8)
    assert min(by_rows) > 15
    assert misses(lambda random: share_interval(right(random), GROUPS), 0.8) == pytest.approx(
        (2.5, 2.5), abs=1.5
    )
    lead_by_rows = misses(lambda random: paired_share(right(random), right(random), None), 0.0)
    assert min(lead_by_rows) > 15
    assert max(misses(lambda random: paired_share(right(random), right(random), GROUPS), 0.0)) < 3.5

    def errors(random: np.random.Generator, groups: Any) -> Any:
        drawn = (random.normal(0, 1, 20)[GROUPS] + random.normal(0, 1, 1000) for _ in range(2))
        return find_lead("rmse", *(rmse(each, groups) for each in drawn))

    assert min(misses(lambda random: errors(random, None), 0.0, 500)) > 15
    assert misses(lambda random: errors(random, GROUPS), 0.0, 1000) == pytest.approx((2.5, 2.5), abs=1.1)


def test_the_effective_number_is_that_of_groups_only_where_these_answer_as_one() -> None:
    random = np.random.default_rng(0)
    assert effective_size(random.random(1000) < 0.9, None) == 1000
    assert effective_size(np.full(1000, True), GROUPS) == 20
    assert effective_size((random.random(20) < 0.5)[GROUPS], GROUPS) == 20
    assert effective_size(random.random(1000) < 0.9, GROUPS) > 500
    assert effective_size(np.arange(5) < 3, np.zeros(5, np.int64)) == 1


def test_models_that_agree_on_every_example_may_still_differ_on_others() -> None:
    same = np.arange(50) < 47
    share = paired_share(same, same, None)
    assert share is not None
    assert (share.difference, share.p, share.differ) == (0.0, 0.5, 0.0)
    assert share.interval == pytest.approx((-0.0713, 0.0713), abs=1e-4)
    numbers = rmse(np.random.default_rng(0).standard_normal(50))
    found = find_lead("rmse", numbers, numbers)
    assert found is not None
    assert found.p == 0.5
    assert found.interval[0] < -0.05 < 0.05 < found.interval[1]
    better = find_lead("rmse", rmse(np.ones(50)), rmse(np.full(50, 2.0)))
    assert better is not None
    assert better.p < 1e-6


def test_a_few_answers_that_differ_leave_as_much_open_as_none() -> None:
    """Macro F1 of two models that differ on one of 167 examples is about as uncertain as their accuracy."""
    true = np.arange(167) % 3
    ours, theirs = (np.where(np.arange(167) < wrong, (true + 1) % 3, true) for wrong in (10, 11))
    label, outputs = class_label("abc"), np.full((167, 3), 1 / 3, np.float32)
    first, second = (ClassOutcomes(label, true, outputs, {}, predicted=each) for each in (ours, theirs))
    leads = first.leads(second)
    for metric in ("accuracy", "macro_f1"):
        lower, upper = leads[metric].interval
        assert lower < -0.015 < 0.028 < upper
    assert leads["accuracy"].differ == pytest.approx(1 / 167)


def test_a_slice_is_below_a_limit_only_where_chance_does_not_explain_it() -> None:
    def share(value: float, limit: float, effective: float = 100) -> float:
        return p_below(value, limit, interval=None, effective=effective, share=True)

    assert share(0.85, 0.9) == pytest.approx(stats.binom(100, 0.9).cdf(85))
    assert share(0.85, 0.9, 20) > share(0.85, 0.9) > share(0.8, 0.9)
    assert share(0.95, 0.9) > 0.5
    numbers = rmse(np.random.default_rng(0).normal(0, 3, 100))
    interval = find_interval("rmse", numbers)

    def error(limit: float) -> float:
        return p_below(
            numbers.value, limit, interval=interval, effective=100, share=False, lower_is_better=True
        )

    assert interval is not None
    assert error(interval[0]) == pytest.approx(0.025)
    assert error(interval[0] * 0.8) < 0.001 < 0.5 < error(numbers.value * 1.1)
    cut = (p_below(0.9, 0.95, interval=(0.7, end), effective=30, share=False) for end in (0.999, 1.0))
    assert next(cut) < 0.2 < next(cut)
