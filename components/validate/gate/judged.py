"""Judged rules, and a verdict in words: the headline of a report, and how values and limits are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardline.components.model_store import BLESSED, NOT_BLESSED
from shardline.components.text import enumerate_names
from shardline.components.validate.gate.gate import CHAMPION, EXAMPLES, LEVEL, SLIDE, VARIETY
from shardline.components.validate.gate.power import PairedTest
from shardline.components.validate.gate.rules import BEST, OPERATORS, parse_rule
from shardline.components.validate.metrics.evaluation import Evaluation, Interval
from shardline.components.validate.metrics.metrics import CHECKS, OF_RARE, SHARES

#: Names in a sentence, at most.
MAX_NAMES = 5

# Labels of the metrics that are counts.
_LABELS = {metric.name: metric.label for metric in CHECKS}

# What a value is that fails a comparison, by its operator.
_FAILED = {">=": "below", ">": "not above", "<=": "above", "<": "not below", "==": "not"}

# Headlines of the rules about the model that failed, by their name.
_HEADLINES = {
    "classes": "never predicts {blind_to}",
    VARIETY: "cannot be judged, {rule.note}",
    EXAMPLES: "{rule.left_text} test examples are too few to judge",
    "export": "the exported model answers differently from the trained one, by up to {rule.left_text}",
    "golden": "with TensorFlow alone the exported model answers differently, by up to {rule.left_text}",
    "finite": "outputs that are NaN or infinite, for {rule.left_text} examples",
    "batch": "answers depend on the other examples of a request, by up to {rule.left_text}",
}

_MOST_DIGITS, _SMALLEST_P = 17, 0.001

#: "unmeasured": a value is missing. "undecided": too few examples to decide. "skipped": the policy for a
#: first run lets it pass. "off": a default rule that the settings leave out.
Judgement = Literal["passed", "failed", "unmeasured", "undecided", "skipped", "off"]


@dataclass(frozen=True)
class JudgedRule:
    """One rule, its two sides and the verdict on it.

    Attributes:
        rule: The rule as it was written: "accuracy >= champion - 0.005".
        metric: Its metric expression: "accuracy", "recall[class=healthy]", "worst_slice(accuracy)".
        left: Value of the metric expression; None where it could not be measured.
        right: The limit; None where the reference's value could not be measured.
        reference: What the limit is relative to, as of `GateRule`.
        difference: 95 % interval of the value minus the reference's, paired.
        note: Remark (which slice is the worst, why the rule is undecided), or "".
        name, why: Name and purpose of a default rule; "" for a user's.
        blocks: Whether it blocks the model, by its verdict and the policies of the gate.
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
    reference: str = ""
    blocks: bool = False

    @property
    def is_by_chance(self) -> bool:
        """Whether it failed though the value is on the right side: chance may explain that."""
        if self.verdict != "failed" or self.p is None or self.left is None or self.right is None:
            return False
        return OPERATORS[self.operator](self.left, self.right)

    @property
    def left_text(self) -> str:
        """The value as text, with as many digits as tell it from the limit."""
        if self.left is None:
            return "not measured" if self.metric else ""
        return f"{self.left:,}" if isinstance(self.left, int) else _tell_apart(self.left, self.right)

    @property
    def right_text(self) -> str:
        """The limit as text: one that was computed with the digits of the value."""
        if self.right is not None:
            short = f"{self.right:g}"
            computed = (
                self.left is not None
                and not isinstance(self.left, int)
                and round(self.right, 4) != self.right
            )
            return _tell_apart(self.right, self.left) if computed else short
        return f"the {'best champion' if self.reference == BEST else self.reference}'s" * bool(self.metric)

    def __str__(self) -> str:
        if self.verdict == "off":
            return f"the rule {self.name!r} is off"
        note = f" ({self.note})" if self.note else ""
        if self.verdict in ("unmeasured", "undecided", "skipped"):
            return f"{self.rule} is {'not decided' if self.verdict == 'undecided' else self.verdict}{note}"
        label, comparison = _LABELS.get(self.metric), f" {self.operator}"
        if self.verdict == "failed":
            significantly = f"not significantly {'above' if self.operator == '>' else 'below'}"
            failed = _FAILED[self.operator] if self.p is None else significantly
            comparison = f", {failed}" if label else f" is {failed}"
        left = f"{label}:" if label else self.metric
        return f"{left} {self.left_text}{comparison} {self.right_text}{note}"


def _tell_apart(value: float, other: float | None, least: int = 4) -> str:
    """Returns a value with at least so many digits, and as many as tell it from the other."""

    def text(number: float, digits: int) -> str:
        fixed = number == 0 or 0.001 <= abs(number) < 1000
        return f"{number:.{digits}{'f' if fixed else 'g'}}"

    differ = (n for n in range(least, _MOST_DIGITS) if other is None or text(value, n) != text(other, n))
    return text(value, least if value == other else next(differ, _MOST_DIGITS))


def format_p(p: float, limit: float) -> str:
    """Returns a p value as text, with as many digits as tell it from its limit."""
    return "p < 0.001" if p < _SMALLEST_P <= limit else f"p = {_tell_apart(p, limit, 3)}"


def describe(
    blocking: Sequence[JudgedRule], rules: Sequence[JudgedRule], evaluation: Evaluation, *, first: bool
) -> str:
    """Returns the verdict in one short sentence."""
    if blocking:
        first_rule = min(blocking, key=lambda rule: rule.name != CHAMPION)
        more = f" (and {len(blocking) - 1} more)" if len(blocking) > 1 else ""
        return f"{NOT_BLESSED}{_describe_rule(first_rule, evaluation)}{more}"
    too_few = next((rule for rule in rules if rule.name == EXAMPLES and rule.verdict == "skipped"), None)
    few = f", on too few examples to judge ({too_few.left_text})" if too_few else ""
    versus = [rule for rule in rules if rule.name == CHAMPION]
    sentences = [_describe_rule(rule, evaluation) for rule in versus]
    if not versus or versus[0].left is None or versus[0].champion is None:
        off = any(rule.verdict == "off" for rule in versus)
        start = "first champion" if first and not off else "compared with no champion"
        rare = (
            each for each in versus if each.metric.rpartition(".")[2] == OF_RARE and each.left is not None
        )
        figures = [evaluation.quality, *(f"{each.metric} {each.left_text}" for each in rare)]
        sentences = [f"{start}, {', '.join(figures)}"]
    others = (rule for rule in rules if rule.name != CHAMPION and rule.verdict == "undecided")
    sentences += [f"{rule.metric} is not decided" for rule in others]
    return f"{BLESSED}{'; '.join(sentences)}{few}"


def _describe_rule(rule: JudgedRule, evaluation: Evaluation) -> str:
    if rule.name in (CHAMPION, SLIDE):
        return _describe_difference(rule, evaluation.champion_comparison)
    if rule.why and rule.verdict == "failed":
        if text := _HEADLINES.get(rule.name):
            return text.format(rule=rule, blind_to=enumerate_names(evaluation.blind_to, MAX_NAMES))
        baseline = evaluation.of(label := rule.metric.rpartition(".")[0]).baseline
        if baseline:
            start = "not significantly" if rule.is_by_chance else "no"
            by = f" in {rule.metric}" if label or rule.metric == OF_RARE else ""
            return f"{start} better{by} than always answering {baseline.answer}"
    return str(rule)


def _describe_difference(rule: JudgedRule, evaluation: Evaluation) -> str:
    other = "the champion" if rule.name == CHAMPION else "the best of former champions"
    if rule.left is None or rule.champion is None:
        # Without the remedy, which follows the semicolon.
        return f"not compared with {other}: {rule.note.partition('; ')[0]}"
    if rule.metric.rpartition(".")[2] == "log_loss" and not rule.rule.startswith(rule.metric):
        ours, theirs = _tell_apart(rule.left, rule.champion, 2), _tell_apart(rule.champion, rule.left, 2)
        return f"as often right as {other}, but far less sure: log loss {ours}, {other}'s {theirs}"
    difference = rule.left - rule.champion
    ahead = (difference > 0) == (rule.operator in (">=", ">"))
    label, _, metric = rule.metric.rpartition(".")
    by = f"{100 * abs(difference):.1f} points" if metric in SHARES else f"{abs(difference):.4g}"
    by += f" {'better' if ahead else 'worse'}" if difference else ""
    by += f" in {rule.metric}" if label or metric not in SHARES or metric == OF_RARE else ""
    if rule.verdict == "undecided":
        found = f"{by} than {other}" if difference else f"as good as {other}"
        surely = rule.difference and not rule.difference[0] <= 0 <= rule.difference[1]
        chance = f", which may be {'within what is allowed' if surely else 'chance'}" if difference else ""
        power = "" if label else _describe_power(rule, evaluation)
        return f"{found} on {evaluation.sample}{chance}{power}"
    if not difference:
        return f"as good as {other}"
    if rule.verdict == "failed" and ahead:
        return str(rule)
    if rule.verdict == "passed" and not ahead:
        return f"as good as {other} ({by}, within what is allowed)"
    return f"{by} than {other}"


def _describe_power(rule: JudgedRule, evaluation: Evaluation) -> str:
    """Returns which loss these examples would not show; "" where it cannot be computed."""
    test = PairedTest.of(evaluation, parse_rule(rule.rule), LEVEL)
    loss = test and test.smallest_loss()
    return f"; a loss below {test.text(loss)} would not show" if test and loss else ""
