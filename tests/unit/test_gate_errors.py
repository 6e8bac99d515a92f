"""The gate's error rates, on simulated models: quick versions of the tables of benchmarks.gate_errors.

Shares of draws are compared with what was meant plus three standard errors; seeds are fixed.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks import error_rates, gate_errors, simulated
from shardline.trainer.manifest import CLASS, REGRESSION

_MEANT = 0.05


def most(meant: float, draws: int) -> float:
    """Returns a share that is only exceeded once in a thousand times where `meant` is true."""
    return meant + 3 * math.sqrt(meant * (1 - meant) / draws)


@pytest.mark.parametrize("differ", [0.04, 0.1])
@pytest.mark.parametrize("examples", [50, 100, 167, 500])
def test_an_equal_model_is_blocked_in_at_most_one_of_twenty_cases(examples: int, differ: float) -> None:
    equal = simulated.shares_of_verdicts(examples, differ)
    worse = simulated.shares_of_verdicts(examples, differ, 0.03)
    assert equal["failed"] <= _MEANT
    assert worse["failed"] > 2 * equal["failed"]


def test_a_loss_is_found_where_there_are_examples_enough() -> None:
    assert simulated.shares_of_verdicts(2_000, 0.04, 0.03)["failed"] > 0.95


@pytest.mark.parametrize("examples", [50, 167, 500, 2_000])
def test_a_loss_within_the_tolerance_is_blocked_as_rarely(examples: int) -> None:
    for differ in (0.04, 0.1):
        at_most, well = (simulated.shares_of_verdicts(examples, differ, loss) for loss in (0.01, 0.005))
        assert at_most.get("failed", 0.0) <= 0.03
        assert well.get("failed", 0.0) < 0.02


def test_counts_are_judged_as_predictions_are() -> None:
    right = np.random.default_rng(0).random((2, 167)) < 0.9
    models = [simulated.classes(np.zeros(167, np.int64), 1 - each.astype(np.int64)) for each in right]
    counts = simulated.Answers(right[0]).counts(simulated.Answers(right[1]))
    assert models[0].leads(models[1])["accuracy"] == simulated.lead_of_counts(167, *counts)


@pytest.mark.parametrize("kinds", [(CLASS,), (REGRESSION,), (CLASS, CLASS, REGRESSION)])
def test_the_default_rules_together_block_an_equal_model_as_rarely(kinds: tuple[str, ...]) -> None:
    draws = 100
    assert error_rates.defaults(kinds, 100, draws)["any"] <= most(_MEANT, draws)


def test_a_pipeline_that_loses_nothing_goes_on_for_two_years_and_one_that_gets_worse_is_stopped() -> None:
    pipelines, rule = 25, error_rates.BEST_RULES[1]
    steady = error_rates.simulate_pipelines(1_000, 0.0, rule, True, pipelines)
    assert np.isfinite([each.best for each in steady]).mean() <= most(_MEANT, pipelines)
    losing = error_rates.simulate_pipelines(1_000, 0.003, rule, True, pipelines)
    assert np.quantile([each.best for each in losing], 0.9, method="higher") <= 26


def test_rules_on_ten_slices_block_an_equal_model_as_rarely_and_find_a_slice_that_is_worse() -> None:
    draws = 60
    equal, worse = (error_rates.slices(1_000, lost, draws) for lost in (0.0, 0.2))
    assert max(equal.values()) <= most(_MEANT, draws)
    assert worse["`worst_slice(accuracy) >= champion (within 0.02)`"] > 0.8


@pytest.mark.parametrize(("groups", "rows", "kept"), [(20, 50, 0.0), (30, 33, 0.9)])
def test_intervals_over_groups_cover_the_truth_where_those_over_rows_do_not(
    groups: int, rows: int, kept: float
) -> None:
    draws = 150
    by_row, by_group = (error_rates.grouped(groups, rows, kept, each, draws) for each in (False, True))
    assert by_row.accuracy > 0.15 > most(_MEANT, draws) >= by_group.accuracy
    assert by_group.lead <= most(_MEANT, draws)
    assert by_group.blocked <= most(_MEANT, draws)


@pytest.mark.parametrize("combinations", [100, 10**9])
def test_intervals_over_rows_of_a_table_cover_the_truth_and_find_a_worse_model(combinations: int) -> None:
    draws = 150
    found = error_rates.tables(combinations, 2_000, False, draws)
    assert max(found.accuracy, found.lead, found.equal) <= most(_MEANT, draws)
    assert found.worse > 0.6


def test_the_page_on_judging_has_the_table_of_simulated_models() -> None:
    page = (Path(__file__).parents[2] / "benchmarks" / "GATE.md").read_text(encoding="utf-8")
    assert [row for row in gate_errors.rows_of_models() if row not in page] == []  # shows what differs
