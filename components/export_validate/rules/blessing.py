"""The verdict on an exported model, rule by rule: plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from shardline.components.export_validate.evaluation import Interval

#: "undecided": there is too little to judge on. "skipped": the rule needs a champion that is not there, and
#: the policy for a first run allows it.
Verdict = Literal["passed", "failed", "undecided", "skipped"]


@dataclass(frozen=True)
class JudgedRule:
    """One rule, its two sides and the verdict on it.

    Attributes:
        rule: As it was written: "accuracy >= champion - 0.005".
        name: What was measured: "accuracy", "recall[class=healthy]", "worst_slice(accuracy)".
        left: Its value; None where it could not be measured.
        operator: ">=", "<=", ">", "<" or "==".
        right: The limit; None where it is a champion's value that could not be measured.
        verdict: passed, failed, undecided or skipped.
        interval: 95 % interval of the left side; None where there is none.
        champion: The champion's own value, where the rule compares with it.
        difference: 95 % interval of the value minus the champion's, by paired bootstrap.
        p: Share of the paired resamples in which the champion is as good or better; None where the rule
            does not ask for it.
        note: What else a person must know: which slice is the worst, why it is undecided; or "".
    """

    rule: str
    name: str
    left: float | None
    operator: str
    right: float | None
    verdict: Verdict
    interval: Interval | None = None
    champion: float | None = None
    difference: Interval | None = None
    p: float | None = None
    note: str = ""

    @property
    def left_text(self) -> str:
        """The value as a person reads it; never rounded to the limit when it is not equal to it."""
        if self.left is None:
            return "not measured"
        if isinstance(self.left, int):
            return f"{self.left:,}"
        short = f"{self.left:.4f}" if self.left == 0 or 0.001 <= abs(self.left) < 1000 else f"{self.left:.4g}"
        rounded_to_limit = float(short) == self.right and self.left != self.right
        return repr(self.left) if rounded_to_limit else short

    @property
    def right_text(self) -> str:
        """The limit as a person reads it."""
        return "the champion's" if self.right is None else f"{self.right:g}"

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        if self.verdict in ("undecided", "skipped"):
            return f"{self.rule} is {self.verdict}{note}"
        failed = "is not" if self.p is None else "is not significantly"
        comparison = self.operator if self.verdict == "passed" else f"{failed} {self.operator}"
        return f"{self.name} {self.left_text} {comparison} {self.right_text}{note}"


@dataclass(frozen=True)
class Blessing:
    """The verdict on an exported model.

    Attributes:
        blessed: Whether the model may be published.
        rules: Every rule, with both of its sides.
        reason: Why, in one sentence.
        warnings: What a person should know though it decides nothing, a sentence each.
    """

    blessed: bool
    rules: tuple[JudgedRule, ...]
    reason: str
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the content of blessing.json."""
        return asdict(self)
