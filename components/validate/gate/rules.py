"""Rules of the gate: their syntax, and the values that they compare.

A rule is one comparison: `accuracy >= 0.95`, `recall[class=healthy] >= champion - 0.1`. With the name of one
of the default rules before it, it replaces that rule; "off" leaves that rule out.

    rule    = [name ":"] (value operator limit [tail] | "off")
    value   = [label "."] quality | "drift[" feature "]"
    quality = metric | metric "[" feature "=" value "]" | "worst_slice(" metric ")"
    limit   = number | ("champion" | "baseline") [("+" | "-" | "*") number] | "best(" number ")"
    tail    = "(p <" number ")" | "(within" number ["%"] ")"

With several labels, a rule names the label: `sentiment.rmse <= 0.9`. `baseline` is a constant answer: the
most frequent class, all labels of a multilabel, the means of numbers; `best(8)` the best of 8 champions, the
present one and those 1, 2, 4, 8, 16, 32 and 64 before it. "(p < 0.05)" requires a significant lead; "(within
0.01)" allows a model to be worse by that much. Rules are parsed by a regular expression; nothing in them is
evaluated as code.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from shardline.components.validate.export.formats import FORMATS
from shardline.components.validate.metrics import metrics
from shardline.components.validate.metrics.evaluation import Evaluation, Interval, Slice
from shardline.trainer.base.deserialize import did_you_mean
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.data.features import CLASS

#: Metrics of one class, as in `recall[class=healthy]`.
CLASS_METRICS = metrics.PARTS[CLASS][1]

#: All of them are False for NaN.
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}

#: Metric of one feature: the distance of its values from those that the champion was trained on.
DRIFT = "drift"

#: Written in place of a comparison, leaves out the rule of this name.
OFF = "off"

#: Reference of a rule about a slow slide: the best of some champions, and how many these may be.
BEST = "best"
_LAST = range(2, 17)

#: Note on a rule that is unmeasured because an evaluation lacks its metric.
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
            |{BEST}\s*\(\s*(?P<last>\d+)\s*\)
            |(?P<reference>champion|baseline)\s*(?:(?P<sign>[-+*])\s*(?P<offset>{_NUMBER}))?)
       \s*(?:\(\s*(?:p\s*<\s*(?P<p>{_NUMBER})|within\s+(?P<within>{_NUMBER})\s*(?P<percent>%)?)\s*\))?)\s*""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class GateRule:
    """One comparison that a model must pass.

    Attributes:
        text: The rule as it was written, without its name.
        metric: Name of the metric; of a class, one of CLASS_METRICS.
        operator: One of OPERATORS; OFF for a rule that is left out.
        limit: The number to compare with, or the number added to the reference's value.
        factor: Factor of the reference's value, before `limit` is added.
        label: Name of the label, "" for the only one.
        slice: Name of the slice, "class=healthy", of a converted model, "format=onnx", or of the feature
            whose drift is limited; "" for all examples.
        worst: Whether the rule is about the worst slice.
        reference: What the limit is relative to: "champion", "baseline", BEST, or "" for a plain number.
        p: The lead over the reference must have a smaller p.
        within: How much worse than the reference a model may be, if `relative` as a share of its value.
        name: Name of the default rule that it replaces; "" for an additional rule.
        why: Purpose of a default rule; "" for a user's.
        last: Number of the champions, the best of which is the reference BEST.
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
    last: int = 0

    @property
    def expression(self) -> str:
        """The metric expression, left of the operator: "recall[class=healthy]"."""
        prefix = f"{self.label}." if self.label else ""
        if self.worst:
            return f"{prefix}worst_slice({self.metric})"
        return f"{prefix}{self.metric}[{self.slice}]" if self.slice else f"{prefix}{self.metric}"

    @property
    def format(self) -> str:
        """Name of the format of a rule about a converted model, or ""."""
        feature, _, value = self.slice.partition("=")
        return value if feature == "format" and value in FORMATS else ""

    @property
    def is_drift(self) -> bool:
        """Whether it compares the training data with the champion's."""
        return self.metric in (DRIFT, "drifted")

    def measure(self, evaluation: Evaluation) -> tuple[float | None, Interval | None, str]:
        """Returns the value of the expression, None where it is unknown, its 95 % interval, and a note."""
        part = evaluation.of(self.label)
        interval, value, note = evaluation.intervals.get(self.expression), None, ""
        if self.worst:
            slices = self.measure_slices(evaluation)
            values = [(found, item.name) for item, found in slices if item.decided]
            if not values:
                return None, interval, "every slice has too few examples"
            value, note = (max if self.metric in metrics.LOWER_IS_BETTER else min)(values)
            few = len(slices) - len(values)
            note += f"; {few:,} with too few examples" if few else ""
        elif self.format:
            converted = next((each for each in evaluation.formats if each.name == self.format), None)
            if converted and self.metric in metrics.FORMAT_METRICS:
                value = float(getattr(converted, self.metric))
            elif converted:
                value, interval = converted.value, converted.interval
        elif self.metric == DRIFT:
            value = next((drift.distance for drift in evaluation.drift if drift.feature == self.slice), None)
        elif self.slice.startswith("number="):
            score = next((each for each in part.numbers if f"number={each.name}" == self.slice), None)
            value = getattr(score, self.metric) if score else None
        elif self.slice:
            chosen = next((item for item in part.slices if item.name == self.slice), None)
            interval = chosen.interval if chosen and self.metric == metrics.MAIN.get(part.kind) else interval
            if chosen and chosen.decided:
                return self._values([chosen], part)[0], interval, ""
            note = f"{chosen.examples if chosen else 0:,} examples are too few"
        else:
            value = evaluation.metrics.get(self.expression)
            note = "" if value is None else evaluation.notes.get(self.metric, "")
        return value, interval, note or NOT_MEASURED * (value is None)

    def measure_slices(self, evaluation: Evaluation) -> list[tuple[Slice, float]]:
        """Returns the slices that a rule about the worst slice is about, with their values."""
        part = evaluation.of(self.label)
        classes = {f"class={name}" for name in part.class_names}
        is_main = self.metric == metrics.MAIN[part.kind]
        slices = [item for item in part.slices if is_main or item.name in classes]
        return list(zip(slices, self._values(slices, part), strict=True))

    def _values(self, slices: Iterable[Slice], part: Evaluation) -> list[float]:
        is_main = self.metric == metrics.MAIN[part.kind]
        scores = {f"{metrics.PARTS[part.kind][0]}={score.name}": score for score in part.classes}
        # For a single label of a multilabel, macro F1 is its F1.
        return [
            item.value
            if is_main and not item.name.startswith("label=")
            else float(getattr(scores[item.name], "f1" if is_main else self.metric))
            for item in slices
        ]


def parse_rules(texts: Iterable[str]) -> tuple[GateRule, ...]:
    """Parses rules; raises SettingsError as `parse_rule` does."""
    return tuple(map(parse_rule, texts))


def parse_rule(text: str) -> GateRule:
    """Parses a rule; raises SettingsError when it is malformed or names an unknown metric."""
    match = _RULE.fullmatch(text)
    if not match or (match["off"] and not match["name"]):
        raise SettingsError(
            f"cannot read the rule {text!r}; write it like 'accuracy >= 0.95', "
            "'recall[class=healthy] >= 0.9', 'worst_slice(accuracy) >= 0.8', 'accuracy >= champion - 0.005', "
            "'accuracy > champion (p < 0.05)', 'accuracy >= best(8) (within 0.01)', or 'champion: off'"
        )
    part = match.groupdict()
    written = " ".join(text.split())
    if part["name"]:
        written = written.partition(":")[2].lstrip()
    if part["off"]:
        return GateRule(OFF, "", OFF, 0.0, name=part["name"])
    number = float(part["offset"] or 0)
    offset = {"-": -number, "*": 0.0}.get(part["sign"], number)
    feature, _, value = (part["slice"] or "").partition("=")
    slice_name = f"{feature.strip()}={value.strip()}" if part["slice"] else ""
    reference = BEST if part["last"] else part["reference"] or ""
    rule = GateRule(
        text=written,
        metric=DRIFT if part["drift"] else part["worst"] or part["metric"],
        operator=part["operator"],
        limit=offset if reference else float(part["limit"]),
        slice=part["drift"].strip() if part["drift"] else slice_name,
        worst=bool(part["worst"]),
        reference=reference,
        p=float(part["p"]) if part["p"] else None,
        within=float(part["within"]) / (100 if part["percent"] else 1) if part["within"] else None,
        relative=bool(part["percent"]),
        name=part["name"] or "",
        factor=number if part["sign"] == "*" else 1.0,
        label=(part["label"] or "").strip(),
        last=int(part["last"] or 0),
    )
    if not math.isfinite(rule.limit):
        raise SettingsError(f"the limit of the rule {rule.text!r} is too large a number")
    _check_metric(rule)
    _check_tail(rule)
    return rule


def allowed_metrics(rule: GateRule, kinds: Collection[str] = tuple(metrics.BY_KIND)) -> tuple[str, ...]:
    """Returns the metrics that a rule of this form may name, for labels of these kinds."""
    part, main = rule.slice.partition("=")[0], [metrics.MAIN[kind] for kind in kinds]
    if rule.metric == DRIFT and rule.slice:
        return (DRIFT,)
    if rule.format:
        return (*main, *metrics.FORMAT_METRICS)
    if rule.worst:
        return tuple(dict.fromkeys((*main, *(CLASS_METRICS if CLASS in kinds else ()))))
    if part in dict(metrics.PARTS.values()):
        parts = (metrics.PARTS[kind] for kind in kinds)
        return tuple(metric for name, of_one in parts if name == part for metric in of_one)
    if rule.slice:
        return tuple(main)
    quality = (metric for kind in kinds for metric in metrics.BY_KIND[kind])
    return tuple(dict.fromkeys(metric.name for metric in (*quality, *metrics.SERVING, *metrics.CHECKS)))


def _check_metric(rule: GateRule) -> None:
    if rule.reference and (rule.format or rule.is_drift or rule.metric in metrics.CHALLENGER_METRICS):
        raise SettingsError(f"{rule.expression} is compared with a number (in the rule {rule.text!r})")
    if rule.reference == "baseline" and (rule.slice or rule.worst):
        raise SettingsError(f"the baseline has no slices (in the rule {rule.text!r}); compare all examples")
    is_baseline = rule.reference == "baseline"
    known = metrics.LEAD_METRICS if is_baseline else allowed_metrics(rule)
    if rule.metric not in known:
        scope = " of slices" if rule.worst else " of the baseline" * is_baseline
        scope = f" of the slice {rule.slice!r}" if rule.slice else scope
        hint = did_you_mean(rule.metric, known) or f"there are: {', '.join(known)}"
        raise SettingsError(f"there is no metric {rule.metric!r}{scope} (in the rule {rule.text!r}); {hint}")
    is_whole = rule.metric in metrics.LEAD_METRICS and not (rule.slice or rule.worst)
    if rule.reference == BEST and not (is_whole and rule.within is not None and rule.last in _LAST):
        raise SettingsError(
            f"{BEST}({rule.last}) does not fit the rule {rule.text!r}; write it like 'accuracy >= best(8) "
            f"(within 0.01)', with {_LAST[0]} to {_LAST[-1]} champions, a tolerance, and one of "
            f"{', '.join(metrics.LEAD_METRICS)} of all examples"
        )


def _check_tail(rule: GateRule) -> None:
    fits = bool(rule.reference) and rule.limit == 0 and rule.factor == 1  # the reference's own value
    lower = rule.metric in metrics.LOWER_IS_BETTER
    if rule.within is not None:
        most = 1.0 if rule.relative or rule.metric in (*metrics.SHARES, *CLASS_METRICS) else math.inf
        fits = fits and rule.operator == ("<=" if lower else ">=") and 0 <= rule.within < most
    elif rule.p is not None:
        of_class = rule.slice.partition("=")[0] in dict(metrics.PARTS.values()) and rule.metric != "accuracy"
        has_lead = not rule.worst and (of_class if rule.slice else rule.metric in metrics.LEAD_METRICS)
        fits = fits and rule.operator == ("<" if lower else ">") and has_lead and 0 < rule.p < 1
    else:
        return
    if not fits:
        raise SettingsError(
            f"what is in brackets does not fit the rule {rule.text!r}; write it like 'accuracy > champion "
            "(p < 0.05)', 'rmse < champion (p < 0.05)', 'accuracy >= champion (within 0.01)', one point, or "
            "'log_loss <= champion (within 2 %)', a share of the other's value; p is known of "
            f"{', '.join(metrics.LEAD_METRICS)}, and of precision, recall or f1 of a class"
        )
