"""Simulated models: answers of equally good or worse models, and the gate's verdict on them.

Predictions are drawn, `ClassOutcomes` and `RegressionOutcomes` measure them as validation does, and `judge`
decides: only the models are simulated, as arrays of answers, without TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from shardline.components.validate.gate import judge
from shardline.components.validate.metrics import MAIN
from shardline.components.validate.metrics.evaluation import MIN_SLICE, BestLead, Evaluation, Lead, join
from shardline.components.validate.metrics.intervals import paired_share
from shardline.components.validate.metrics.outcomes import ClassOutcomes, Outcomes, RegressionOutcomes
from shardline.components.validate.rules import parse_rules
from shardline.trainer.manifest import CLASS, REGRESSION, Label

CHAMPION_RULE = "accuracy >= champion (within 0.01)"
#: Accuracy of a sound model in the tables, and the share of examples on which two models differ.
ACCURACY, DIFFER = 0.95, 0.04
#: Pairs of counts that are less probable are left out, less than a thousandth of all.
_RARE = 1e-6
#: Values of the checks of an export, which have nothing to do with a comparison, as they are of a sound one.
_SOUND = dict.fromkeys(
    (
        "constant_labels",
        "never_predicted",
        "max_difference",
        "golden_difference",
        "non_finite",
        "batch_difference",
    ),
    0.0,
)

Array = npt.NDArray[Any]


# Models and evaluations.


def classes(true: Array, predicted: Array, number: int = 2, **more: Any) -> ClassOutcomes:
    """Returns the outcomes of a model by its answers, each with a probability of 1; without TensorFlow."""
    label = Label("label", CLASS, tuple(f"{index}" for index in range(number)))
    outputs = np.eye(number, dtype=np.float32)[predicted]
    return ClassOutcomes(label, true, outputs, more.pop("columns", {}), predicted=predicted, **more)


def evaluate(
    outcomes: Mapping[str, Outcomes],
    champion: Mapping[str, Outcomes] | None = None,
    best: Mapping[str, Outcomes] | None = None,
) -> Evaluation:
    """Returns what the gate reads of the evaluation of a model by its labels, computed as validation does.

    It has leads over a champion, and over the best of the last champions, if they are given.
    """
    parts = tuple(
        Evaluation(
            fingerprint="",
            split="test",
            label=name,
            kind=each.label.kind,
            examples=len(each.true),
            outputs=each.label.outputs,
            metrics={MAIN[each.label.kind]: each.measure_slice(_all(each), decided=False)[0]},
            slices=each.slices(MIN_SLICE),
            baseline=each.baseline(None),
        )
        for name, each in outcomes.items()
    )
    whole = join(parts, _SOUND)
    whole = replace(whole, metrics={**whole.metrics, "examples": whole.examples})
    if champion is None:
        return whole
    over_best = {
        name: BestLead("best", 8, whole.metrics.get(name, 0.0) - lead.difference, lead)
        for name, lead in _leads(whole, outcomes, best or {}).items()
    }
    leads = _leads(whole, outcomes, champion)
    return replace(whole, champion=evaluate(champion), leads=leads, best=over_best)


def _leads(
    whole: Evaluation, ours: Mapping[str, Outcomes], theirs: Mapping[str, Outcomes]
) -> dict[str, Lead]:
    """Returns the leads in the main metric of each label, on all examples and on each slice."""
    found = {}
    for name, other in theirs.items():
        each, prefix = ours[name], f"{name}." if whole.parts else ""
        leads = {MAIN[each.label.kind]: each.lead_on_slice(other, _all(each))}
        leads |= each.lead_by_slice(other, MIN_SLICE)
        found |= {f"{prefix}{metric}": lead for metric, lead in leads.items() if lead}
    return found


def _all(outcomes: Outcomes) -> Array:
    return np.full(len(outcomes.true), True)


def verdict(
    rule: str, kind: str, n: int, values: Sequence[float], lead: Lead, best: BestLead | None = None
) -> str:
    """Returns the gate's verdict by one rule about the main metric of a model and the champion."""
    ours, theirs = (
        Evaluation(
            fingerprint="", split="test", examples=n, label="label", kind=kind, metrics={MAIN[kind]: value}
        )
        for value in values
    )
    best_leads = {MAIN[kind]: best} if best else {}
    whole = replace(ours, champion=theirs, leads={MAIN[kind]: lead}, best=best_leads)
    return judge(whole, parse_rules([rule])).rules[0].verdict


# Pairs of counts: examples that only the model, and only the champion, answers rightly.


@cache
def lead_of_counts(n: int, ours: int, theirs: int) -> Lead:
    """Returns the lead in accuracy of a model that alone is right `ours` times."""
    right = np.ones((2, n), np.bool_)
    right[1, :ours] = right[0, ours : ours + theirs] = False
    lead = paired_share(*right, None)
    assert lead is not None
    return lead


@cache
def verdict_of_counts(rule: str, n: int, ours: int, theirs: int) -> str:
    """Returns the gate's verdict on such a model by one rule about its accuracy."""
    wrong = max(0, round((1 - ACCURACY) * n) - ours)
    values = 1 - (wrong + theirs) / n, 1 - (wrong + ours) / n
    return verdict(rule, CLASS, n, values, lead_of_counts(n, ours, theirs))


@cache
def verdict_by_best(rule: str, n: int, best: BestLead) -> str:
    """Returns the gate's verdict by a rule about a slow regression."""
    lead = best.lead or lead_of_counts(n, 0, 0)
    return verdict(rule, CLASS, n, ((best.value or 0.0) + lead.difference, 0.0), lead, best)


class Answers:
    """What `compare_with_best` takes of a model: its accuracy, and its lead over another one."""

    def __init__(self, right: Array) -> None:
        self.right, self.metrics = right, {"accuracy": float(right.mean())}
        self.label = Label("label", CLASS, ("right", "wrong"))
        self.outcomes, self.evaluation = {"label": self}, self

    def counts(self, other: Answers) -> tuple[int, int]:
        """Returns how many examples only this, and only the other model answers rightly."""
        return int((self.right & ~other.right).sum()), int((other.right & ~self.right).sum())

    def leads(self, other: Answers) -> dict[str, Lead]:
        """Returns the lead over another model."""
        return {"accuracy": lead_of_counts(len(self.right), *self.counts(other))}


def pairs(n: int, ours: float, theirs: float) -> Iterator[tuple[int, int, float]]:
    """Yields pairs of counts and their probability, from those that one example is of either kind."""
    from scipy.stats import binom

    differ = np.arange(n + 1)
    for total, weight in zip(differ, binom.pmf(differ, n, ours + theirs), strict=True):
        if weight > _RARE:
            mine = np.arange(total + 1)
            for count, share in zip(mine, binom.pmf(mine, total, ours / (ours + theirs)), strict=True):
                if weight * share > _RARE:
                    yield int(count), int(total - count), float(weight * share)


def shares_of_verdicts(
    n: int, differ: float, worse: float = 0.0, rule: str = CHAMPION_RULE
) -> dict[str, float]:
    """Returns the probability of each verdict on a model that is truly `worse`, by a rule about accuracy."""
    found: dict[str, float] = {}
    for ours, theirs, weight in pairs(n, (differ - worse) / 2, (differ + worse) / 2):
        verdict = verdict_of_counts(rule, n, ours, theirs)
        found[verdict] = found.get(verdict, 0.0) + weight
    total = sum(found.values())
    return {verdict: share / total for verdict, share in found.items()}


# Predictions of equally good models, or of one that is worse.


def ideal_answers(random: np.random.Generator, n: int) -> Array:
    """Draws which examples an ideal model answers rightly, [n]: a share ACCURACY."""
    return random.random(n) < ACCURACY


def right_answers(random: np.random.Generator, ideal: Array, loss: float | Array = 0.0) -> Array:
    """Draws which examples a model answers rightly, [n], that is truly worse than the ideal one by `loss`.

    It differs from that one on examples of its own: two models without loss differ on a share DIFFER.
    """
    # x right answers become wrong and x wrong ones right: 4 x - 2 x^2 (1 / right + 1 / wrong) = DIFFER.
    wrong = 1 - ACCURACY
    square = 2 / ACCURACY + 2 / wrong
    x = (4 - (16 - 4 * square * DIFFER) ** 0.5) / (2 * square)
    drawn = random.random(len(ideal), dtype=np.float32)
    return np.where(ideal, drawn >= (x + loss) / ACCURACY, drawn < x / wrong)


def probabilities(random: np.random.Generator, n: int, models: int = 2) -> tuple[Array, list[ClassOutcomes]]:
    """Draws outcomes of equal models of three classes, 60, 30 and 10 %, accuracy 0.95, 4 % differ."""
    shares = np.array([0.6, 0.3, 0.1])
    true = random.choice(3, n, p=shares)
    signal = np.eye(3)[true] * 4.2 + np.log(shares) + random.normal(0, 1.5, (n, 3))
    label, found = Label("label", CLASS, ("a", "b", "rare")), []
    for _ in range(models):
        odds = np.exp(signal + random.normal(0, 0.6, (n, 3)))
        outputs = (odds / odds.sum(axis=1, keepdims=True)).astype(np.float32)
        found.append(ClassOutcomes(label, true, outputs, {}, predicted=outputs.argmax(axis=1)))
    return true, found


def numbers(random: np.random.Generator, n: int, models: int = 2) -> list[RegressionOutcomes]:
    """Draws outcomes of equal models of a number: errors of a Student t with 5 degrees."""
    label, true = Label("number", REGRESSION, ("number",)), random.normal(0, 3, (n, 1))
    shared = random.standard_t(5, (n, 1))
    each = (shared + random.normal(0, 0.5, (n, 1)) for _ in range(models))
    return [RegressionOutcomes(label, true, true + error, {}) for error in each]
