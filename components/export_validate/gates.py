"""The gate: rules over an evaluation, and the blessing that follows from them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from components.export_validate.evaluation import Evaluation
from trainer.errors import SettingsError

Verdict = Literal["passed", "failed"]

_OPERATORS: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, "==": operator.eq}


@dataclass(frozen=True)
class Rule:
    """One comparison between a measured value and a limit.

    Attributes:
        name: What was measured.
        left: Its value.
        operator: ">=" or "==".
        right: The limit.
        verdict: "passed" or "failed".
    """

    name: str
    left: float
    operator: str
    right: float
    verdict: Verdict

    @property
    def left_text(self) -> str:
        """The value as a person reads it; never rounded to the limit when it is not equal to it."""
        if isinstance(self.left, int):
            return f"{self.left:,}"
        short = f"{self.left:.4f}"
        return short if float(short) != self.right or self.left == self.right else repr(self.left)

    @property
    def right_text(self) -> str:
        """The limit as a person reads it."""
        return f"{self.right:g}"

    def __str__(self) -> str:
        comparison = self.operator if self.verdict == "passed" else f"is not {self.operator}"
        return f"{self.name} {self.left_text} {comparison} {self.right_text}"


@dataclass(frozen=True)
class Blessing:
    """The verdict on an exported model.

    Attributes:
        blessed: Whether the model may be published: all rules passed.
        rules: Every rule, with both of its sides.
        reason: Why, in one sentence.
    """

    blessed: bool
    rules: tuple[Rule, ...]
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Returns the content of blessing.json."""
        return asdict(self)


def check_min_accuracy(min_accuracy: float) -> None:
    """Checks a threshold before any work is done for it.

    Raises:
        SettingsError: When it is not within 0..1.
    """
    if not 0.0 <= min_accuracy <= 1.0:  # NaN fails this too.
        raise SettingsError(f"min_accuracy must be within 0..1, got {min_accuracy}; 0.95 means 95 %")


def judge(evaluation: Evaluation, min_accuracy: float) -> Blessing:
    """Judges an evaluation.

    Args:
        evaluation: Of the exported model.
        min_accuracy: Smallest accuracy that is good enough, 0..1.

    Raises:
        SettingsError: When `min_accuracy` is not within 0..1.
    """
    check_min_accuracy(min_accuracy)
    rules = (
        _compare("accuracy", evaluation.accuracy, ">=", min_accuracy),
        _compare("examples with non-finite output", evaluation.non_finite, "==", 0),
    )
    failed = [rule for rule in rules if rule.verdict == "failed"]
    return Blessing(not failed, rules, "; ".join(str(rule) for rule in failed or rules[:1]))


def _compare(name: str, left: float, symbol: str, right: float) -> Rule:
    return Rule(name, left, symbol, right, "passed" if _OPERATORS[symbol](left, right) else "failed")
