"""Comparisons of a model with a reference, and which of them fail, however many there are.

A model that is as good as its reference would fail one of ten comparisons at 5 % each in 40 % of cases.
Comparisons therefore form families, and Holm's procedure (1979) keeps the chance that any of a family fails
wrongly at FAMILY, however they depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardline.components.validate.gate.gate import FAMILY, LEVEL, LOOKS
from shardline.components.validate.gate.rules import (
    BEST,
    OPERATORS,
    GateRule,
    evaluate_expression,
    judged_slices,
)
from shardline.components.validate.metrics.evaluation import Evaluation, Interval, Lead, PastLead, Slice
from shardline.components.validate.metrics.intervals import p_below
from shardline.components.validate.metrics.metrics import LOWER_IS_BETTER, MAIN

# Digits of a difference: 0.95 - 0.96 is a little less than -0.01.
_DIGITS = 9

# Operators of "it is not worse", where higher is better and where lower is.
_NO_WORSE = ((">=", ">"), ("<=", "<"))


@dataclass(frozen=True)
class Comparison:
    """One comparison of a rule.

    Attributes:
        slice: Name of the slice; "" for all examples.
        left, right: The value, and that of the reference or the limit.
        holds: Whether the rule holds here; with a tolerance, beyond doubt.
        p: One-sided p value of "the value is not worse".
        ahead: 95 % interval of the lead, positive where it is better; its two ends are equal where unknown.
        difference: 95 % interval of the value minus the reference's; None where unknown.
        worse: Whether it is worse beyond doubt, with all other comparisons of the family taken into account.
    """

    slice: str
    left: float
    right: float
    holds: bool
    p: float
    ahead: Interval
    difference: Interval | None = None
    worse: bool = False


def compare(rules: Iterable[GateRule], evaluation: Evaluation) -> Mapping[GateRule, Sequence[Comparison]]:
    """Returns the comparisons of each rule with a tolerance, and of each rule about the worst slice.

    A rule whose values are not known has none.
    """
    families: dict[tuple[str, float], list[tuple[GateRule, Comparison]]] = {}
    for rule in dict.fromkeys(rules):
        families.setdefault(_family(rule), []).extend((rule, each) for each in _compare(rule, evaluation))
    decided: dict[GateRule, list[Comparison]] = {}
    for (_, level), members in families.items():
        rejected = reject([each.p for _, each in members], level)
        for (rule, each), is_worse in zip(members, rejected, strict=True):
            decided.setdefault(rule, []).append(replace(each, worse=is_worse and not each.holds))
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


def _family(rule: GateRule) -> tuple[str, float]:
    """Returns the family of a rule's comparisons, and the highest level of a single one."""
    if rule.reference == BEST:  # a share for each look, and for each of the champions (Bonferroni)
        return rule.text, FAMILY / (LOOKS * rule.last)
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
        best = f"{past.version} is the best of the last {past.compared}" if past.version else ""
        return past.value, past.lead, "; ".join(filter(None, (best, past.note)))
    if evaluation.champion is None:
        return None, None, ""
    theirs, _, reason = evaluate_expression(rule, evaluation.champion)
    return theirs, evaluation.leads.get(rule.expression), f"champion: {reason}" if theirs is None else ""


def _compare(rule: GateRule, evaluation: Evaluation) -> Iterator[Comparison]:
    if rule.reference in ("champion", BEST):
        evaluation = evaluation.champion_comparison
    if rule.worst and rule.within is not None and evaluation.champion:
        theirs = {item.name: value for item, value in judged_slices(rule, evaluation.champion)}
        for item, value in judged_slices(rule, evaluation):
            if item.name in theirs:
                name = ".".join(filter(None, (rule.label, _name(rule, item, evaluation))))
                yield _compare_within(rule, item.name, value, theirs[item.name], evaluation.leads.get(name))
    elif rule.worst and not rule.reference and rule.operator in _NO_WORSE[rule.metric in LOWER_IS_BETTER]:
        part = evaluation.of(rule.label)
        for item, value in judged_slices(rule, evaluation):
            own = rule.metric == MAIN[part.kind] and not item.name.startswith("label=")
            interval = item.interval if own else part.intervals.get(_name(rule, item, evaluation))
            holds = OPERATORS[rule.operator](value, rule.limit)
            ahead = -abs(value - rule.limit) if not holds else 0.0
            p = p_below(
                value,
                rule.limit,
                interval=interval,
                effective=item.effective,
                share=rule.metric in ("accuracy", "recall"),
                lower_is_better=rule.metric in LOWER_IS_BETTER,
            )
            yield Comparison(item.name, value, rule.limit, holds, p, (ahead, ahead))
    elif rule.within is not None:
        left, (right, lead, _) = evaluate_expression(rule, evaluation)[0], find_reference(rule, evaluation)
        if rule.reference == BEST and right is not None:  # perhaps on other examples than the champion's
            left = right + lead.difference if lead else None
        if left is not None and right is not None:
            yield _compare_within(rule, rule.slice, left, right, lead)


def _compare_within(rule: GateRule, name: str, left: float, right: float, lead: Lead | None) -> Comparison:
    """Compares with a reference; without a lead, as measured."""
    allowed = tolerance(rule, right)
    sign = 1.0 if rule.operator == ">=" else -1.0
    ahead = sign * (left - right)
    lower, upper = sorted(sign * end for end in lead.interval) if lead else (ahead, ahead)
    holds = round(lower, _DIGITS) >= -allowed  # NaN does not
    p = lead.p_worse if lead else float(holds)
    return Comparison(name, left, right, holds, p, (lower, upper), lead.interval if lead else None)


def tolerance(rule: GateRule, reference: float) -> float:
    """Returns how much worse than a reference a rule allows a model to be."""
    return (rule.within or 0.0) * (abs(reference) if rule.relative else 1.0)


def _name(rule: GateRule, item: Slice, evaluation: Evaluation) -> str:
    """Returns the name of a slice's metric without the label: the accuracy of a class is its recall."""
    is_main = rule.metric == MAIN[evaluation.of(rule.label).kind]
    of_part = {"class": "recall", "label": "f1"}.get(item.name.partition("=")[0])
    return f"{of_part if is_main and of_part else rule.metric}[{item.name}]"
