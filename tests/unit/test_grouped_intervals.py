"""Intervals over groups of examples that belong together: how often they hold the truth, by simulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shardline.components.validate.gate import judge
from shardline.components.validate.metrics.evaluation import Evaluation, Grouping, Interval
from shardline.components.validate.metrics.intervals import number_groups
from shardline.components.validate.metrics.outcomes import ClassOutcomes, Outcomes, RegressionOutcomes
from shardline.components.validate.rules import Gate
from shardline.trainer.manifest import REGRESSION, Label
from tests.helpers.labels import class_label

Floats = npt.NDArray[np.float64]

PATIENTS, ROWS, DRAWS = 20, 50, 300
BY_PATIENT = np.repeat(np.arange(PATIENTS), ROWS)
YIELD = Label("label", REGRESSION, ("yield",))


def patients(random: np.random.Generator) -> Floats:
    """Returns a standard normal effect of each row, the same for all rows of a patient."""
    return np.repeat(random.normal(size=PATIENTS), ROWS)


def days(random: np.random.Generator, examples: int = 900, memory: float = 0.8) -> Floats:
    """Returns standard normal effects that follow each other in time (autoregressive)."""
    steps = random.normal(size=examples + 50) * np.sqrt(1 - memory**2)
    for index in range(1, len(steps)):
        steps[index] += memory * steps[index - 1]
    return steps[50:]


def answers(random: np.random.Generator, effect: Floats) -> ClassOutcomes:
    """Returns a model's answers, right where the effect and noise of equal size are above -1."""
    true = random.integers(2, size=len(effect))
    right = effect + random.normal(size=len(effect)) > -1
    predicted = np.where(right, true, 1 - true)
    outputs = np.eye(2, dtype=np.float32)[predicted] * 0.8 + 0.1
    return ClassOutcomes(class_label("ab"), true, outputs, {}, predicted=predicted)


def errors(random: np.random.Generator, effect: Floats) -> RegressionOutcomes:
    """Returns predictions with an error of `effect` and noise of equal size, whose RMSE is sqrt(2)."""
    true = random.normal(size=(len(effect), 1))
    return RegressionOutcomes(YIELD, true, true + effect[:, None] + random.normal(size=true.shape), {})


def accuracy(random: np.random.Generator, effect: Any) -> tuple[Outcomes, Any]:
    right = 0.7602499  # of a normal value with variance 2: below sqrt(1/2)
    ours = answers(random, effect(random))
    return ours, lambda it: _holds(it.measure_slice(everywhere(it), decided=True)[1], right)


def rmse(random: np.random.Generator, effect: Any) -> tuple[Outcomes, Any]:
    return errors(random, effect(random)), lambda it: _holds(it.intervals()["rmse"], np.sqrt(2))


def paired_accuracy(random: np.random.Generator, effect: Any) -> tuple[Outcomes, Any]:
    """Two models of equal accuracy, each of which fails on other patients or days."""
    ours, theirs = answers(random, effect(random)), answers(random, effect(random))
    same = replace(theirs, true=ours.true, predicted=np.where(theirs.right, ours.true, 1 - ours.true))
    return ours, lambda it: _holds(it.lead_on_slice(same, everywhere(it)).interval, 0.0)


def paired_rmse(random: np.random.Generator, effect: Any) -> tuple[Outcomes, Any]:
    ours, theirs = errors(random, effect(random)), errors(random, effect(random))
    same = replace(theirs, true=ours.true, outputs=ours.true + theirs.outputs - theirs.true)
    return ours, lambda it: _holds(it.lead_on_slice(same, everywhere(it)).interval, 0.0)


def everywhere(outcomes: Outcomes) -> npt.NDArray[np.bool_]:
    return np.full(len(outcomes.true), True)


def _holds(interval: Interval | None, truth: float) -> bool:
    assert interval
    return interval[0] <= truth <= interval[1]


@pytest.mark.parametrize("draw", [accuracy, rmse, paired_accuracy, paired_rmse])
@pytest.mark.parametrize("effect", [patients, days])
def test_an_interval_over_groups_holds_the_truth_and_one_over_rows_does_not(draw: Any, effect: Any) -> None:
    over_rows, over_groups = [], []
    for number in range(DRAWS):
        outcomes, holds = draw(np.random.default_rng(number), effect)
        by_time = effect is days
        times = np.arange(len(outcomes.true)) if by_time else BY_PATIENT
        over_rows.append(holds(outcomes))
        over_groups.append(holds(replace(outcomes, groups=number_groups(times, by_time=by_time))))
    assert np.mean(over_rows) < 0.9
    assert 0.92 <= np.mean(over_groups) <= 0.98


def test_one_large_group_makes_no_interval_narrow() -> None:
    """Half of all rows are of one patient, to whom the mean is drawn."""
    holds = []
    for number in range(DRAWS):
        random = np.random.default_rng(number)
        groups = np.repeat(np.arange(PATIENTS), [25 * (PATIENTS - 1), *[25] * (PATIENTS - 1)])
        effects = random.normal(size=(2, PATIENTS))[:, groups]
        ours, theirs = (errors(random, effect) for effect in effects)
        same = replace(theirs, true=ours.true, outputs=ours.true + theirs.outputs - theirs.true)
        lead = replace(ours, groups=groups).lead_on_slice(same, everywhere(ours))
        holds.append(_holds(lead and lead.interval, 0.0))
    assert np.mean(holds) >= 0.88


def test_blocks_of_time_are_neighbours_of_equal_size() -> None:
    times = np.random.default_rng(0).permutation(900)
    blocks = number_groups(times, by_time=True)
    assert [*np.bincount(blocks)] == 30 * [30]
    assert all(np.ptp(times[blocks == block]) == 29 for block in range(30))
    # Few examples make fewer blocks, and those of one time are in one.
    assert [*np.bincount(number_groups(np.arange(50), by_time=True))] == [8, 7, 7, 7, 7, 7, 7]
    assert [*np.bincount(number_groups(np.repeat([3, 1, 2], [40, 30, 30]), by_time=True))] == [30, 30, 40]
    assert [*number_groups(np.array([7]), by_time=True)] == [0]
    assert [*number_groups(np.array(["b", "a", "b"]), by_time=False)] == [1, 0, 1]


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(("count", "verdict"), [(1, "undecided"), (20, "failed")])
def test_a_verdict_needs_more_than_one_group(count: int, verdict: str) -> None:
    """A model that is twice as far off on every patient; of one patient alone, it could be chance."""
    random = np.random.default_rng(0)
    groups = np.arange(1000) % count
    champion = replace(errors(random, np.zeros(1000)), groups=groups)
    worse = replace(champion, outputs=champion.true + 2 * (champion.outputs - champion.true))
    grouping = Grouping("patient", by_time=False, count=count)
    before, after = (
        Evaluation(
            **{"fingerprint": "sha256:0", "split": "test", "label": "label", "kind": REGRESSION},
            **{"outputs": YIELD.outputs, "baseline": outcomes.baseline(None), "groups": grouping},
            **outcomes.summarize(10),
        )
        for outcomes in (champion, worse)
    )
    compared = replace(after, champion=before, leads=worse.leads(champion))
    gate = Gate().for_labels([YIELD])
    rules = {rule.name: rule for rule in judge(compared, gate, champion="v1").rules}
    assert rules["champion"].verdict == verdict
    assert verdict == "failed" or f"1,000 examples in {grouping} leave open" in rules["champion"].note
    assert str(grouping) in rules["baseline"].note
