"""Judged rules: the verdict in words, the power of the test, and the remedy.

The power is how often a rule `(within D)` finds that a model is worse than the champion. Of a share of
examples, such as accuracy, it is exact. Of n examples, m ~ Binomial(n, differ) are answered rightly by one of
the two models only, and of these the worse model misses c ~ Binomial(m, (differ + loss) / (2 differ)).
McNemar's test (mid-p: Fagerland et al., 2013) and the interval of the difference (Tango, 1998) decide on m
and c, as they do in the gate. Other metrics, and many examples, have the normal distribution.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom

from shardline.components.model_store import BLESSED, NOT_BLESSED
from shardline.components.text import enumerate_names
from shardline.components.validate.metrics import CHECKS, COUNTED, OF_RARE, QUALITY, SERVING, SHARES
from shardline.components.validate.metrics.evaluation import Evaluation, Interval
from shardline.components.validate.metrics.intervals import mid_p
from shardline.components.validate.rules import (
    BEST,
    CHAMPION,
    DRIFT,
    EXAMPLES,
    LEVEL,
    OPERATORS,
    VARIETY,
    GateRule,
    parse_rule,
)
from shardline.trainer.base import files
from shardline.trainer.base.errors import ModelError
from shardline.trainer.base.settings import HISTORY_FILE, PATH_SETTINGS, SETTINGS_FILE
from shardline.trainer.manifest import CLASS

#: How often a loss has to be found that counts as found, and in words.
POWER, ODDS = 0.9, "9 of 10"

# With more examples that differ, the exact power is the normal one.
_MOST_EXACT = 500
_ASSUMED = "Assumed, as there was no champion to compare with:"
_NORMAL = NormalDist()
_Z = _NORMAL.inv_cdf(0.975)


@dataclass(frozen=True)
class PairedTest:
    """The gate's test of two models on the same examples, in one metric.

    Attributes:
        examples: Number of examples.
        within: Loss that the rule allows; as all losses in the metric's unit, or relative to the champion's.
        differ: Share of the examples that only one of the two models answers rightly, 0..1; None for a metric
            that is no share of examples.
        spread: Standard error of the difference times the square root of `examples`, where `differ` is None.
        design: Number of examples that tell as much as an independent one; more than 1 in groups.
        level: Largest p of a model that is called worse.
        unit: "points", "%", or "" for the metric's own.
        basis: What `differ` or `spread` was taken from, a sentence.
    """

    examples: int
    within: float
    differ: float | None = None
    spread: float = 0.0
    design: float = 1.0
    level: float = LEVEL
    unit: str = "points"
    basis: str = ""

    @classmethod
    def of(cls, measured: Evaluation, rule: GateRule, level: float = LEVEL) -> PairedTest | None:
        """Returns the test of a rule `(within D)`; None where its metric has no lead and no interval.

        Without a champion, the next model is assumed to differ from this one as often as this one from the
        truth: then the difference is as uncertain as this one's own metric.
        """
        name, n = rule.expression, measured.examples
        lead, value, within = measured.leads.get(name), measured.metrics.get(name), rule.within
        ends = lead.interval if lead else measured.intervals.get(name)
        if value is not None and lead:  # a relative loss is a share of the champion's value
            value -= lead.difference
        if not value or ends is None or within is None or not np.isfinite([value, *ends]).all():
            return None
        test = cls(n, within, level=level, unit="%" if rule.relative else "points" * (rule.metric in SHARES))
        differ = lead.differ if lead else 1 - value if rule.metric in COUNTED.values() else None
        if differ is None:
            error = (ends[1] - ends[0]) / (2 * _Z) / (abs(value) if rule.relative else 1)
            basis = f"Computed from the standard error of the difference: {test.text(error)}."
            if not lead:
                basis = f"{_ASSUMED} the difference is as uncertain as {name} alone: {test.text(error)}."
            return replace(test, spread=error * math.sqrt(n), basis=basis)
        share = f"{100 * differ:.1f} %"
        basis = f"{share} of the examples differ: only one of the models answers them rightly."
        if lead:
            effective = (differ - lead.difference**2) / lead.error**2 if lead.error else n
        else:
            # The product of the ends of Wilson's interval gives its number of examples.
            above = value**2 / max(ends[0] * ends[1], 1e-9) - 1
            effective = _Z**2 / above if above > 0 else n
            basis = f"{_ASSUMED} the next model differs in as many answers as this one gets wrong, {share}."
        return replace(test, design=max(1.0, n / max(effective, 1)), differ=differ, basis=basis)

    def power(self, loss: float) -> float:
        """Returns how often a model is called worse that truly loses this much, 0..1."""
        n, differ = max(1, round(self.examples / self.design)), self.spread**2
        if self.differ is not None:
            differ = max(self.differ, loss)
            if n * differ <= _MOST_EXACT:
                return self._exact_power(n, loss, differ)
        null = math.sqrt(max(differ, 1e-99) / n)
        error = null if self.differ is None else math.sqrt(max(differ - loss**2, 1e-99) / n)
        return _NORMAL.cdf((loss - self.within + _NORMAL.inv_cdf(self.level) * null) / error)

    def _exact_power(self, n: int, loss: float, differ: float) -> float:
        discordant = np.arange(binom.ppf(1e-9, n, differ), binom.isf(1e-9, n, differ) + 1)
        fewest = binom.isf(self.level, discordant, 0.5)
        p = np.array([mid_p(*counts, 0.5) for counts in zip(fewest, discordant, strict=True)])
        # Tango's score at a lead of -within: the loss is larger beyond doubt where it is far below 0.
        lead, missed = -self.within, np.arange(discordant[-1] + 1)[:, None]
        b = (2 * n - discordant + 2 * missed) * lead - discordant
        c = missed * lead * (1 - lead)
        share = (np.sqrt(np.maximum(b**2 + 8 * n * c, 0)) - b) / (4 * n)
        error = np.sqrt(np.maximum(n * (2 * share + lead * (1 - lead)), 1e-99))
        allowed = (discordant - 2 * missed - n * lead > _NORMAL.inv_cdf(self.level) * error) & (
            missed <= discordant
        )
        fewest = np.maximum(fewest + (p >= self.level), allowed.sum(axis=0))
        found = binom.sf(fewest - 1, discordant, (differ + loss) / (2 * differ) if differ else 0.5)
        return float(binom.pmf(discordant, n, differ) @ found)

    def smallest_loss(self) -> float | None:
        """Returns the smallest loss that is found in 9 of 10 cases; None where none is."""
        most = 1.0 if self.differ is not None else self.within + 20 * self.spread / math.sqrt(self.examples)
        if not self.power(most) > POWER > self.power(0.0):
            return None
        return float(brentq(lambda loss: self.power(loss) - POWER, 0.0, most, xtol=1e-9, rtol=1e-6))

    def examples_needed(self, loss: float) -> int | None:
        """Returns about how many examples find a loss in 9 of 10 cases; None where no number does."""

        def surplus(exponent: float) -> float:
            return replace(self, examples=int(2**exponent)).power(loss) - POWER

        return round(2 ** brentq(surplus, 0, 40)) if surplus(0) < 0 < surplus(40) else None

    def text(self, loss: float) -> str:
        """Returns a loss with its unit."""
        shown = (100 if self.unit else 1) * loss
        number = f"{shown:,.0f}" if shown >= 10 else f"{shown:.2g}"
        return f"{number} {self.unit[:-1] if number == '1' and self.unit == 'points' else self.unit}".rstrip()

    def __str__(self) -> str:
        """What the test finds in 9 of 10 cases."""
        loss, start = self.smallest_loss(), f"With {self.examples:,} examples"
        if self.design > 1.05:  # not by a few copies, or by chance
            start += f", which tell as much as {self.examples / self.design:,.0f} independent ones,"
        found = "no loss" if loss is None else f"a loss of {self.text(loss)}"
        return f"{start} {found} is found in {ODDS} cases"


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
            is_measured = self.left is not None and not isinstance(self.left, int)
            computed = is_measured and round(self.right, 4) != self.right
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


def describe_verdict(rules: Sequence[JudgedRule], evaluation: Evaluation, *, first: bool) -> str:
    """Returns the verdict in one short sentence."""
    if blocking := [rule for rule in rules if rule.blocks]:
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
    if rule.name in (CHAMPION, BEST):
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
    other = "the champion" if rule.name == CHAMPION else "the best of earlier champions"
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


_NOT_METRICS = ("epoch", "examples", "seconds")


@dataclass(frozen=True)
class TrainingRecord:
    """Settings and history that a training wrote next to its model file; empty where there is no such file.

    `settings` is the content of settings.json, `history` the columns of history.csv, NaN for no number.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    history: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the trainer."""
        return self.settings.get("settings") or {}

    @property
    def crossing(self) -> int:
        """Epoch, from 1, after which the validation loss rises while the training loss falls; 0 for none."""
        loss, validation = self.history.get("loss", ()), self.history.get("val_loss", ())
        if not 3 < len(loss) == len(validation):
            return 0
        best = min(range(len(validation)), key=validation.__getitem__)
        lowest, end = validation[best], validation[-3:]
        rises = best < len(validation) - 3 and sorted(end)[1] - lowest > _RISE * abs(lowest)
        return best + 1 if rises and loss[-1] < loss[best] else 0

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that have a curve, without their `val_` twins."""
        names = [name for name in self.history if name not in _NOT_METRICS]
        return tuple(name for name in names if name.removeprefix("val_") not in names or name[:4] != "val_")


def read_training(model_file: Path) -> TrainingRecord:
    """Reads settings.json and history.csv next to a model file; raises ModelError when one cannot be read."""
    path, settings, history = model_file.with_name(SETTINGS_FILE), {}, dict[str, tuple[float, ...]]()
    if path.exists():
        settings = files.read_json(path, ModelError)
        if not isinstance(settings.get("model"), str) or not isinstance(settings.get("settings", {}), dict):
            raise ModelError(f"{path} next to the model names no model function; remove it or train again")
    path = model_file.with_name(HISTORY_FILE)
    try:
        rows = list(csv.DictReader(path.read_text("utf-8").splitlines())) if path.exists() else []
        # A metric with a value per class is a list in the file, and has no curve.
        single = [name for name in (rows[0] if rows else ()) if not any(row[name][:1] == "[" for row in rows)]
        history = {name: tuple(float(row[name] or math.nan) for row in rows) for name in single}
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise ModelError(f"cannot read {path} next to the model: {error}; remove it or train again") from None
    return TrainingRecord(settings, history)


# Faults of a model or its export; while there is one, its metrics say little about the training.
_FAULTS = {
    "finite": "find the inputs that give NaN or infinity (a logarithm or a division by 0), lower "
    "learning_rate or set the optimizer's clipnorm, and train again",
    "export": "look for layers that answer differently in each call or keep state (dropout or noise outside "
    "of training): the fault is in the model function, not in the training",
    "golden": "look for what the export needs from outside: files, py_function, ops of other packages",
    "batch": "look for layers that compute over the batch, such as a mean over axis 0 or BatchNormalization "
    "in training mode",
    VARIETY: "give the test split examples with other answers: another split_salt, or more data",
}
_SERVING = {metric.name for metric in SERVING}
_QUALITY = {metric.name for metric in QUALITY} | {"precision", "recall", "f1", "never_predicted"}
# A class with a smaller share of the examples is rare, or with half of an equal share among many classes.
_RARE = 0.2
# A rise or fall of the validation loss that counts, as a share of the loss.
_RISE, _FALL = 0.05, 0.01
_MOST_CHANGES = 4
_NO_CHANGES = (*PATH_SETTINGS, "seed")
# Quantiles of a finding in 9 of 10 cases by an interval of 95 %.
_Z, _Z_FOUND = 1.96, 1.96 + 1.28


def find_remedy(
    rules: Sequence[JudgedRule],
    evaluation: Evaluation,
    training: TrainingRecord,
    champion: Mapping[str, Any] | None = None,
) -> str:
    """Returns what may help a model that these rules block or leave undecided; "" for nothing known.

    `champion` is the record of the champion's training, as of `TrainingRecord.settings`.
    """
    faults = [text for rule in rules if (text := _FAULTS.get(rule.name)) and rule.verdict == "failed"]
    weak = [rule for rule in rules if _is_weak(rule)]
    # More examples do not help a model that is surely too weak.
    clear = [rule for rule in rules if not weak or not (rule.verdict == "undecided" or rule.is_by_chance)]
    found = faults or [text for rule in clear for text in _advise_rule(rule, evaluation)]
    if weak and not faults:
        found = [*_advise_rare_class(weak, evaluation, training), *found, _advise_training(training)]
        if any(rule.name == CHAMPION for rule in weak):
            found.append(_compare_trainings(training.settings, champion or {}))
    return "; ".join(dict.fromkeys(filter(None, found)))


def _is_weak(rule: JudgedRule) -> bool:
    metric = rule.metric.removeprefix("worst_slice(").partition("[")[0].rstrip(")").rpartition(".")[2]
    is_worse = rule.verdict == "failed" and not rule.is_by_chance
    return is_worse and rule.right is not None and metric in _QUALITY


def _advise_rule(rule: JudgedRule, evaluation: Evaluation) -> Iterator[str]:
    metric = rule.metric.rpartition(".")[2].partition("[")[0]
    if rule.name == EXAMPLES and rule.left is not None and rule.right is not None:
        yield f"add {math.ceil(rule.right - rule.left):,} test examples, or make the test split larger"
    elif rule.verdict == "undecided" or rule.is_by_chance:
        yield _advise_examples(rule, evaluation)
    elif rule.name == CHAMPION and rule.right is None:
        yield rule.note.partition("; ")[2]
    elif rule.verdict == "failed" and rule.name == BEST:
        yield "small losses have added up: compare settings and data with those of that champion"
    elif rule.verdict == "failed" and metric in _SERVING:
        yield "use a smaller model: fewer or narrower layers, or smaller inputs"
    elif rule.verdict == "failed" and metric in (DRIFT, "drifted"):
        yield "find out why the data have changed: the report shows the features that moved"


def _advise_examples(rule: JudgedRule, evaluation: Evaluation) -> str:
    """Returns how many test examples would decide an open rule, where that can be computed."""
    compared = evaluation.champion_comparison
    n, needed, what = compared.examples, None, ""
    if rule.name == CHAMPION and (test := PairedTest.of(compared, parse_rule(rule.rule))):
        loss = 2 * test.within
        needed, what = test.examples_needed(loss), f"find a loss of {test.text(loss)}"
    elif rule.difference and rule.left is not None and rule.right is not None and rule.left != rule.right:
        error = (rule.difference[1] - rule.difference[0]) / (2 * _Z)
        needed = math.ceil(n * (_Z_FOUND * error / (rule.left - rule.right)) ** 2)
        what = "show a difference as large as the one measured"
    if needed is None or needed <= n:
        return f"add test examples: {n:,} leave it open"
    return f"add test examples: about {needed:,} would {what} in 9 of 10 cases, {n:,} leave it open"


def _advise_rare_class(
    weak: Sequence[JudgedRule], evaluation: Evaluation, training: TrainingRecord
) -> Iterator[str]:
    """Yields what helps the worst rare class of those that a rule names or that are mostly missed."""
    named = {rule.metric.partition("=")[2].rstrip("]") for rule in weak if "[" in rule.metric}
    named |= {*evaluation.blind_to} if any(rule.name == "classes" for rule in weak) else set()
    for part in evaluation.each:
        total = sum(score.examples for score in part.classes)
        most = total * min(_RARE, 0.5 / max(1, len(part.classes)))
        rare = [score for score in part.classes if 0 < score.examples < most]
        rare = [score for score in rare if score.recall < 0.5 or score.name in named]
        if rare:
            score = min(rare, key=lambda each: each.recall)
            advice = "add examples of it"
            if part.kind == CLASS and not training.options.get("class_weights"):
                advice += ", or train with class_weights=balanced"
            found = f"{score.examples:,} of {total:,} test examples, {100 * score.recall:.0f} % of them found"
            yield f"{score.name!r} is rare ({found}): {advice}"


def _advise_training(training: TrainingRecord) -> str:
    """Returns what the course of the validation loss advises; "" where no history is known."""
    losses = training.history.get("val_loss", ())
    if not training.history:
        return ""
    if not losses or not all(map(math.isfinite, losses)):
        return (
            "train with a validation split: its val_loss shows whether there are too many or too few epochs"
        )
    epochs = [int(epoch) for epoch in training.history.get("epoch", range(1, len(losses) + 1))]
    best, last = min(range(len(losses)), key=losses.__getitem__), epochs[-1]
    after, lowest = len(losses) - 1 - best, losses[best]
    at = f"val_loss was lowest in epoch {epochs[best]} of {last}"
    end, planned = losses[-3:], training.options.get("epochs")
    before = losses[max(0, best - max(1, len(losses) // 4))]
    falls = before - lowest > _FALL * abs(before) or len(losses) == 1
    if after and (training.options.get("early_stopping") or (isinstance(planned, int) and last < planned)):
        return f"training stopped early, as {at}: more epochs will not help; {_MORE}"
    if after >= max(2, len(losses) // 4) and sum(end) / len(end) - lowest > _RISE * abs(lowest):
        return (
            f"the model is overfitted, {at}: train for about {epochs[best]} epochs or with "
            "early_stopping=val_loss; more data, augmentation or dropout help too"
        )
    if after <= len(losses) // 10 and falls:
        still = "after one epoch val_loss is not at its lowest" if last == 1 else "val_loss was still falling"
        return f"{still}: train longer, epochs={2 * last}"
    if not after:
        return "val_loss hardly falls any more: raise learning_rate or change the model, epochs help little"
    return f"val_loss no longer falls ({at}): more epochs will not help; {_MORE}"


_MORE = "add training data, or change the model or learning_rate"


def _compare_trainings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Returns what differs between a model's training and the champion's; "" where nothing is known."""
    if not ours or not theirs:
        return ""
    mine, other = (
        {"model": it.get("model"), "data": it.get("fingerprint"), **(it.get("settings") or {})}
        for it in (ours, theirs)
    )
    names = [name for name in {**mine, **other} if name not in _NO_CHANGES]
    changes = [
        "other data"
        if name == "data"
        else f"{name} {mine.get(name) or 'unset'} (the champion: {other.get(name) or 'unset'})"
        for name in names
        if mine.get(name) != other.get(name)
    ]
    if not changes:
        return "settings and data are the champion's: a model with another seed may differ as much"
    return f"compare with the champion's training: {enumerate_names(changes, _MOST_CHANGES)}"
