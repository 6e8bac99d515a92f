"""Comparisons of a model with a reference, and which of them fail, however many there are.

A model that is as good as its reference would fail one of ten comparisons at 5 % each in 40 % of cases.
Comparisons therefore form families, and Holm's procedure (1979) keeps the chance that any of a family fails
wrongly at FAMILY, however they depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shardline.components.validate.gate.gate import FAMILY, LEVEL, LOOKS
from shardline.components.validate.gate.rules import (
    BEST,
    OPERATORS,
    GateRule,
    evaluate_expression,
    slice_values,
)
from shardline.components.validate.metrics.evaluation import Evaluation, Grouping, Interval, Lead, PastLead
from shardline.components.validate.metrics.intervals import p_below
from shardline.components.validate.metrics.metrics import LOWER_IS_BETTER, MAIN

# Digits of a difference: 0.95 - 0.96 is a little less than -0.01.
_DIGITS = 9


class Comparison(NamedTuple):
    """One comparison of a rule.

    Attributes:
        slice: Name of the slice; "" for all examples.
        left, right: The value, and that of the reference or the limit.
        holds: Whether the rule holds here; with a tolerance, beyond doubt.
        p: One-sided p value of "the value is not worse".
        least: How far it is ahead at least: the lower end of the 95 % interval, where one is known.
        difference: 95 % interval of the value minus the reference's; None where unknown.
        worse: Whether it is worse beyond doubt, with all other comparisons of the family taken into account.
    """

    slice: str
    left: float
    right: float
    holds: bool
    p: float
    least: float
    difference: Interval | None = None
    worse: bool = False


def compare(rules: Sequence[GateRule], evaluation: Evaluation) -> Mapping[GateRule, Sequence[Comparison]]:
    """Returns the comparisons of each rule with a tolerance, and of each rule about the worst slice.

    A rule whose values are not known has none.
    """
    families: dict[tuple[str, float], list[tuple[GateRule, Comparison]]] = {}
    slides = sum(rule.reference == BEST for rule in rules)
    for rule in dict.fromkeys(rules):
        families.setdefault(_family(rule, slides), []).extend(
            (rule, each) for each in _compare(rule, evaluation)
        )
    decided: dict[GateRule, list[Comparison]] = {}
    for (_, level), members in families.items():
        rejected = reject([each.p for _, each in members], level)
        for (rule, each), is_worse in zip(members, rejected, strict=True):
            decided.setdefault(rule, []).append(each._replace(worse=is_worse and not each.holds))
    return decided


def reject(values: Sequence[float], level: float = FAMILY) -> list[bool]:
    """Returns which p values of a family are significant (Holm, 1979), none of them above `level`; NaN is."""
    values = [0.0 if math.isnan(value) else value for value in values]
    rejected = [False] * len(values)
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        if values[index] >= min(FAMILY / (len(values) - rank), level):
            break
        rejected[index] = True
    return rejected


def _family(rule: GateRule, slides: int) -> tuple[str, float]:
    """Returns the family of a rule's comparisons, and the highest level of a single one."""
    if rule.reference == BEST:  # a share for each look, rule about a slide, and champion (Bonferroni)
        return rule.text, FAMILY / (LOOKS * slides * rule.last)
    if rule.reference == "baseline":
        return rule.text, LEVEL
    return ("slices", FAMILY) if rule.worst or rule.slice else ("champion", LEVEL)


def find_reference(rule: GateRule, evaluation: Evaluation) -> tuple[float | None, Lead | None, str]:
    """Returns the value of a rule's reference, the lead over it, None each where not known, and a note."""
    if rule.reference == "baseline":
        other = evaluation.of(rule.label).baseline
        if not other:
            return None, None, "the baseline was not measured"
        note = f"always answering {other.answer}"
        return other.metrics.get(rule.metric), other.leads.get(rule.metric), note
    if rule.reference == BEST:
        past = evaluation.past.get(rule.expression, PastLead())
        best = f"{past.version} is the best of {past.compared} champions" if past.version else ""
        return past.value, past.lead, "; ".join(filter(None, (best, past.note)))
    assert evaluation.champion
    theirs, _, reason = evaluate_expression(rule, evaluation.champion)
    return theirs, evaluation.leads.get(rule.expression), f"champion: {reason}" if theirs is None else ""


def _compare(rule: GateRule, evaluation: Evaluation) -> Iterator[Comparison]:
    if rule.reference in ("champion", BEST):
        evaluation = evaluation.champion_comparison
        if evaluation.champion is None:
            return
    if rule.worst and (rule.within is not None) == bool(rule.reference):
        yield from _compare_slices(rule, evaluation)
    elif rule.within is not None:
        left, (right, lead, _) = evaluate_expression(rule, evaluation)[0], find_reference(rule, evaluation)
        if rule.reference == BEST and right is not None:  # perhaps on other examples than the champion's
            left = right + lead.difference if lead else None
        if left is not None and right is not None:
            yield _compare_within(rule, rule.slice, left, right, lead, evaluation.groups)


def _compare_slices(rule: GateRule, evaluation: Evaluation) -> Iterator[Comparison]:
    part, lower = evaluation.of(rule.label), rule.metric in LOWER_IS_BETTER
    theirs = {item.name: value for item, value in slice_values(rule, evaluation.champion or evaluation)}
    for item, value in slice_values(rule, evaluation):
        of_part = {"class": "recall", "label": "f1"}.get(item.name.partition("=")[0])
        # The accuracy of a class is its recall.
        name = f"{of_part if of_part and rule.metric == MAIN[part.kind] else rule.metric}[{item.name}]"
        if rule.reference and item.decided:
            lead = evaluation.leads.get(".".join(filter(None, (rule.label, name))))
            other = theirs.get(item.name, math.nan)
            yield _compare_within(rule, item.name, value, other, lead, evaluation.groups)
        elif item.decided and (rule.operator in ("<=", "<")) == lower:
            interval = part.intervals.get(name) if of_part else item.interval
            share = rule.metric in ("accuracy", "recall")
            p = p_below(value, rule.limit, interval, item.effective, share=share, lower_is_better=lower)
            holds = OPERATORS[rule.operator](value, rule.limit)
            yield Comparison(item.name, value, rule.limit, holds, p, -abs(value - rule.limit))


def _compare_within(
    rule: GateRule, name: str, left: float, right: float, lead: Lead | None, groups: Grouping | None
) -> Comparison:
    """Compares with a reference; without a lead, as measured, but a single group decides nothing."""
    if lead is None and groups and (name or groups.count < 2):
        return Comparison(name, left, right, holds=False, p=1.0, least=-math.inf)
    allowed = (rule.within or 0.0) * (abs(right) if rule.relative else 1.0)
    sign = 1.0 if rule.operator == ">=" else -1.0
    least = min(sign * end for end in lead.interval) if lead else sign * (left - right)
    holds = round(least, _DIGITS) >= -allowed  # NaN does not
    p = lead.p_worse if lead else float(holds)
    return Comparison(name, left, right, holds, p, least, lead.interval if lead else None)
