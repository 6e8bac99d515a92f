"""Rules of the gate: what a model must pass, as a person writes it.

A rule is one comparison: `accuracy >= 0.95`, `recall[class=healthy] >= champion - 0.1`. With the name of one
of the gate's own rules before it, it takes the place of that rule; "off" leaves that rule out.

    rule    = [name ":"] (value operator limit [tail] | "off")
    value   = [label "."] quality | "drift[" feature "]"
    quality = metric | metric "[" feature "=" value "]" | "worst_slice(" metric ")"
    limit   = number | ("champion" | "baseline") [("+" | "-" | "*") number]
    tail    = "(p <" number ")" | "(within" number ["%"] ")"

Of several labels, the label says whose quality is meant: `sentiment.rmse <= 0.9`. `baseline` is the trivial
answer: the most frequent class, all of several labels, the means of numbers. "(p < 0.05)" asks that the lead
be more than chance; "(within 0.01)" allows a model to be worse by so much, unless it is surely worse. Rules
are read by a regular expression; nothing in them is ever evaluated.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from shardline.components.validate.evaluation import Evaluation, Interval, Slice
from shardline.components.validate.formats import FORMATS
from shardline.components.validate.metrics import (
    FALLING,
    FORMAT_METRICS,
    LED,
    LED_BY_CHAMPION,
    MAIN,
    METRICS,
    OF_THE_NEW,
    PARTS,
    SHARES,
    SLICED_OF_QUANTILES,
)
from shardline.trainer.errors import SettingsError

#: Metrics of one class, as in `recall[class=healthy]`, of one label or number, by what stands before "=".
PART_METRICS = dict(PARTS.values())
CLASS_METRICS = PART_METRICS["class"]
#: Any other slice has only the metric that counts first, and those of quantiles.
SLICED = (*MAIN.values(), *SLICED_OF_QUANTILES)

#: Every one of them is False for NaN.
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}

#: Of one feature: how far its values have moved since the champion was trained.
DRIFT = "drift"

#: In the place of a comparison: the rule of this name is left out.
OFF = "off"

#: Why a rule about a metric that an evaluation lacks is undecided.
NOT_MEASURED = "it was not measured"

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RULE = re.compile(
    rf"""\s*(?:(?P<name>[a-z]+)\s*:\s*)?
     (?:(?P<off>{OFF})
      |(?:(?P<label>[^\[\]()<>=.\s][^\[\]()<>=.]*)\.)?
       (?:worst_slice\(\s*(?P<worst>\w+)\s*\)
         |{DRIFT}\s*\[(?P<drift>.+)\]
         |(?P<metric>\w+)\s*(?:\[(?P<slice>[^=]+=.*)\])?)
       \s*(?P<operator>>=|<=|==|>|<)
       \s*(?:(?P<limit>{_NUMBER})
            |(?P<reference>champion|baseline)\s*(?:(?P<sign>[-+*])\s*(?P<offset>{_NUMBER}))?)
       \s*(?:\(\s*(?:p\s*<\s*(?P<p>{_NUMBER})|within\s+(?P<within>{_NUMBER})\s*(?P<percent>%)?)\s*\))?)\s*""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Rule:
    """One comparison that a model must pass.

    Attributes:
        text: The rule as it was written, without its name.
        metric: Name of the metric: one of METRICS, or of CLASS_METRICS for a slice.
        operator: One of OPERATORS; OFF for a rule that is left out.
        limit: The number to compare with, or what is added to the reference's value.
        factor: By what the reference's value is multiplied before.
        label: Name of the label that is meant, "" for the only one.
        slice: Name of the slice, "class=healthy", or of a converted model, "format=int8", or of the feature
            that may drift; "" for all examples.
        worst: Whether the worst slice is meant.
        reference: Whose value the limit is relative to: "champion", "baseline", or "" for a plain number.
        p: The lead over the reference must have a smaller p; None where it is not asked for.
        within: By how much a model may be worse than the reference; None where it is not said.
        relative: Whether `within` is a share of the reference's value.
        name: Name of the gate's rule whose place it takes; "" for one more.
        why: What the rule is for, in a sentence; "" for what a user has written.
    """

    text: str
    metric: str
    operator: str
    limit: float
    slice: str = ""
    worst: bool = False
    reference: str = ""
    p: float | None = None
    within: float | None = None
    relative: bool = False
    name: str = ""
    why: str = ""
    factor: float = 1.0
    label: str = ""

    @property
    def left(self) -> str:
        """The left side."""
        prefix = f"{self.label}." if self.label else ""
        if self.worst:
            return f"{prefix}worst_slice({self.metric})"
        return f"{prefix}{self.metric}[{self.slice}]" if self.slice else f"{prefix}{self.metric}"

    @property
    def format(self) -> str:
        """Name of the format whose converted model is meant, or ""."""
        feature, _, value = self.slice.partition("=")
        return value if feature == "format" and value in FORMATS else ""

    @property
    def is_drift(self) -> bool:
        """Whether it is about the training data beside those of the champion."""
        return self.metric in (DRIFT, "drifted")


def parse_rules(texts: Iterable[str]) -> tuple[Rule, ...]:
    """Reads some rules; raises SettingsError as `parse_rule` does."""
    return tuple(map(parse_rule, texts))


def parse_rule(text: str) -> Rule:
    """Reads one rule; raises SettingsError when it is none, or names an unknown metric."""
    match = _RULE.fullmatch(text)
    if not match or (match["off"] and not match["name"]):
        raise SettingsError(
            f"cannot read the rule {text!r}; write it like 'accuracy >= 0.95', "
            "'recall[class=healthy] >= 0.9', 'worst_slice(accuracy) >= 0.8', 'accuracy >= champion - 0.005', "
            "'accuracy > champion (p < 0.05)', or 'champion: off'"
        )
    part = match.groupdict()
    written = " ".join(text.split())
    if part["name"]:
        written = written.partition(":")[2].lstrip()
    if part["off"]:
        return Rule(OFF, "", OFF, 0.0, name=part["name"])
    number = float(part["offset"] or 0)
    offset = {"-": -number, "*": 0.0}.get(part["sign"], number)
    feature, _, value = (part["slice"] or "").partition("=")
    of_slice = f"{feature.strip()}={value.strip()}" if part["slice"] else ""
    rule = Rule(
        text=written,
        metric=DRIFT if part["drift"] else part["worst"] or part["metric"],
        operator=part["operator"],
        limit=offset if part["reference"] else float(part["limit"]),
        slice=part["drift"].strip() if part["drift"] else of_slice,
        worst=bool(part["worst"]),
        reference=part["reference"] or "",
        p=float(part["p"]) if part["p"] else None,
        within=float(part["within"]) / (100 if part["percent"] else 1) if part["within"] else None,
        relative=bool(part["percent"]),
        name=part["name"] or "",
        factor=number if part["sign"] == "*" else 1.0,
        label=(part["label"] or "").strip(),
    )
    if not math.isfinite(rule.limit):
        raise SettingsError(f"the limit of the rule {rule.text!r} is too large a number")
    _check_metric(rule)
    _check_tail(rule)
    return rule


def _check_metric(rule: Rule) -> None:
    known = METRICS
    if rule.metric == DRIFT and rule.slice:
        known = (DRIFT,)
    elif rule.format:
        known = FORMAT_METRICS
    elif rule.worst:
        known = tuple(dict.fromkeys((*CLASS_METRICS, *SLICED)))
    elif part := PART_METRICS.get(rule.slice.partition("=")[0]):
        known = part
    elif rule.slice:
        known = SLICED
    elif rule.reference == "baseline":
        known = LED
    if rule.metric not in known:
        where = f" of the slice {rule.slice!r}" if rule.slice else " of slices" if rule.worst else ""
        where = where or (" of the baseline" if known is LED else "")
        raise SettingsError(
            f"there is no metric {rule.metric!r}{where} (in the rule {rule.text!r}); "
            f"there are: {', '.join(known)}"
        )
    if rule.reference and (rule.format or rule.is_drift or rule.metric in OF_THE_NEW):
        raise SettingsError(f"{rule.left} is compared with a number (in the rule {rule.text!r})")
    if rule.reference == "baseline" and (rule.slice or rule.worst):
        raise SettingsError(f"the baseline has no slices (in the rule {rule.text!r}); compare all examples")


def _check_tail(rule: Rule) -> None:
    if rule.within is not None:
        _check_within(rule)
    if rule.p is None:
        return
    whole = LED if rule.reference == "baseline" else LED_BY_CHAMPION
    of_part = PART_METRICS.get(rule.slice.partition("=")[0], ()) if rule.slice else whole
    leads = not rule.worst and rule.metric in of_part and not (rule.slice and rule.metric == "accuracy")
    ahead = "<" if rule.metric in FALLING else ">"
    if not (rule.reference and rule.operator == ahead and _is_plain(rule) and leads):
        raise SettingsError(
            "(p < ...) belongs to a rule like 'accuracy > champion (p < 0.05)' or 'rmse < champion (p < "
            f"0.05)', got {rule.text!r}; its metric may be one of {', '.join(whole)}, or precision, recall "
            "or f1 of a class"
        )
    if not 0 < rule.p < 1:
        raise SettingsError(f"p must be between 0 and 1, got {rule.p} in the rule {rule.text!r}; try 0.05")


def _is_plain(rule: Rule) -> bool:
    """Whether a rule's limit is the reference's own value."""
    return rule.limit == 0 and rule.factor == 1


def _check_within(rule: Rule) -> None:
    falling = rule.metric in FALLING
    if not (rule.reference and rule.operator == ("<=" if falling else ">=") and _is_plain(rule)):
        raise SettingsError(
            "(within ...) belongs to a rule like 'accuracy >= champion (within 0.01)' or "
            f"'log_loss <= champion (within 2 %)', got {rule.text!r}"
        )
    most = 1.0 if rule.relative or rule.metric in (*SHARES, *CLASS_METRICS) else math.inf
    if not 0 <= (rule.within or 0.0) < most:
        raise SettingsError(
            f"(within ...) is too much in the rule {rule.text!r}; 0.01 is one point, (within 2 %) a share "
            "of the other's value"
        )


def measure_left(rule: Rule, evaluation: Evaluation) -> tuple[float | None, str]:
    """Returns the value of a rule's left side, None where it is unknown, and a note."""
    part = evaluation.of(rule.label)
    if rule.worst:
        return _worst(rule.metric, part)
    if not rule.slice or rule.format or rule.is_drift:
        value = {**evaluation.metrics, **evaluation.distances}.get(rule.left)
        return value, evaluation.notes.get(rule.metric, "") if value is not None else NOT_MEASURED
    if rule.slice.startswith("number="):
        score = next((one for one in part.numbers if f"number={one.name}" == rule.slice), None)
        return (getattr(score, rule.metric), "") if score else (None, NOT_MEASURED)
    found = next((item for item in part.slices if item.name == rule.slice), None)
    if found is None or not found.decided:
        return None, f"{found.examples if found else 0:,} examples are too few"
    if rule.metric in SLICED_OF_QUANTILES and rule.metric not in found.metrics:
        return None, NOT_MEASURED
    return _of_slice(rule.metric, found, part), ""


def interval_of_left(rule: Rule, evaluation: Evaluation) -> Interval | None:
    """Returns the 95 % interval of a rule's left side; None where there is none."""
    if rule.format and rule.metric in MAIN.values():
        return next((item.interval for item in evaluation.formats if item.name == rule.format), None)
    part = evaluation.of(rule.label)
    item = next((item for item in part.slices if rule.slice == item.name), None)
    if item and rule.metric in item.intervals:
        return item.intervals[rule.metric]
    if rule.slice and rule.metric == MAIN.get(part.kind):
        return item.interval if item else None
    return evaluation.intervals.get(rule.left)


def _worst(metric: str, evaluation: Evaluation) -> tuple[float | None, str]:
    classes = {f"class={name}" for name in evaluation.class_names}
    slices = [
        item
        for item in evaluation.slices
        if metric == MAIN[evaluation.kind] or item.name in classes or metric in item.metrics
    ]
    values = [(_of_slice(metric, item, evaluation), item.name) for item in slices if item.decided]
    if not slices and metric in SLICED_OF_QUANTILES:
        return None, NOT_MEASURED
    if not values:
        return None, "every slice has too few examples"
    value, name = (max if metric in FALLING else min)(values)
    few = len(slices) - len(values)
    left_out = f"; {few:,} {'slice has' if few == 1 else 'slices have'} too few examples" if few else ""
    return value, name + left_out


def _of_slice(metric: str, item: Slice, evaluation: Evaluation) -> float:
    if metric in item.metrics:
        return item.metrics[metric]
    if metric == MAIN[evaluation.kind] and not item.name.startswith("label="):
        return item.value
    name = item.name.partition("=")[2]
    score = next(score for score in evaluation.classes if score.name == name)
    # Of one label alone the mean over the labels is its own.
    return float(score.f1 if metric == MAIN[evaluation.kind] else getattr(score, metric))
