"""Verdict on an evaluated model: the verdict of each rule of a gate, and the blessing that follows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from shardline.components.model_store import BLESSED, NOT_BLESSED, Verdict
from shardline.components.text import enumerate_names
from shardline.components.validate.gate.gate import CHAMPION, EXAMPLES, VARIETY, Gate
from shardline.components.validate.gate.rules import OFF, OPERATORS, GateRule, evaluate_expression
from shardline.components.validate.metrics.evaluation import MIN_SLICE, Evaluation, Interval, Lead
from shardline.components.validate.metrics.metrics import CHECKS, SHARES

# Limits of the warnings on calibration error, and on costs as multiples of the champion's. Other load on the
# machine can double a latency.
_MAX_ECE = 0.1
_MIN_COST = 0.01  # milliseconds, MB or log loss, below which growth does not matter
_COSTS = {
    "latency_p50_ms": ("The latency of one example", 4.0),
    "size_mb": ("The size on disk", 2.0),
    "log_loss": ("The log loss, the price of being sure and wrong,", 2.0),
}

_MAX_NAMES = 5

#: Beginning of the verdict on a model that only the comparison with the champion blocks.
NOT_BETTER = "good enough, but not better than the champion"
#: Beginning of the verdict on a model that is better than a constant answer, but on too few test examples.
UNSURE = "Not significantly better"

# Digits of a difference: 0.95 - 0.96 is a little less than -0.01.
_DIGITS = 9

# Labels of the metrics that are counts.
_LABELS = {metric.name: metric.label for metric in CHECKS}

# What a value is that fails a comparison, by its operator.
_FAILED = {">=": "below", ">": "not above", "<=": "above", "<": "not below", "==": "not"}

# Headlines of the rules about the model that failed, by their name.
_HEADLINES = {
    "classes": "Never predicts {blind_to}",
    VARIETY: "Cannot be judged: {rule.note}",
    EXAMPLES: "Too few to judge: {rule.left_text} test examples",
    "export": "The exported model answers differently from the trained one, by up to {rule.left_text}",
    "golden": "The exported model answers differently in a clean process, by up to {rule.left_text}",
    "finite": "Outputs that are not finite, for {rule.left_text} examples",
    "batch": "Answers depend on the other examples of a request, by up to {rule.left_text}",
}

#: "undecided": a value is missing. "open": too few examples to decide; does not block. "skipped": the policy
#: for a first run lets it pass. "off": a default rule that the settings leave out.
Judgement = Literal["passed", "failed", "undecided", "open", "skipped", "off"]


@dataclass(frozen=True)
class Absence:
    """Reason why there is no champion to compare with; `first` where the model store has none yet."""

    text: str
    first: bool = False


@dataclass(frozen=True)
class JudgedRule:
    """One rule, its two sides and the verdict on it.

    Attributes:
        rule: The rule as it was written: "accuracy >= champion - 0.005".
        metric: Its metric expression: "accuracy", "recall[class=healthy]", "worst_slice(accuracy)".
        left: Value of the metric expression; None where it could not be measured.
        right: The limit; None where the reference's value could not be measured.
        difference: 95 % interval of the value minus the reference's, paired.
        note: Remark (which slice is the worst, why the rule is undecided), or "".
        name, why: Name and purpose of a default rule; "" for a user's.
    """

    rule: str
    metric: str
    left: float | None
    operator: str
    right: float | None
    verdict: Judgement
    interval: Interval | None = None
    champion: float | None = None
    difference: Interval | None = None
    p: float | None = None
    note: str = ""
    name: str = ""
    why: str = ""

    @property
    def left_text(self) -> str:
        """The value as text; never rounded to a limit that it does not equal."""
        if self.left is None:
            return "not measured" if self.metric else ""
        if isinstance(self.left, int):
            return f"{self.left:,}"
        short = f"{self.left:.4f}" if self.left == 0 or 0.001 <= abs(self.left) < 1000 else f"{self.left:.4g}"
        return repr(self.left) if float(short) == self.right and self.left != self.right else short

    @property
    def right_text(self) -> str:
        """The limit as text."""
        unknown = "the champion's" if self.metric else ""
        return unknown if self.right is None else f"{self.right:g}"

    def __str__(self) -> str:
        if self.verdict == "off":
            return f"the rule {self.name!r} is off"
        note = f" ({self.note})" if self.note else ""
        if self.verdict in ("undecided", "skipped", "open"):
            return f"{self.rule} is {'not decided' if self.verdict == 'open' else self.verdict}{note}"
        significantly = f"not significantly {'above' if self.operator == '>' else 'below'}"
        failed = _FAILED[self.operator] if self.p is None else significantly
        label = _LABELS.get(self.metric)
        left = f"{label or self.metric}{':' if label else ''} {self.left_text}"
        comparison = (
            f"{',' if label else ' is'} {failed}" if self.verdict == "failed" else f" {self.operator}"
        )
        return f"{left}{comparison} {self.right_text}{note}"


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
        blocking = [rule for rule in self.rules if str(rule) in self.reason]
        blocking.sort(key=lambda rule: rule.name != CHAMPION)
        first, others = blocking[0], ", ".join(rule.name or rule.rule for rule in blocking[1:])
        also = f"; also {others}" if others else ""
        if blocking[-1].name == CHAMPION and first.champion is not None:
            return f"{NOT_BETTER}: {first}{also}"
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
    rules = tuple(_judge(rule, evaluation, gate, absence) for rule in gate.rules)
    stopping = ("failed",) if gate.allow_undecided else ("failed", "undecided")
    blocking = [rule for rule in rules if rule.verdict in stopping]
    shown = blocking or [rule for rule in rules if not rule.name or rule.verdict != "passed"] or rules
    return Blessing(
        blessed=not blocking,
        rules=rules,
        reason="; ".join(map(str, shown)) if rules else "there is no rule that it must pass",
        warnings=(*warnings, *_warnings(evaluation, rules, absence)),
        headline=_headline(blocking, rules, evaluation, first=absence is not None and absence.first),
        champion=champion,
    )


def _warnings(evaluation: Evaluation, rules: tuple[JudgedRule, ...], absence: Absence | None) -> list[str]:
    missed = [f"{item.name.partition('=')[2]} ({item.examples:,})" for item in evaluation.never_predicted]
    warnings = []
    if missed:
        few = f"; fewer than {MIN_SLICE} test examples are not judged"
        few = "" if len(missed) == len(evaluation.blind_to) else few
        warnings.append(f"Never predicted: {enumerate_names(missed, _MAX_NAMES)}{few}")
    if off := [rule.name for rule in rules if rule.verdict == "off"]:
        warnings.append(f"Rules of the gate that are switched off: {', '.join(off)}")
    if CHAMPION in off and absence and not absence.first:
        warnings.append(f"Not compared with the champion: {absence.text}")
    same = evaluation.champion_comparison
    before = same.champion.metrics if same.champion else {}
    by_prefix = {f"{part.label}." if evaluation.parts else "": part for part in evaluation.each}
    for prefix, part in by_prefix.items():
        text = prefix.replace(".", ": ")
        if crossed := part.metrics.get("quantile_crossings", 0):
            warnings.append(
                f"{text}Quantiles of {crossed:,.0f} of {part.examples:,} examples cross: a lower one is "
                "above a higher one"
            )
        if (error := evaluation.metrics.get(f"{prefix}ece", 0.0)) > _MAX_ECE:
            points = f"{100 * error:.1f} points on average (calibration error)"
            warnings.append(f"{text}Probabilities are off by {points}")
    for metric, prefix in product(_COSTS, dict.fromkeys(("", *by_prefix))):
        (label, most), name = _COSTS[metric], f"{prefix}{metric}"
        usual = max(before.get(name, math.inf), _MIN_COST)
        if (now := same.metrics.get(name, 0.0)) > most * usual:
            growth = f"has grown to {now / usual:.1f} times the champion's"
            warnings.append(f"{prefix.replace('.', ': ')}{label} {growth}")
    return warnings


def _judge(rule: GateRule, evaluation: Evaluation, gate: Gate, absence: Absence | None) -> JudgedRule:
    if rule.operator == OFF:
        return JudgedRule(OFF, "", None, "", None, "off", name=rule.name)
    if rule.reference == "champion":
        evaluation = evaluation.champion_comparison
    left, interval, note = evaluate_expression(rule, evaluation)
    judged = JudgedRule(rule.text, rule.expression, left, rule.operator, rule.limit, "undecided", interval)
    judged = replace(judged, note=note, name=rule.name, why=rule.why)
    no_drift = rule.is_drift and not evaluation.drift
    if (evaluation.champion is None and (rule.reference == "champion" or no_drift)) or (no_drift and absence):
        return _without_champion(judged, gate, absence, is_reference=rule.reference == "champion")
    if no_drift:
        return replace(judged, note=evaluation.no_drift)
    lead = None
    if rule.reference:
        judged, lead = _compare_with_reference(rule, judged, evaluation)
    if left is None or judged.right is None or (rule.p is not None and judged.p is None):
        return judged
    if rule.within is not None:
        return _judge_within(rule, judged, lead, evaluation.examples)
    passed, more = OPERATORS[rule.operator](left, judged.right), ""
    if rule.p is not None and judged.p is not None:
        passed = passed and judged.p < rule.p
        note = f"p = {judged.p:.3f}, must be below {rule.p:g}"
        judged = replace(judged, note="; ".join(filter(None, (judged.note, note))))
    verdict: Judgement = "passed" if passed else "failed"
    if not passed and rule.name == EXAMPLES and rule.why:  # a user's limit is not subject to first_run
        verdict = "skipped" if gate.first_run == "bless" else "failed"
        more = f"too few to judge; first_run is {gate.first_run}"
    elif passed and not rule.reference:
        more = _describe_uncertainty(judged)
    return replace(judged, verdict=verdict, note="; ".join(filter(None, (judged.note, more))))


def _without_champion(
    judged: JudgedRule, gate: Gate, absence: Absence | None, *, is_reference: bool
) -> JudgedRule:
    """Judges a rule about a champion that was not measured; `allow_undecided` does not apply."""
    verdict: Judgement = "skipped"
    if absence is None:
        note = "champion_uri is empty: there is nothing to compare with"
    elif absence.first:
        note = f"{absence.text}; first_run is {gate.first_run}"
        verdict = "skipped" if gate.first_run == "bless" else "failed"
    else:
        note, verdict = absence.text, "failed"
    return replace(judged, right=None if is_reference else judged.right, verdict=verdict, note=note)


def _compare_with_reference(
    rule: GateRule, judged: JudgedRule, evaluation: Evaluation
) -> tuple[JudgedRule, Lead | None]:
    """Returns a rule with the value of its reference, champion or baseline, and the lead over it."""
    if rule.reference == "baseline":
        other = evaluation.of(rule.label).baseline
        theirs = other.metrics.get(rule.metric) if other else None
        lead = other.leads.get(rule.metric) if other else None
        note = f"always answering {other.answer}" if other else "the baseline was not measured"
    else:
        assert evaluation.champion is not None
        theirs, _, reason = evaluate_expression(rule, evaluation.champion)
        lead = evaluation.leads.get(rule.expression)
        note = f"champion: {reason}" if theirs is None else ""
    return replace(
        judged,
        right=None if theirs is None else theirs * rule.factor + rule.limit,
        champion=theirs if rule.reference == "champion" else None,
        difference=lead.interval if lead else None,
        p=lead.p if lead and rule.p is not None else None,
        note=judged.note or note,
    ), lead


def _judge_within(rule: GateRule, judged: JudgedRule, lead: Lead | None, examples: int) -> JudgedRule:
    """Judges a rule that allows a model to be somewhat worse, unless it is significantly worse."""
    assert rule.within is not None
    assert judged.left is not None
    assert judged.right is not None
    allowed = rule.within * (abs(judged.right) if rule.relative else 1.0)
    sign = 1.0 if rule.operator == ">=" else -1.0
    ahead = round(sign * (judged.left - judged.right), _DIGITS)
    lower, upper = sorted(sign * end for end in lead.interval) if lead else (ahead, ahead)
    verdict: Judgement
    if not ahead >= -allowed:  # NaN fails this too
        verdict, note = "failed", f"worse by {-ahead:.4g}, more than {allowed:.4g}"
    elif lead and upper < 0:
        verdict, note = "failed", f"significantly worse, by {-upper:.4g} to {-lower:.4g}"
    elif lower < -allowed:
        verdict = "open"
        note = f"{examples:,} examples leave open whether it is worse, by up to {-lower:.4g}"
    else:
        verdict, note = "passed", ""
    return replace(judged, verdict=verdict, note="; ".join(filter(None, (judged.note, note))))


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


def _headline(
    blocking: list[JudgedRule], rules: tuple[JudgedRule, ...], evaluation: Evaluation, *, first: bool
) -> str:
    """Returns the verdict in one short sentence."""
    if blocking:
        first_rule = min(blocking, key=lambda rule: rule.name != CHAMPION)
        more = f" (and {len(blocking) - 1} more)" if len(blocking) > 1 else ""
        return f"{_describe_rule(first_rule, evaluation)}{more}{NOT_BLESSED}"
    off = any(rule.name == CHAMPION and rule.verdict == "off" for rule in rules)
    too_few = next((rule for rule in rules if rule.name == EXAMPLES and rule.verdict == "skipped"), None)
    few = f", on too few examples to judge ({too_few.left_text})" if too_few else ""
    versus = next((rule for rule in rules if rule.name == CHAMPION), None)
    if versus is None or versus.left is None or versus.champion is None:
        start = "First champion" if first and not off else "Compared with no champion"
        return f"{start}, {evaluation.quality}{few}{BLESSED}"
    others = [rule for rule in rules if rule.name == CHAMPION and rule is not versus]
    sentences = [_describe_rule(rule, evaluation) for rule in (versus, *others)]
    return f"{'; '.join(sentences)}{few}{BLESSED}"


def _describe_rule(rule: JudgedRule, evaluation: Evaluation) -> str:
    if rule.name == CHAMPION:
        return _describe_champion_difference(rule)
    if rule.why and rule.verdict == "failed":
        if text := _HEADLINES.get(rule.name):
            return text.format(rule=rule, blind_to=enumerate_names(evaluation.blind_to, _MAX_NAMES))
        baseline = evaluation.of(label := rule.metric.rpartition(".")[0]).baseline
        if rule.left is not None and rule.right is not None and baseline:
            ahead, by = OPERATORS[rule.operator](rule.left, rule.right), f" in {rule.metric}" if label else ""
            return f"{UNSURE if ahead else 'No better'}{by} than always answering {baseline.answer}"
    return str(rule)


def _describe_champion_difference(rule: JudgedRule) -> str:
    if rule.left is None or rule.champion is None:
        # Without the remedy, which follows the semicolon.
        return f"Not compared with the champion: {rule.note.partition('; ')[0]}"
    difference = rule.left - rule.champion
    if not difference:
        return "As good as the champion"
    ahead = (difference > 0) == (rule.operator in (">=", ">"))
    label, _, metric = rule.metric.rpartition(".")
    by = f"{100 * abs(difference):.1f} points" if metric in SHARES else f"{abs(difference):.4g}"
    by += f" {'better' if ahead else 'worse'}" + (
        f" in {rule.metric}" if label or metric not in SHARES else ""
    )
    if rule.verdict == "failed" and ahead:
        return str(rule)
    if rule.verdict == "open":
        return f"Not decided whether it is worse than the champion ({by})"
    if rule.verdict == "passed" and not ahead:
        return f"As good as the champion ({by}, within what is allowed)"
    return f"{by} than the champion"
