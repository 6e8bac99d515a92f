"""Verdict on an evaluated model: the verdict of each rule of a gate, and the blessing that follows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from shardline.components.model_store import Verdict
from shardline.components.text import enumerate_names
from shardline.components.validate.gate.judged import (
    MAX_NAMES,
    JudgedRule,
    Judgement,
    TrainingRecord,
    describe_verdict,
    find_remedy,
    format_p,
)
from shardline.components.validate.metrics import LOWER_IS_BETTER, MAIN
from shardline.components.validate.metrics.evaluation import MIN_SLICE, BestLead, Evaluation, Interval, Lead
from shardline.components.validate.metrics.intervals import p_below, p_within
from shardline.components.validate.rules import (
    BEST,
    CHAMPION,
    EXAMPLES,
    FAMILY,
    LEVEL,
    LOOKS,
    OFF,
    OPERATORS,
    Gate,
    GateRule,
)

# Digits of a difference: 0.95 - 0.96 is a little less than -0.01.
_DIGITS = 9


class Comparison(NamedTuple):
    """One comparison of a rule.

    Attributes:
        slice: Name of the slice; "" for all examples.
        left, right: The value, and that of the reference or the limit.
        holds: Whether the rule holds here; with a tolerance, beyond doubt.
        p: One-sided p value of "the value is not worse", by more than is allowed.
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


def find_comparisons(
    rules: Sequence[GateRule], evaluation: Evaluation
) -> Mapping[GateRule, list[Comparison]]:
    """Returns the comparisons of each rule with a tolerance, and of each rule about the worst slice.

    A rule whose values are not known has none.
    """
    families = defaultdict[tuple[str, float], list[tuple[GateRule, Comparison]]](list)
    of_best = sum(rule.reference == BEST for rule in rules)
    for rule in dict.fromkeys(rules):
        families[_family(rule, of_best)] += [(rule, each) for each in _compare(rule, evaluation)]
    decided: dict[GateRule, list[Comparison]] = {}
    for (_, level), members in families.items():
        rejected = reject_by_holm([each.p for _, each in members], level)
        for (rule, each), is_worse in zip(members, rejected, strict=True):
            decided.setdefault(rule, []).append(each._replace(worse=is_worse and not each.holds))
    return decided


def reject_by_holm(values: Sequence[float], level: float = FAMILY) -> list[bool]:
    """Returns which p values of a family are significant (Holm, 1979), none of them above `level`; NaN is."""
    values = [0.0 if math.isnan(value) else value for value in values]
    rejected = [False] * len(values)
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        if values[index] >= min(FAMILY / (len(values) - rank), level):
            break
        rejected[index] = True
    return rejected


def _family(rule: GateRule, of_best: int) -> tuple[str, float]:
    """Returns the family of a rule's comparisons, and the highest level of a single one."""
    if rule.reference == BEST:  # a share for each look, such rule, and champion (Bonferroni)
        return rule.text, FAMILY / (LOOKS * of_best * rule.last)
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
        best = evaluation.best.get(rule.expression, BestLead())
        which = f"{best.version} is the best of {best.compared} champions" if best.version else ""
        return best.value, best.lead, "; ".join(filter(None, (which, best.note)))
    assert evaluation.champion
    theirs, _, reason = rule.measure(evaluation.champion)
    return theirs, evaluation.leads.get(rule.expression), f"champion: {reason}" if theirs is None else ""


def _compare(rule: GateRule, evaluation: Evaluation) -> Iterator[Comparison]:
    if rule.of_champions:
        evaluation = evaluation.champion_comparison
        if evaluation.champion is None:
            return
    if rule.worst and (rule.within is not None) == bool(rule.reference):
        yield from _compare_slices(rule, evaluation)
    elif rule.within is not None:
        left, (right, lead, _) = rule.measure(evaluation)[0], find_reference(rule, evaluation)
        if rule.reference == BEST and right is not None:  # perhaps on other examples than the champion's
            left = right + lead.difference if lead else None
        if left is not None and right is not None:
            yield _compare_within(rule, rule.slice, left, right, lead, evaluation)


def _compare_slices(rule: GateRule, evaluation: Evaluation) -> Iterator[Comparison]:
    part, lower = evaluation.of(rule.label), rule.metric in LOWER_IS_BETTER
    theirs = {item.name: value for item, value in rule.measure_slices(evaluation.champion or evaluation)}
    for item, value in rule.measure_slices(evaluation):
        of_part = {"class": "recall", "label": "f1"}.get(item.name.partition("=")[0])
        # The accuracy of a class is its recall.
        name = f"{of_part if of_part and rule.metric == MAIN[part.kind] else rule.metric}[{item.name}]"
        if rule.reference and item.decided:
            lead = evaluation.leads.get(".".join(filter(None, (rule.label, name))))
            other = theirs.get(item.name, math.nan)
            yield _compare_within(rule, item.name, value, other, lead, evaluation)
        elif item.decided and (rule.operator in ("<=", "<")) == lower:
            interval = part.intervals.get(name) if of_part else item.interval
            share = rule.metric in ("accuracy", "recall")
            p = p_below(value, rule.limit, interval, item.effective, share=share, lower_is_better=lower)
            holds = OPERATORS[rule.operator](value, rule.limit)
            yield Comparison(item.name, value, rule.limit, holds, p, -abs(value - rule.limit))


def _compare_within(
    rule: GateRule, name: str, left: float, right: float, lead: Lead | None, evaluation: Evaluation
) -> Comparison:
    """Compares with a reference; without a lead, as measured, but a single group decides nothing."""
    if lead is None and (groups := evaluation.groups) and (name or groups.count < 2):
        return Comparison(name, left, right, holds=False, p=1.0, least=-math.inf)
    allowed = (rule.within or 0.0) * (abs(right) if rule.relative else 1.0)
    sign = 1.0 if rule.operator == ">=" else -1.0
    least = min(sign * end for end in lead.interval) if lead else sign * (left - right)
    holds = round(least, _DIGITS) >= -allowed  # NaN does not
    p = p_within(lead, allowed, lower_is_better=sign < 0) if lead else float(holds)
    return Comparison(name, left, right, holds, p, least, lead.interval if lead else None)


# How much larger than the champion's a log loss may be: as a share of it, more than between trainings with
# other seeds (benchmarks/RESULTS.md), and in nats, where the champion's is next to 0.
_LOSS_SHARE, _LOSS_LEAST = 0.25, 0.02
# Limits of the warnings on calibration error, and on costs as multiples of the champion's. Other load on the
# machine can double a latency.
_MAX_ECE = 0.1
_MIN_COST = 0.01  # milliseconds, MB or log loss, below which growth does not matter
_COSTS = {
    "latency_p50_ms": ("The latency of one example", 4.0),
    "size_mb": ("The size on disk", 2.0),
    "log_loss": ("The log loss, the price of being sure and wrong,", 2.0),
}


@dataclass(frozen=True)
class NoChampion:
    """Reason why there is no champion to compare with; `first` where the model store has none yet."""

    reason: str
    first: bool = False


@dataclass(frozen=True, kw_only=True)
class Blessing(Verdict):
    """The verdict on an exported model.

    Attributes:
        rules: Each rule with the verdict on it.
        warnings: Warnings that do not affect the verdict, a sentence each.
    """

    rules: tuple[JudgedRule, ...] = ()
    warnings: tuple[str, ...] = ()

    def explain(self) -> str:
        """Returns the verdict in words: of a blocked model the first rule with value and bound."""
        if self.blessed:
            return self.summary
        blocking = (rule for rule in self.rules if rule.blocks)
        first, *others = sorted(blocking, key=lambda rule: rule.name != CHAMPION)
        also = f"; also {', '.join(rule.name or rule.rule for rule in others)}" if others else ""
        about = self.summary.partition(" (and ")[0]
        why = first if first.name == CHAMPION or about in str(first) else f"{about}: {first}"
        return f"blocked{f' by the rule {first.name}' if first.name else ''}: {why}{also}"


_DEFAULT = Gate()


def judge(
    evaluation: Evaluation,
    rules: Sequence[GateRule],
    gate: Gate = _DEFAULT,
    *,
    missing: NoChampion | None = None,
    champion: str | None = None,
    warnings: tuple[str, ...] = (),
    training: TrainingRecord | None = None,
    champion_training: Mapping[str, Any] | None = None,
) -> Blessing:
    """Returns the verdict on an evaluation by rules, and by the policies of a gate.

    `missing` says why the evaluation has no champion; None where it has one, or no `champion_uri` is set.
    `champion` is the champion's version. `warnings` come before those of the verdict. The remedy follows from
    the records of both trainings, where they are known.
    """
    found = find_comparisons(rules, evaluation)
    each = (_judge(rule, evaluation, gate, missing, found.get(rule, ())) for rule in rules)
    stopping = ["failed"] + ["unmeasured"] * (not gate.allow_unmeasured)
    stopping += ["undecided"] * (gate.undecided == "block")
    judged = tuple(replace(rule, blocks=rule.verdict in stopping) for rule in each)
    blocking = [rule for rule in judged if rule.blocks]
    undecided = [rule for rule in judged if rule.verdict == "undecided"]
    shown = blocking or [rule for rule in judged if not rule.name or rule.verdict != "passed"] or judged
    return Blessing(
        blessed=not blocking,
        rules=judged,
        reason="; ".join(map(str, shown)) or "there is no rule that it must pass",
        warnings=(*warnings, *_warnings(evaluation, judged, missing)),
        headline=describe_verdict(judged, evaluation, first=missing is not None and missing.first),
        champion=champion,
        blocked_by=tuple(dict.fromkeys(rule.name or rule.rule for rule in blocking)),
        undecided=bool(undecided),
        remedy=find_remedy(
            blocking or undecided, evaluation, training or TrainingRecord(), champion_training
        ),
        metrics=evaluation.metrics,
    )


def _warnings(evaluation: Evaluation, rules: tuple[JudgedRule, ...], missing: NoChampion | None) -> list[str]:
    missed = [f"{item.name.partition('=')[2]} ({item.examples:,})" for item in evaluation.never_predicted]
    warnings = []
    if missed:
        few = f"; fewer than {MIN_SLICE} test examples are not judged"
        few = "" if len(missed) == len(evaluation.blind_to) else few
        warnings.append(f"Never predicted: {enumerate_names(missed, MAX_NAMES)}{few}")
    if off := [rule.name for rule in rules if rule.verdict == "off"]:
        warnings.append(f"Rules of the gate that are switched off: {', '.join(off)}")
    if CHAMPION in off and missing and not missing.first:
        warnings.append(f"Not compared with the champion: {missing.reason}")
    same = evaluation.champion_comparison
    before = same.champion.metrics if same.champion else {}
    prefixes = [f"{part.label}." if evaluation.parts else "" for part in evaluation.each]
    for prefix in prefixes:
        if (error := evaluation.metrics.get(f"{prefix}ece", 0.0)) > _MAX_ECE:
            points = f"{100 * error:.1f} points on average (calibration error)"
            warnings.append(f"{prefix.replace('.', ': ')}Probabilities are off by {points}")
    for metric, prefix in product(_COSTS, dict.fromkeys(("", *prefixes))):
        (label, most), name = _COSTS[metric], f"{prefix}{metric}"
        usual = max(before.get(name, math.inf), _MIN_COST)
        if (now := same.metrics.get(name, 0.0)) > most * usual:
            growth = f"has grown to {now / usual:.1f} times the champion's"
            warnings.append(f"{prefix.replace('.', ': ')}{label} {growth}")
    return warnings


def _judge(
    rule: GateRule,
    evaluation: Evaluation,
    gate: Gate,
    missing: NoChampion | None,
    comparisons: Sequence[Comparison],
) -> JudgedRule:
    if rule.operator == OFF:
        return JudgedRule(OFF, "", None, "", None, "off", name=rule.name)
    if rule.of_champions:
        evaluation = evaluation.champion_comparison
    left, interval, note = rule.measure(evaluation)
    judged = JudgedRule(rule.text, rule.expression, left, rule.operator, rule.limit, "unmeasured", interval)
    judged = replace(judged, note=note, name=rule.name, why=rule.why, reference=rule.reference)
    no_drift = rule.is_drift and not evaluation.drift
    if (evaluation.champion is None and (rule.of_champions or no_drift)) or (no_drift and missing):
        return _without_champion(rule, judged, gate, missing)
    if no_drift:
        return replace(judged, note=evaluation.no_drift)
    if rule.reference:
        judged = _compare_with_reference(rule, judged, evaluation)
    if comparisons:
        decided = _decide(rule, judged, comparisons, evaluation.sample)
        is_open = decided.verdict == "undecided" and rule.name == CHAMPION and not rule.slice
        return _decide_by_log_loss(rule, decided, evaluation) if is_open else decided
    if rule.reference == BEST:
        best = evaluation.best.get(rule.expression)
        return replace(judged, verdict="passed") if best and not best.version else judged
    if left is None or judged.right is None:
        return judged
    passed, notes = OPERATORS[rule.operator](left, judged.right), [judged.note]
    if rule.p is not None:
        over = f" over {evaluation.groups}" if evaluation.groups else ""
        if judged.p is None:
            return replace(judged, note=f"{judged.note}; there is no p value{over}" if over else judged.note)
        passed = passed and judged.p < rule.p
        notes.append(f"{format_p(judged.p, rule.p)}{over}, must be below {rule.p:g}")
    verdict: Judgement = "passed" if passed else "failed"
    if not passed and rule.name == EXAMPLES and rule.why:  # a user's limit is not subject to first_run
        verdict = "skipped" if gate.first_run == "bless" else "failed"
        notes.append(f"too few to judge; first_run is {gate.first_run}")
    elif passed and not rule.reference:
        notes.append(_describe_uncertainty(judged))
    return replace(judged, verdict=verdict, note="; ".join(filter(None, notes)))


def _without_champion(
    rule: GateRule, judged: JudgedRule, gate: Gate, missing: NoChampion | None
) -> JudgedRule:
    """Judges a rule about a champion that was not measured; `allow_unmeasured` does not apply."""
    verdict: Judgement = "skipped"
    if missing is None:
        note = "champion_uri is empty: there is nothing to compare with"
    elif rule.reference == BEST:  # the rule about the champion decides
        note = missing.reason
    elif missing.first:
        note = f"{missing.reason}; first_run is {gate.first_run}"
        verdict = "skipped" if gate.first_run == "bless" else "failed"
    else:
        note, verdict = missing.reason, "failed"
    return replace(judged, right=None if rule.reference else judged.right, verdict=verdict, note=note)


def _compare_with_reference(rule: GateRule, judged: JudgedRule, evaluation: Evaluation) -> JudgedRule:
    theirs, lead, note = find_reference(rule, evaluation)
    return replace(
        judged,
        right=None if theirs is None else theirs * rule.factor + rule.limit,
        champion=None if rule.reference == "baseline" else theirs,
        difference=lead.interval if lead else None,
        p=lead.p if lead and rule.p is not None else None,
        note=judged.note or note,
    )


def _decide(rule: GateRule, judged: JudgedRule, comparisons: Sequence[Comparison], sample: str) -> JudgedRule:
    """Judges a rule by its comparisons: failed where one is worse, undecided where one does not hold."""
    worse = [each for each in comparisons if each.worse]
    undecided = [each for each in comparisons if not each.holds and rule.reference != BEST]
    verdict: Judgement = "failed" if worse else "undecided" if undecided else "passed"
    chosen = sorted(worse or undecided or comparisons, key=lambda each: each.least)
    first, texts = chosen[0], list[str]()
    for each in chosen:
        within = each.difference and ", within {:+.4g} to {:+.4g}".format(*each.difference)
        value = f"{each.left - each.right:+.4g}{within or ''}" if rule.reference else f"{each.left:.4f}"
        texts.append(f"{each.slice} {value}".lstrip())
    if rule.within is not None:
        left, right = (None if math.isnan(value) else value for value in (first.left, first.right))
        judged = replace(judged, left=left, right=right, difference=first.difference)
        judged = replace(judged, champion=None if rule.reference == "baseline" else right)
    start = "worse beyond doubt: " if first.difference else "worse, as measured: " * bool(rule.reference)
    if not worse:
        start = f"{'too few examples' if first.slice else sample} leave open whether it is worse"
        start += " than allowed: " if rule.within else ": "
    is_other = rule.worst and (verdict != "passed" or rule.within is not None)  # a note on another slice
    notes = ["" if is_other else judged.note]
    notes += [start + enumerate_names(texts, MAX_NAMES, "; ")] * (verdict != "passed")
    return replace(judged, verdict=verdict, note="; ".join(filter(None, notes)))


def _decide_by_log_loss(rule: GateRule, judged: JudgedRule, evaluation: Evaluation) -> JudgedRule:
    """Fails a model whose answers may be as often right as the champion's, if it surely is far less sure.

    The log loss of the same answers sees more: not only whether each is right, but how much worse it is.
    """
    of_loss = replace(rule, metric="log_loss", operator="<=")
    ours, (theirs, lead, _) = of_loss.measure(evaluation)[0], find_reference(of_loss, evaluation)
    if ours is None or theirs is None or lead is None:
        return judged
    allowed = max(_LOSS_SHARE * theirs, _LOSS_LEAST)
    if p_within(lead, allowed, lower_is_better=True) >= LEVEL:
        return judged
    note = f"{judged.note}; the log loss of the same answers decides: within {lead.interval[0]:+.4g} to "
    note += f"{lead.interval[1]:+.4g} of the champion's"
    judged = replace(judged, metric=of_loss.expression, operator="<=", right=theirs + allowed, interval=None)
    return replace(judged, verdict="failed", left=ours, champion=theirs, difference=lead.interval, note=note)


def _describe_uncertainty(judged: JudgedRule) -> str:
    """Returns a note where the interval of a value includes the limit, else ""."""
    if not judged.interval or judged.right is None:
        return ""
    lower, upper = judged.interval
    if judged.operator in (">=", ">") and lower < judged.right:
        return f"may be below: the interval begins at {lower:.4f}"
    if judged.operator in ("<=", "<") and upper > judged.right:
        return f"may be above: the interval ends at {upper:.4f}"
    return ""
