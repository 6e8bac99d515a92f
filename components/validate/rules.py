"""Rules of the gate: what a model must pass, as a person writes it.

A rule is one comparison: `accuracy >= 0.95`, `recall[class=healthy] >= champion - 0.1`.

    rule   = value operator limit ["(" "p" "<" number ")"]
    value  = metric | metric "[" feature "=" value "]" | "worst_slice(" metric ")"
    limit  = number | "champion" [("+" | "-") number]

Rules are read by a regular expression; nothing in them is ever evaluated.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from shardline.components.validate.evaluation import COUNTED, METRICS
from shardline.trainer.errors import SettingsError

#: Metrics of one class, as in `recall[class=healthy]`; any other slice has only the accuracy.
CLASS_METRICS = ("accuracy", "precision", "recall", "f1")

#: Every one of them is False for NaN.
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RULE = re.compile(
    rf"""\s*(?:worst_slice\(\s*(?P<worst>\w+)\s*\)
          |(?P<metric>\w+)\s*(?:\[(?P<slice>[^=]+=.*)\])?)
     \s*(?P<operator>>=|<=|==|>|<)
     \s*(?:(?P<limit>{_NUMBER})|(?P<champion>champion)\s*(?:(?P<sign>[-+])\s*(?P<offset>{_NUMBER}))?)
     \s*(?:\(\s*p\s*<\s*(?P<p>{_NUMBER})\s*\))?\s*""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Rule:
    """One comparison that a model must pass.

    Attributes:
        text: The rule as it was written.
        metric: Name of the metric: one of METRICS, or of CLASS_METRICS for a slice.
        limit: The number to compare with, or what is added to the champion's value.
        slice: Name of the slice, "class=healthy"; "" for all examples.
        worst: Whether the worst slice is meant.
        champion: Whether the limit is relative to the champion.
        p: The lead over the champion must have a smaller p; None where it is not asked for.
    """

    text: str
    metric: str
    operator: str
    limit: float
    slice: str = ""
    worst: bool = False
    champion: bool = False
    p: float | None = None

    @property
    def name(self) -> str:
        """The left side."""
        if self.worst:
            return f"worst_slice({self.metric})"
        return f"{self.metric}[{self.slice}]" if self.slice else self.metric


def parse_rules(texts: Iterable[str]) -> tuple[Rule, ...]:
    """Reads some rules; raises SettingsError as `parse_rule` does."""
    return tuple(map(parse_rule, texts))


def parse_rule(text: str) -> Rule:
    """Reads one rule; raises SettingsError when it is none, or names an unknown metric."""
    if not (match := _RULE.fullmatch(text)):
        raise SettingsError(
            f"cannot read the rule {text!r}; write it like 'accuracy >= 0.95', "
            "'recall[class=healthy] >= 0.9', 'worst_slice(accuracy) >= 0.8', 'accuracy >= champion - 0.005' "
            "or 'accuracy > champion (p < 0.05)'"
        )
    part = match.groupdict()
    offset = float(part["offset"] or 0) * (-1 if part["sign"] == "-" else 1)
    feature, _, value = (part["slice"] or "").partition("=")
    rule = Rule(
        text=" ".join(text.split()),
        metric=part["worst"] or part["metric"],
        operator=part["operator"],
        limit=offset if part["champion"] else float(part["limit"]),
        slice=f"{feature.strip()}={value.strip()}" if part["slice"] else "",
        worst=bool(part["worst"]),
        champion=bool(part["champion"]),
        p=float(part["p"]) if part["p"] else None,
    )
    if not math.isfinite(rule.limit):
        raise SettingsError(f"the limit of the rule {rule.text!r} is too large a number")
    _check_metric(rule)
    _check_p(rule)
    return rule


def _check_metric(rule: Rule) -> None:
    known = METRICS
    if rule.worst or rule.slice.startswith("class="):
        known = CLASS_METRICS
    elif rule.slice:
        known = ("accuracy",)
    if rule.metric not in known:
        where = f" of the slice {rule.slice!r}" if rule.slice else " of slices" if rule.worst else ""
        raise SettingsError(
            f"there is no metric {rule.metric!r}{where} (in the rule {rule.text!r}); "
            f"there are: {', '.join(known)}"
        )


def _check_p(rule: Rule) -> None:
    if rule.p is None:
        return
    is_counted = not rule.worst and rule.metric in (CLASS_METRICS[1:] if rule.slice else COUNTED)
    if not (rule.champion and rule.operator == ">" and rule.limit == 0 and is_counted):
        raise SettingsError(
            f"(p < ...) belongs to a rule like 'accuracy > champion (p < 0.05)', got {rule.text!r}; its "
            f"metric may be one of {', '.join(COUNTED)}, or precision, recall or f1 of a class"
        )
    if not 0 < rule.p < 1:
        raise SettingsError(f"p must be between 0 and 1, got {rule.p} in the rule {rule.text!r}; try 0.05")
