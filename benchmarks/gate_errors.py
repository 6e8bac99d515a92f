"""Error rates of the gate: how often it blocks an equally good model, and how often it finds a worse one.

python -m benchmarks.gate_errors [--draws N] [--tables NAME ...]

Every verdict is the gate's own, on models simulated with fixed seeds (`benchmarks/simulated.py`). The verdict
on a share depends on two counts, the examples that only one of two models answers rightly: for the first
table each pair of counts is judged once and weighted by its probability, without drawing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from benchmarks.simulated import (
    CHAMPION_RULE,
    DIFFER,
    Array,
    classes,
    evaluate,
    numbers,
    probabilities,
    right_answers,
    shares_of_verdicts,
    verdict,
    verdict_of_counts,
)
from shardline.components.validate.gate.gate import Gate
from shardline.components.validate.gate.rules import parse_rules
from shardline.components.validate.gate.verdict import judge
from shardline.components.validate.metrics.regression import RegressionOutcomes
from shardline.trainer.data.features import CLASS, REGRESSION, Label

DRAWS = 4_000

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


# 3. The slow slide.


@dataclass(frozen=True)
class Slide:
    """One simulated pipeline: week of the first stop by any rule and by `slide`, infinity for never.

    `loss` is how much worse the champion of the last week is than the first, in truth.
    """

    any: float
    slide: float
    loss: float


def slide(n: int, weekly: float, rules: Sequence[str], fixed: bool, seed: int, weeks: int = 104) -> Slide:
    """Simulates weekly retraining: a blocked model leaves the champion as it is.

    Each week's model is truly worse than the week before by `weekly`, whether or not that one was published.
    The test examples are the same in all weeks (`fixed`) or new ones each week.
    """
    random = np.random.default_rng((seed, n))
    losses = weekly * np.arange(weeks + 1)
    right = right_answers(random, n, *losses)
    champion, stops = 0, dict.fromkeys(("step", "slide"), np.inf)
    for week in range(1, weeks + 1):
        compared = [week, champion]
        model, present = right[compared] if fixed else right_answers(random, n, *losses[compared])
        counts = int((model & ~present).sum()), int((present & ~model).sum())
        failed = [rule for rule in rules if verdict_of_counts(rule, n, *counts) == "failed"]
        for rule in failed:
            name = "slide" if rule.startswith("slide") else "step"
            stops[name] = min(stops[name], week)
        champion = champion if failed else week
    return Slide(min(stops.values()), stops["slide"], float(losses[champion]))


SLIDE_RULES = ((CHAMPION_RULE,),)


def slides(n: int, weekly: float, rules: Sequence[str], fixed: bool, pipelines: int) -> list[Slide]:
    """Simulates a number of pipelines."""
    return [slide(n, weekly, rules, fixed, seed) for seed in range(pipelines)]


# 4. Ten slices.

SLICES = 10
SLICE_RULES = {
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
        right = right_answers(random, n, 0.0, 0.0, lost)
        right[0] = np.where(cameras == 0, right[2], right[0])
        columns = {"camera": cameras.astype(str)}
        ours, theirs = (classes(true, 1 - model.astype(np.int64), columns=columns) for model in right[:2])
        whole = evaluate({"label": ours}, {"label": theirs})
        for name, rules in SLICE_RULES.items():
            found[name] += not judge(whole, Gate(rules=parse_rules(rules))).blessed
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
    noise, found = random.normal(0, (1 - kept**2) ** 0.5, groups * rows), np.empty(groups * rows)
    found[0] = random.normal()
    for index in range(1, len(found)):
        found[index] = kept * found[index - 1] + noise[index]
    return found


def grouped(groups: int, rows: int, kept: float, by_group: bool, draws: int) -> Grouped:
    """Measures coverage where groups are, say, patients: an answer depends on example, patient and model.

    Of the variance, 20 % is a patient's, 5 % a patient's for one model, 50 % an example's, 25 % both. With
    `kept`, the patients' parts are a series in time (autoregressive), and groups are its blocks.
    """
    random, n = np.random.default_rng((groups, rows)), groups * rows
    ids = np.repeat(np.arange(groups), rows) if by_group else None
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


# All default rules.


def defaults(kinds: Sequence[str], n: int, draws: int) -> dict[str, float]:
    """Returns how often each default rule, and any, blocks an equal model with labels of some kinds."""
    random, found = np.random.default_rng((n, len(kinds))), {"any": 0.0}
    labels = [Label(f"label{index}", kind, ("a", "b", "c")) for index, kind in enumerate(kinds)]
    labels = [replace(it, outputs=("number",)) if it.kind == REGRESSION else it for it in labels]
    gate = Gate().for_labels(labels)
    for _ in range(draws):
        drawn = [
            numbers(random, n) if it.kind == REGRESSION else probabilities(random, n)[1] for it in labels
        ]
        pairs = [[replace(each, label=it) for each in pair] for it, pair in zip(labels, drawn, strict=True)]
        ours, theirs = ({it.name: pair[i] for it, pair in zip(labels, pairs, strict=True)} for i in (0, 1))
        blessing = judge(evaluate(ours, theirs), gate)
        found["any"] += not blessing.blessed
        for name in {rule.name for rule in blessing.rules if rule.verdict == "failed"}:
            found[name] = found.get(name, 0) + 1
    return {name: count / draws for name, count in found.items()}


# Printing.

SIZES = (50, 100, 167, 500, 2_000)
VERDICTS = ("failed", "open", "passed")

#: Calls a function with each of some arguments, on two processors, and returns its answers.
Run = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], list[Any]]


def percent(share: float, digits: int = 0) -> str:
    """Returns a share in percent, with one digit where it is small."""
    return f"{100 * share:.{1 if 0 < share < 0.0995 else digits}f} %"


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table in Markdown."""
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(row)} |")
    print()


def print_equal(run: Run, draws: int) -> None:
    """Prints how often an equal model, and one 3 points worse, is blocked, not decided and passed."""
    cases = [(n, differ, worse) for n in SIZES for worse in (0.0, 0.03) for differ in (DIFFER, 0.1)]
    found = iter(run(shares_of_verdicts, cases))
    rows = []
    for n in SIZES:
        four = [next(found) for _ in range(4)]
        texts = [" / ".join(percent(it.get(verdict, 0)) for verdict in VERDICTS) for it in four]
        rows.append([f"{n:,}", *texts])
    equal, worse = "equal model: blocked / not decided / passed", "3 points worse"
    print_table(
        ["test examples", *(f"{it}, {share} % differ" for it in (equal, worse) for share in (4, 10))], rows
    )


def print_defaults(run: Run, draws: int) -> None:
    """Prints how often the default rules together block an equal model."""
    kinds = ((CLASS,), (REGRESSION,), (CLASS, REGRESSION), (CLASS, CLASS, REGRESSION))
    cases = [(each, n, draws) for each in kinds for n in (50, 167, 1_000)]
    rows = []
    for (each, n, _), found in zip(cases, run(defaults, cases), strict=True):
        names = ", ".join(f"{name} {percent(share)}" for name, share in found.items() if name != "any")
        rows.append([", ".join(each), f"{n:,}", percent(found["any"]), names])
    print_table(["labels", "test examples", "equal model blocked", "by the rules"], rows)


def print_coverage(run: Run, draws: int) -> None:
    """Prints how often intervals and leads miss on each side."""
    for n in (50, 167, 1_000, 10_000):
        parts = run(coverage, [(n, draws // 4, seed) for seed in range(4)])
        rows = []
        for name in METRICS:
            it = sum(part[name] for part in parts)
            shares = [*(it[:2] / it[4]), *(it[2:4] / it[5])]
            rows.append([f"{n:,}", name, *(f"{100 * share:.1f}" for share in shares), f"{it[4]:,.0f}"])
        head = ["interval too low, %", "too high", "lead too low", "too high", "draws with an interval"]
        print_table(["test examples", "metric", *head], rows)


def print_slide(run: Run, draws: int) -> None:
    """Prints when a slowly worsening pipeline is stopped, and how often one that loses nothing."""
    shapes = [
        (n, rules, fixed) for rules in SLIDE_RULES for n in (167, 1_000, 5_000) for fixed in (True, False)
    ]
    cases = [(n, weekly, rules, fixed, draws // 10) for n, rules, fixed in shapes for weekly in (0.003, 0.0)]
    found, rows = iter(run(slides, cases)), []
    for n, rules, fixed in shapes:
        losing, steady = next(found), next(found)
        weeks = [_weeks([it.slide for it in losing]), _weeks([it.any for it in losing])]
        lost = f"{100 * float(np.mean([it.loss for it in losing])):.1f}"
        stopped = [
            percent(float(np.isfinite([getattr(it, name) for it in steady]).mean()))
            for name in ("slide", "any")
        ]
        examples = [f"{n:,}", "the same" if fixed else "new"]
        rows.append([", ".join(f"`{rule}`" for rule in rules), *examples, *weeks, lost, *stopped])
    weeks = ["stopped by slide, week (median / 90 %)", "by any", "points lost after 104 weeks"]
    print_table(["rules", "test examples", "each week", *weeks, "no loss: by slide", "by any"], rows)


def _weeks(stops: Sequence[float]) -> str:
    ends = np.quantile(stops, (0.5, 0.9), method="higher").tolist()
    return " / ".join("never" if end == np.inf else f"{end:.0f}" for end in ends)


def print_slices(run: Run, draws: int) -> None:
    """Prints how often rules on ten slices block an equal model, and one that is worse on one slice."""
    cases = [(n, lost, draws // 4) for n in (167, 500, 2_000) for lost in (0.0, 0.2)]
    found = run(slices, cases)
    rows = [
        [rules, f"{n:,}", *(percent(each[rules]) for each in (equal, worse))]
        for (n, *_), equal, worse in zip(cases[::2], found[::2], found[1::2], strict=True)
        for rules in SLICE_RULES
    ]
    print_table(
        ["rules", "test examples", "equal model blocked", "20 points worse on one slice: blocked"], rows
    )


def print_grouped(run: Run, draws: int) -> None:
    """Prints coverage over rows and over groups side by side."""
    data = {
        "20 patients x 50 rows": (20, 50, 0.0),
        "100 x 10": (100, 10, 0.0),
        "1,000 in time": (30, 33, 0.9),
    }
    cases = [(*shape, by_group, draws // 2) for shape in data.values() for by_group in (False, True)]
    found = iter(run(grouped, cases))
    rows = []
    for name in data:
        for counted in ("rows", "groups"):
            it = next(found)
            shares = (it.accuracy, it.rmse, it.lead, it.blocked)
            rows.append([name, counted, *map(percent, shares)])
    missed = [f"{what}: interval misses (5 % meant)" for what in ("accuracy", "RMSE", "lead")]
    print_table(["data", "intervals over", *missed, "equal model blocked"], rows)


TABLES = {
    "equal": print_equal,
    "defaults": print_defaults,
    "coverage": print_coverage,
    "slide": print_slide,
    "slices": print_slices,
    "grouped": print_grouped,
}


def main() -> None:
    """Prints the tables, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=DRAWS, help="draws; some tables take a part")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=[*TABLES])
    chosen = parser.parse_args()
    with ProcessPoolExecutor(2) as pool:

        def run(function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
            return list(pool.map(function, *zip(*cases, strict=True)))

        for name in chosen.tables:
            started = time.monotonic()
            print(f"## {name}\n")
            TABLES[name](run, chosen.draws)
            print(f"{time.monotonic() - started:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
