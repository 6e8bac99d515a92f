"""Verdict on an evaluated model: the verdict of each rule of a gate, and the blessing that follows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from shardline.components.model_store import Verdict
from shardline.components.text import enumerate_names
from shardline.components.validate.gate.comparisons import Comparison, compare, find_reference
from shardline.components.validate.gate.gate import CHAMPION, EXAMPLES, Gate
from shardline.components.validate.gate.judged_rule import MAX_NAMES, JudgedRule, Judgement, describe
from shardline.components.validate.gate.rules import BEST, OFF, OPERATORS, GateRule, evaluate_expression
from shardline.components.validate.metrics.evaluation import MIN_SLICE, Evaluation

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
class Absence:
    """Reason why there is no champion to compare with; `first` where the model store has none yet."""

    text: str
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


def judge(
    evaluation: Evaluation,
    gate: Gate,
    *,
    absence: Absence | None = None,
    champion: str | None = None,
    warnings: tuple[str, ...] = (),
) -> Blessing:
    """Returns the verdict on an evaluation.

    `absence` says why the evaluation has no champion; None where it has one, or no `champion_uri` is set.
    `champion` is the champion's version. `warnings` come before those of the verdict.
    """
    found = compare(gate.rules, evaluation)
    judged = (_judge(rule, evaluation, gate, absence, found.get(rule, ())) for rule in gate.rules)
    stopping = ["failed"] + ["unmeasured"] * (not gate.allow_unmeasured)
    stopping += ["undecided"] * (gate.undecided == "block")
    rules = tuple(replace(rule, blocks=rule.verdict in stopping) for rule in judged)
    blocking = [rule for rule in rules if rule.blocks]
    shown = blocking or [rule for rule in rules if not rule.name or rule.verdict != "passed"] or rules
    return Blessing(
        blessed=not blocking,
        rules=rules,
        reason="; ".join(map(str, shown)) if rules else "there is no rule that it must pass",
        warnings=(*warnings, *_warnings(evaluation, rules, absence)),
        headline=describe(blocking, rules, evaluation, first=absence is not None and absence.first),
        champion=champion,
    )


def _warnings(evaluation: Evaluation, rules: tuple[JudgedRule, ...], absence: Absence | None) -> list[str]:
    missed = [f"{item.name.partition('=')[2]} ({item.examples:,})" for item in evaluation.never_predicted]
    warnings = []
    if missed:
        few = f"; fewer than {MIN_SLICE} test examples are not judged"
        few = "" if len(missed) == len(evaluation.blind_to) else few
        warnings.append(f"Never predicted: {enumerate_names(missed, MAX_NAMES)}{few}")
    if off := [rule.name for rule in rules if rule.verdict == "off"]:
        warnings.append(f"Rules of the gate that are switched off: {', '.join(off)}")
    if CHAMPION in off and absence and not absence.first:
        warnings.append(f"Not compared with the champion: {absence.text}")
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
    absence: Absence | None,
    comparisons: Sequence[Comparison],
) -> JudgedRule:
    if rule.operator == OFF:
        return JudgedRule(OFF, "", None, "", None, "off", name=rule.name)
    of_champions = rule.reference in ("champion", BEST)
    if of_champions:
        evaluation = evaluation.champion_comparison
    left, interval, note = evaluate_expression(rule, evaluation)
    judged = JudgedRule(rule.text, rule.expression, left, rule.operator, rule.limit, "unmeasured", interval)
    judged = replace(judged, note=note, name=rule.name, why=rule.why, reference=rule.reference)
    no_drift = rule.is_drift and not evaluation.drift
    if (evaluation.champion is None and (of_champions or no_drift)) or (no_drift and absence):
        return _without_champion(rule, judged, gate, absence)
    if no_drift:
        return replace(judged, note=evaluation.no_drift)
    if rule.reference:
        judged = _compare_with_reference(rule, judged, evaluation)
    if comparisons:
        return _decide(rule, judged, comparisons, evaluation.sample)
    if rule.reference == BEST:
        past = evaluation.past.get(rule.expression)
        return replace(judged, verdict="passed") if past and not past.version else judged
    if left is None or judged.right is None:
        return judged
    passed, notes = OPERATORS[rule.operator](left, judged.right), [judged.note]
    if rule.p is not None:
        over = f" over {evaluation.groups}" if evaluation.groups else ""
        if judged.p is None:
            return replace(judged, note=f"{judged.note}; there is no p value{over}" if over else judged.note)
        passed = passed and judged.p < rule.p
        notes.append(f"p = {judged.p:.3f}{over}, must be below {rule.p:g}")
    verdict: Judgement = "passed" if passed else "failed"
    if not passed and rule.name == EXAMPLES and rule.why:  # a user's limit is not subject to first_run
        verdict = "skipped" if gate.first_run == "bless" else "failed"
        notes.append(f"too few to judge; first_run is {gate.first_run}")
    elif passed and not rule.reference:
        notes.append(_describe_uncertainty(judged))
    return replace(judged, verdict=verdict, note="; ".join(filter(None, notes)))


def _without_champion(rule: GateRule, judged: JudgedRule, gate: Gate, absence: Absence | None) -> JudgedRule:
    """Judges a rule about a champion that was not measured; `allow_unmeasured` does not apply."""
    verdict: Judgement = "skipped"
    if absence is None:
        note = "champion_uri is empty: there is nothing to compare with"
    elif rule.reference == BEST:  # the rule about the champion decides
        note = absence.text
    elif absence.first:
        note = f"{absence.text}; first_run is {gate.first_run}"
        verdict = "skipped" if gate.first_run == "bless" else "failed"
    else:
        note, verdict = absence.text, "failed"
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
        judged = replace(judged, left=first.left, right=first.right, difference=first.difference)
        judged = replace(judged, champion=None if rule.reference == "baseline" else first.right)
    start = "worse beyond doubt: " if first.difference else "worse, as measured: " * bool(rule.reference)
    if not worse:
        start = f"{'too few examples' if first.slice else sample} leave open whether it is worse: "
    is_other = rule.worst and (verdict != "passed" or rule.within is not None)  # a note on another slice
    notes = ["" if is_other else judged.note]
    notes += [start + enumerate_names(texts, MAX_NAMES, "; ")] * (verdict != "passed")
    return replace(judged, verdict=verdict, note="; ".join(filter(None, notes)))


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
