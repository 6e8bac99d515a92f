"""What the gate can see: the power of its rule about the champion, in reports."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from shardline.components.validate.gate import PairedTest, judge
from shardline.components.validate.gate.verdict import JudgedRule
from shardline.components.validate.metrics.evaluation import Lead
from shardline.components.validate.metrics.intervals import paired_share
from shardline.components.validate.rules import parse_rule, parse_rules
from tests.helpers.reports import make_blessing, make_evaluation, make_report, with_champion

RULE = parse_rule("accuracy >= champion (within 0.01)")


def measured(examples: int, metrics: Any, intervals: Any = None, leads: Any = None) -> Any:
    return SimpleNamespace(examples=examples, metrics=metrics, intervals=intervals or {}, leads=leads or {})


def fails(better: int, worse: int, examples: int, within: float) -> bool:
    """Tells whether the gate calls a model worse that answers so many examples better, and worse."""
    order = np.arange(examples)
    lead = paired_share(order >= worse, order < examples - better, None)
    assert lead
    theirs = make_evaluation(("top", "middle", "bottom"))
    ours = dataclasses.replace(theirs, metrics={"accuracy": theirs.metrics["accuracy"] + lead.difference})
    compared = dataclasses.replace(ours, champion=theirs, leads={"accuracy": lead})
    gate = parse_rules([f"accuracy >= champion (within {within})"])
    return judge(compared, gate).rules[0].verdict == "failed"


def simulate(test: PairedTest, loss: float, draws: int = 4000) -> float:
    """Returns how often the gate calls a model worse that loses so much, in made-up test splits."""
    assert test.differ is not None
    differ = max(test.differ, loss)
    shares = [(differ - loss) / 2, (differ + loss) / 2, 1 - differ]
    drawn = np.random.default_rng(20170).multinomial(test.examples, shares, size=draws)
    pairs, counts = np.unique(drawn[:, :2], axis=0, return_counts=True)
    verdicts = [fails(*pair, test.examples, test.within) for pair in pairs.tolist()]
    return float(counts @ verdicts / draws)


@pytest.mark.parametrize(
    ("examples", "differ", "loss", "within"),
    [
        (50, 0.04, 0.1, 0.01),
        (167, 0.1, 0.0, 0.01),  # equally good
        (167, 0.04, 0.041, 0.01),  # every example that differs is worse
        (1000, 0.1, 0.03, 0.01),
        (2000, 0.01, 0.008, 0.01),  # few are worse beyond doubt, but within the tolerance
        (500, 0.1, 0.09, 0.1),  # nearly every example that differs is worse
        (20000, 0.05, 0.009, 0.01),  # too many to be exact
    ],
)
def test_the_power_is_how_often_the_judge_finds_a_loss(
    examples: int, differ: float, loss: float, within: float
) -> None:
    test = PairedTest(examples, within, differ=differ)

    chance = 3 * math.sqrt(0.25 / 4000)
    assert test.power(loss) == pytest.approx(simulate(test, loss), abs=chance)


def test_a_metric_that_is_no_share_has_the_power_of_a_normal_difference() -> None:
    test = PairedTest(400, 0.0, spread=1.0, unit="")

    assert test.power(0.1) == pytest.approx(norm.cdf(0.1 / 0.05 - norm.ppf(0.975)))
    assert test.smallest_loss() == pytest.approx(0.05 * (norm.ppf(0.975) + norm.ppf(0.9)), rel=1e-3)
    # With many examples, what is lost within the tolerance is beyond doubt within it.
    assert PairedTest(10**6, 0.1, spread=1.0).power(0.05) < 1e-6


@pytest.mark.parametrize("differ", [0.01, 0.05, 0.2])
def test_examples_needed_and_smallest_loss_are_inverses(differ: float) -> None:
    needed = PairedTest(1, 0.01, differ=differ).examples_needed(0.03)

    assert needed is not None
    test = PairedTest(needed, 0.01, differ=differ)
    assert test.power(0.03) >= 0.9 > test.power(0.02)
    assert test.smallest_loss() == pytest.approx(0.03, rel=0.02)


def test_what_cannot_be_found_is_none() -> None:
    assert PairedTest(4, 0.01, differ=0.1).smallest_loss() is None
    assert PairedTest(100, 0.01, differ=0.1).examples_needed(0.009) is None


def test_the_disagreement_of_a_champion_counts_and_groups_count_as_fewer_examples() -> None:
    differ, difference, n = 0.08, -0.02, 1000
    error = math.sqrt((differ - difference**2) / 250)
    lead = Lead(difference, (-0.06, 0.02), 0.9, error, differ)

    test = PairedTest.of(measured(n, {"accuracy": 0.9}, leads={"accuracy": lead}), RULE)

    assert test is not None
    alone = PairedTest(250, 0.01, differ=differ)
    assert test.power(0.05) == alone.power(0.05)
    assert str(test).startswith("With 1,000 examples, which tell as much as 250 independent ones, a")
    assert "8.0 % of the examples differ" in test.basis


def test_without_a_champion_the_next_model_is_assumed_to_differ_as_this_one_from_the_truth() -> None:
    counted = PairedTest.of(measured(100, {"accuracy": 0.96}, {"accuracy": (0.9, 0.98)}), RULE)
    assert counted is not None
    assert counted.differ == pytest.approx(0.04)
    assert "no champion" in counted.basis

    rule = parse_rule("rmse <= champion (within 2 %)")
    error = PairedTest.of(measured(100, {"rmse": 50.0}, {"rmse": (48.04, 51.96)}), rule)
    assert error is not None
    assert error.unit == "%"
    assert error.smallest_loss() == pytest.approx(0.02 * (1 + norm.ppf(0.975) + norm.ppf(0.9)), rel=1e-3)

    assert PairedTest.of(measured(100, {"rmse": 50.0}), rule) is None

    lead = Lead(-50.0, (-53.92, -46.08), 0.0, 2.0)
    worse = PairedTest.of(measured(100, {"rmse": 50.0}, leads={"rmse": lead}), rule)
    assert worse is not None
    assert worse.spread == pytest.approx(0.2, rel=1e-3)  # of the champion's 100


def make_page(verdict: Any, **champion: Any) -> str:
    rule = JudgedRule(RULE.text, "accuracy", 0.9, ">=", 0.88, verdict, name="champion")
    evaluation = dataclasses.replace(make_evaluation(("top", "middle", "bottom")), examples=167)
    evaluation = with_champion(evaluation) if champion else evaluation
    return make_report(dataclasses.replace(evaluation, **champion), blessing=make_blessing(rules=(rule,)))


def test_a_report_says_what_its_gate_can_see_in_words_and_in_a_plot() -> None:
    error = math.sqrt((0.04 - 0.02**2) / 167)

    page = make_page("passed", leads={"accuracy": Lead(0.02, (-0.01, 0.05), 0.1, error, 0.04)})

    sentence = str(PairedTest(167, 0.01, differ=0.04))
    assert f"<p>{sentence}.</p>" in page
    assert f'aria-label="How often a loss is found, over the true loss. {sentence}."' in page
    assert "no champion to compare with" in make_page("skipped")
    assert "What this gate can see" not in make_page("off")
