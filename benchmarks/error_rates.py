"""Measurements of the gate's error rates on simulated models; `benchmarks.gate_errors` prints the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
from scipy import signal

from benchmarks.simulated import (
    CHAMPION_RULE,
    Answers,
    Array,
    classes,
    evaluate,
    ideal_answers,
    numbers,
    probabilities,
    right_answers,
    verdict,
    verdict_by_best,
    verdict_of_counts,
)
from shardline.components.model_store.champions import Version
from shardline.components.validate.gate import judge
from shardline.components.validate.gate.champion import compare_with_best
from shardline.components.validate.metrics.evaluation import Evaluation
from shardline.components.validate.metrics.intervals import number_groups
from shardline.components.validate.metrics.outcomes import ClassOutcomes, RegressionOutcomes
from shardline.components.validate.rules import Gate, GateRule, parse_rules
from shardline.trainer.manifest import CLASS, REGRESSION, Label

# 2. Coverage.

METRICS = ("accuracy", "recall[class=rare]", "macro_f1", "roc_auc", "log_loss", "rmse", "mae")


@cache
def truths() -> dict[str, float]:
    """Returns the values of the metrics of the drawn models, from a million examples."""
    random = np.random.default_rng(1)
    _, (model,) = probabilities(random, 1_000_000, 1)
    recall = {"recall[class=rare]": float(model.right[model.true == 2].mean())}
    return model.score() | recall | numbers(random, 1_000_000, 1)[0].score()


def coverage(n: int, draws: int, seed: int) -> dict[str, Array]:
    """Returns by metric the draws whose interval is below and above the true value.

    Then those in which the lead of an equal model is below and above 0 by its interval, and the number of
    draws in which the metric had an interval and a lead.
    """
    random, truth = np.random.default_rng((n, seed)), truths()
    missed = {name: np.zeros(6) for name in METRICS}
    for _ in range(draws):
        ours, theirs = probabilities(random, n)[1]
        first, second = numbers(random, n)
        intervals = ours.intervals() | first.intervals()
        leads = ours.leads(theirs) | first.leads(second)
        for name, counts in missed.items():
            if ends := intervals.get(name):
                counts[[0, 1, 4]] += ends[1] < truth[name], ends[0] > truth[name], 1
            if lead := leads.get(name):
                counts[[2, 3, 5]] += lead.interval[1] < 0, lead.interval[0] > 0, 1
    return missed


# 3. The slow regression over time.

#: Rules about a regression over time that are tried next to `champion`: none, and the default one.
BEST_RULES = ("", "best: accuracy >= best(8) (within 0.01)")


@dataclass(frozen=True)
class Stops:
    """One simulated pipeline: week of the first stop by any rule and by `best`, infinity for never.

    `loss` is how much worse the champion of the last week is than the first, in truth.
    """

    any: float
    best: float
    loss: float


def simulate_pipeline(n: int, weekly: float, rule: str, fixed: bool, seed: int, weeks: int = 104) -> Stops:
    """Simulates weekly retraining, judged by the rules `champion` and `rule`, if any.

    Each week's model is truly worse than the week before by `weekly`, whether or not that one was published;
    a blocked model leaves the champion as it is. The test examples are the same in all weeks (`fixed`) or
    new ones each week.
    """
    random = np.random.default_rng((seed, n))
    rules = parse_rules([rule] if rule else [])
    unseen = np.zeros(n, np.bool_)
    ideal, stops = ideal_answers(random, n), dict.fromkeys(("step", "best"), np.inf)

    @cache
    def answers(week: int, tested: int) -> Answers:
        return Answers(right_answers(random, ideal, weekly * week))

    def predict(tested: int, version: Version) -> tuple[Any, Array]:
        return answers(int(version.version), tested).outcomes, unseen

    last = [Version("0", "", "", metrics=answers(0, 0).metrics)]
    for week in range(1, weeks + 1):
        ideal, tested = (ideal, 0) if fixed else (ideal_answers(random, n), week)
        model, champion = answers(week, tested), answers(int(last[0].version), tested)
        best = compare_with_best(model, last, rules, partial(predict, tested))
        verdicts = {"step": verdict_of_counts(CHAMPION_RULE, n, *model.counts(champion))}
        if best:
            verdicts["best"] = verdict_by_best(rule, n, best["accuracy"])
        failed = [name for name, verdict in verdicts.items() if verdict == "failed"]
        stops |= {name: min(stops[name], week) for name in failed}
        if not failed:
            last = [Version(f"{week}", "", "", metrics=model.metrics), *last]
    return Stops(min(stops.values()), stops["best"], weekly * int(last[0].version))


def simulate_pipelines(n: int, weekly: float, rule: str, fixed: bool, pipelines: int) -> list[Stops]:
    """Simulates a number of pipelines."""
    return [simulate_pipeline(n, weekly, rule, fixed, seed) for seed in range(pipelines)]


# 4. Ten slices.

SLICES = 10
SLICE_RULES = {
    "`champion`": (CHAMPION_RULE,),
    "ten rules `accuracy[camera=...] >= champion (within 0.01)`": tuple(
        f"accuracy[camera={index}] >= champion (within 0.01)" for index in range(SLICES)
    ),
    "`worst_slice(accuracy) >= champion (within 0.02)`": ("worst_slice(accuracy) >= champion (within 0.02)",),
    "`worst_slice(accuracy) >= 0.8`": ("worst_slice(accuracy) >= 0.8",),
}


def slices(n: int, lost: float, draws: int) -> dict[str, float]:
    """Returns by set of rules how often they block a model that is worse on the first of ten slices."""
    random, found = np.random.default_rng(n), dict.fromkeys(SLICE_RULES, 0.0)
    cameras = np.arange(n) % SLICES
    true = np.zeros(n, np.int64)
    for _ in range(draws):
        ideal = ideal_answers(random, n)
        both = right_answers(random, ideal, np.where(cameras == 0, lost, 0.0)), right_answers(random, ideal)
        columns = {"camera": cameras.astype(str)}
        ours, theirs = (classes(true, 1 - right.astype(np.int64), columns=columns) for right in both)
        whole = evaluate({"label": ours}, {"label": theirs})
        for name, rules in SLICE_RULES.items():
            found[name] += not judge(whole, parse_rules(rules)).blessed
    return {name: count / draws for name, count in found.items()}


# 5. Groups of examples that are not independent.


@dataclass(frozen=True)
class Grouped:
    """Shares of draws that an interval misses, and in which an equal model is blocked; by what is counted."""

    accuracy: float
    rmse: float
    lead: float
    blocked: float


def effects(random: np.random.Generator, groups: int, rows: int, kept: float) -> Array:
    """Draws a standard normal effect of each group, or of time, if some of it is `kept` from row to row."""
    if not kept:
        return np.repeat(random.normal(size=groups), rows)
    noise = random.normal(0, (1 - kept**2) ** 0.5, groups * rows)
    noise[0] = random.normal()
    return np.asarray(signal.lfilter([1.0], [1.0, -kept], noise))


def grouped(groups: int, rows: int, kept: float, by_group: bool, draws: int) -> Grouped:
    """Measures coverage where groups are, say, patients: an answer depends on example, patient and model.

    Of the variance, 20 % is a patient's, 5 % a patient's for one model, 50 % an example's, 25 % both. With
    `kept`, the patients' parts are a series in time (autoregressive), and groups are its blocks.
    """
    random, n = np.random.default_rng((groups, rows)), groups * rows
    ids = np.arange(n) if kept else np.repeat(np.arange(groups), rows)
    ids = number_groups(ids, by_time=bool(kept)) if by_group else None
    missed, true = np.zeros(4), np.zeros(n, np.int64)
    for _ in range(draws):
        shared = 0.2**0.5 * effects(random, groups, rows, kept) + random.normal(0, 0.5**0.5, n)
        both = [
            shared + 0.05**0.5 * effects(random, groups, rows, kept) + random.normal(0, 0.5, n)
            for _ in range(2)
        ]
        ours, theirs = (classes(true, (error > 1.2816).astype(np.int64), groups=ids) for error in both)
        lead, values = ours.leads(theirs)["accuracy"], (ours.right.mean(), theirs.right.mean())
        label, zeros = Label("number", REGRESSION, ("number",)), np.zeros((n, 1))
        number = RegressionOutcomes(label, zeros, both[0][:, None], {}, groups=ids)
        ends = ours.intervals()["accuracy"], number.intervals()["rmse"], lead.interval
        missed[:3] += [not low <= truth <= high for (low, high), truth in zip(ends, (0.9, 1, 0), strict=True)]
        missed[3] += verdict(CHAMPION_RULE, CLASS, n, values, lead) == "failed"
    return Grouped(*(missed / draws).tolist())


# Tables of few values.


@dataclass(frozen=True)
class Rows:
    """Shares of draws that an interval misses, and in which an equal and a worse model are blocked."""

    accuracy: float
    lead: float
    equal: float
    worse: float


def tables(combinations: int, n: int, by_content: bool, draws: int) -> Rows:
    """Measures coverage on n rows of a table with so many different ones; equal rows get equal answers.

    A label is 1 in 90 % of rows of half of the combinations, and in 50 % of the others. The champion says 1
    of all; the equal model says 0 of some others, the worse one, too, of 4 % of the first: 3.2 points.
    """
    random, missed = np.random.default_rng((combinations, n)), np.zeros(4)
    for _ in range(draws):
        kind = random.integers(0, 100, n)  # the combination's part of the probability, and what is said of it
        rows = kind + 100 * random.integers(0, combinations // 100, n)
        true = (random.random(n) < np.where(kind < 50, 0.9, 0.5)).astype(np.int64)
        copies = np.unique(rows, return_inverse=True)[1] if by_content else None
        said = [np.where(each, 0, 1) for each in (kind < 0, kind >= 90, (kind >= 90) | (kind < 4))]
        champion, equal, worse = (classes(true, answers, copies=copies) for answers in said)
        leads = [each.leads(champion)["accuracy"] for each in (equal, worse)]
        ends = equal.intervals()["accuracy"], leads[0].interval
        missed[:2] += [not low <= truth <= high for (low, high), truth in zip(ends, (0.7, 0), strict=True)]
        for index, (each, lead) in enumerate(zip((equal, worse), leads, strict=True), 2):
            values = (each.right.mean(), champion.right.mean())
            missed[index] += verdict(CHAMPION_RULE, CLASS, n, values, lead) == "failed"
    return Rows(*(missed / draws).tolist())


# Rare classes.

RARE_METRICS = ("accuracy", "macro_f1", "pr_auc")


def rare(n: int, share: float, draws: int) -> dict[str, dict[str, float]]:
    """Returns how often models beat the baseline where a share is positive, by model and metric.

    A random one says so to that share of the examples; a balanced one, as trained with class_weights =
    "balanced", ranks with an ROC AUC of 0.76 and says so too often.
    """
    random, rules = np.random.default_rng((n, round(100 * share))), dict[str, tuple[GateRule, ...]]()
    for metric in RARE_METRICS:
        rules[metric] = parse_rules([f"{metric} > baseline (p < 0.025)"])
    found = {model: dict.fromkeys(rules, 0.0) for model in ("random", "balanced")}
    label = Label("label", CLASS, ("No", "Yes"))
    for _ in range(draws):
        true = (random.random(n) < share).astype(np.int64)
        drawn = random.normal(size=(2, n))
        for model, positive in (
            ("random", 1 / (1 + np.exp(-3 * (drawn[0] - np.quantile(drawn[0], 1 - share))))),
            ("balanced", 1 / (1 + np.exp(0.5 - drawn[1] - true))),
        ):
            outputs = np.stack([1 - positive, positive], axis=1).astype(np.float32)
            each = ClassOutcomes(label, true, outputs, {}, predicted=outputs.argmax(axis=1))
            measured: dict[str, Any] = {"metrics": each.score(), "baseline": each.baseline(None)}
            whole = Evaluation(fingerprint="", split="test", examples=n, label="label", **measured)
            for metric, parsed in rules.items():
                found[model][metric] += judge(whole, parsed).blessed / draws
    return found


# All default rules.


def defaults(kinds: Sequence[str], n: int, draws: int) -> dict[str, float]:
    """Returns how often each default rule, and any, blocks an equal model with labels of some kinds."""
    random, found = np.random.default_rng((n, len(kinds))), {"any": 0.0}
    labels = [Label(f"label{index}", kind, ("a", "b", "c")) for index, kind in enumerate(kinds)]
    labels = [replace(it, outputs=("number",)) if it.kind == REGRESSION else it for it in labels]
    rules = Gate().for_labels(labels)
    for _ in range(draws):
        models: list[dict[str, Any]] = [{}, {}, {}]  # the new one, the champion, the best of the last ones
        for label in labels:
            drawn = numbers(random, n, 3) if label.kind == REGRESSION else probabilities(random, n, 3)[1]
            for model, each in zip(models, drawn, strict=True):
                model[label.name] = replace(each, label=label)
        blessing = judge(evaluate(*models), rules)
        found["any"] += not blessing.blessed
        for name in {rule.name for rule in blessing.rules if rule.verdict == "failed"}:
            found[name] = found.get(name, 0) + 1
    return {name: count / draws for name, count in found.items()}
