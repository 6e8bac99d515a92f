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
from typing import Any

import numpy as np

from benchmarks.error_rates import (
    BEST_RULES,
    METRICS,
    RARE_METRICS,
    SLICE_RULES,
    coverage,
    defaults,
    grouped,
    rare,
    simulate_pipelines,
    slices,
    tables,
)
from benchmarks.simulated import DIFFER, shares_of_verdicts
from shardline.trainer.manifest import CLASS, REGRESSION

DRAWS = 1_000
#: Draws of the table of simulated models, which a test makes.
FEW = 100
SIZES = (50, 100, 167, 500, 2_000)
VERDICTS = ("failed", "undecided", "passed")

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
    cases = [(each, n, draws // 2) for each in kinds for n in (50, 167, 1_000)]
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


def print_regression(run: Run, draws: int) -> None:
    """Prints when a slowly worsening pipeline is stopped, and how often one that loses nothing."""
    shapes = [(n, rule, fixed) for rule in BEST_RULES for n in (167, 1_000, 5_000) for fixed in (True, False)]
    cases = [(n, weekly, rule, fixed, draws // 10) for n, rule, fixed in shapes for weekly in (0.003, 0.0)]
    found, rows = iter(run(simulate_pipelines, cases)), []
    for n, rule, fixed in shapes:
        losing, steady = next(found), next(found)
        weeks = [_weeks([it.best for it in losing]), _weeks([it.any for it in losing])]
        lost = f"{100 * float(np.mean([it.loss for it in losing])):.1f}"
        stopped = [
            percent(float(np.isfinite([getattr(it, name) for it in steady]).mean()))
            for name in ("best", "any")
        ]
        examples = [f"{n:,}", "the same" if fixed else "new"]
        rows.append([f"`champion`, `{rule}`" if rule else "`champion`", *examples, *weeks, lost, *stopped])
    weeks = ["stopped by best, week (median / 90 %)", "by any", "points lost after 104 weeks"]
    print_table(["rules", "test examples", "each week", *weeks, "no loss: by best", "by any"], rows)


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


def print_tables(run: Run, draws: int) -> None:
    """Prints coverage on tables of few and of many values, over rows, and over rows that differ."""
    cases = [
        (combinations, n, by_content, draws // 2)
        for combinations in (100, 10**9)
        for n in (1_000, 20_000)
        for by_content in (False, True)
    ]
    rows = [
        [f"{combinations:,}", f"{n:,}", "different rows" if by_content else "rows"]
        + [percent(share) for share in (it.accuracy, it.lead, it.equal, it.worse)]
        for (combinations, n, by_content, _), it in zip(cases, run(tables, cases), strict=True)
    ]
    missed = [f"{what}: interval misses (5 % meant)" for what in ("accuracy", "lead")]
    blocked = ["equal model blocked", "3.2 points worse blocked"]
    print_table(["combinations of values", "rows", "intervals over", *missed, *blocked], rows)


def print_rare(run: Run, draws: int) -> None:
    """Prints how often random and sound models beat the baseline where one class is rare, by metric."""
    cases = [(n, share, draws // 2) for share in (0.03, 0.09, 0.15) for n in (200, 1_000, 5_000)]
    rows = [
        [percent(share), f"{n:,}", *(" / ".join(map(percent, by.values())) for by in found.values())]
        for (n, share, _), found in zip(cases, run(rare, cases), strict=True)
    ]
    what = "beats the baseline by " + " / ".join(RARE_METRICS)
    print_table(["rare class", "test examples", f"random model {what}", "balanced model"], rows)


def print_models(run: Run, draws: int) -> None:
    """Prints the table of simulated models of benchmarks/GATE.md; any number of draws gives the same."""
    print("\n".join(rows_of_models()))


def rows_of_models() -> list[str]:
    """Returns the rows of the table of simulated models, from few draws."""
    rows = [
        (
            f"equal, {n:,} test examples",
            "`champion`",
            f"{percent(shares_of_verdicts(n, DIFFER)['failed'])} blocked",
        )
        for n in (50, 167, 1_000)
    ]
    equal, worse = (slices(500, lost, FEW) for lost in (0.0, 0.2))
    for shown, found in (("equal, ten slices of 50", equal), ("20 points worse on one of ten slices", worse)):
        rows += [(shown, rules, f"{percent(share)} blocked") for rules, share in found.items()]
    for counted, by_group in (("visits", False), ("patients", True)):
        share = grouped(20, 50, 0.0, by_group, FEW).blocked
        rows.append(
            ("equal, 20 patients with 50 visits", f"`champion` over {counted}", f"{percent(share)} blocked")
        )
    weeks = _weeks([each.best for each in simulate_pipelines(1_000, 0.003, BEST_RULES[1], True, FEW // 4)])
    rows.append(("0.3 points worse each week, 1,000 test examples", "`best`", f"stopped in week {weeks}"))
    return [f"| {' | '.join(row)} |" for row in rows]


TABLES = {
    "equal": print_equal,
    "defaults": print_defaults,
    "coverage": print_coverage,
    "best": print_regression,
    "slices": print_slices,
    "grouped": print_grouped,
    "tables": print_tables,
    "rare": print_rare,
    "models": print_models,
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
