"""Judged rules of a gate, and the verdict on a model in one short sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardline.components.model_store import BLESSED, NOT_BLESSED
from shardline.components.text import enumerate_names
from shardline.components.validate.gate.gate import CHAMPION, EXAMPLES, SLIDE, VARIETY
from shardline.components.validate.gate.rules import BEST, OPERATORS
from shardline.components.validate.metrics.evaluation import Evaluation, Interval
from shardline.components.validate.metrics.metrics import CHECKS, SHARES

#: Names in a sentence, at most.
MAX_NAMES = 5

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

# Beginning of what is not decided; the difference as measured follows.
_UNDECIDED = "Not decided on {} whether it is worse than {} ("

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
        if self.right is not None:
            return f"{self.right:g}"
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


def describe(
    blocking: Sequence[JudgedRule], rules: Sequence[JudgedRule], evaluation: Evaluation, *, first: bool
) -> str:
    """Returns the verdict in one short sentence."""
    if blocking:
        first_rule = min(blocking, key=lambda rule: rule.name != CHAMPION)
        more = f" (and {len(blocking) - 1} more)" if len(blocking) > 1 else ""
        return f"{_describe_rule(first_rule, evaluation)}{more}{NOT_BLESSED}"
    too_few = next((rule for rule in rules if rule.name == EXAMPLES and rule.verdict == "skipped"), None)
    few = f", on too few examples to judge ({too_few.left_text})" if too_few else ""
    versus = [rule for rule in rules if rule.name == CHAMPION]
    sentences = [_describe_rule(rule, evaluation) for rule in versus]
    if not versus or versus[0].left is None or versus[0].champion is None:
        off = any(rule.verdict == "off" for rule in versus)
        start = "First champion" if first and not off else "Compared with no champion"
        sentences = [f"{start}, {evaluation.quality}"]
    others = (rule for rule in rules if rule.name != CHAMPION and rule.verdict == "undecided")
    sentences += [f"{rule.metric} is not decided" for rule in others]
    again = _UNDECIDED.format(evaluation.champion_comparison.sample, "the champion")
    return f"{'; '.join(sentences).replace(f'); {again}', ', ')}{few}{BLESSED}"


def _describe_rule(rule: JudgedRule, evaluation: Evaluation) -> str:
    if rule.name in (CHAMPION, SLIDE):
        return _describe_difference(rule, evaluation.champion_comparison.sample)
    if rule.why and rule.verdict == "failed":
        if text := _HEADLINES.get(rule.name):
            return text.format(rule=rule, blind_to=enumerate_names(evaluation.blind_to, MAX_NAMES))
        baseline = evaluation.of(label := rule.metric.rpartition(".")[0]).baseline
        if baseline:
            start = "Not significantly" if rule.is_by_chance else "No"
            by = f" in {rule.metric}" if label else ""
            return f"{start} better{by} than always answering {baseline.answer}"
    return str(rule)


def _describe_difference(rule: JudgedRule, sample: str) -> str:
    other = "the champion" if rule.name == CHAMPION else "the best of former champions"
    if rule.left is None or rule.champion is None:
        # Without the remedy, which follows the semicolon.
        return f"Not compared with {other}: {rule.note.partition('; ')[0]}"
    difference = rule.left - rule.champion
    ahead = (difference > 0) == (rule.operator in (">=", ">"))
    label, _, metric = rule.metric.rpartition(".")
    by = f"{100 * abs(difference):.1f} points" if metric in SHARES else f"{abs(difference):.4g}"
    by += f" {'better' if ahead else 'worse'}" if difference else ""
    by += f" in {rule.metric}" if label or metric not in SHARES else ""
    if rule.verdict == "undecided":
        return f"{_UNDECIDED.format(sample, other)}{by if difference else 'no difference found'})"
    if not difference:
        return f"As good as {other}"
    if rule.verdict == "failed" and ahead:
        return str(rule)
    if rule.verdict == "passed" and not ahead:
        return f"As good as {other} ({by}, within what is allowed)"
    return f"{by} than {other}"
