"""The comparisons that a rule may make."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

#: By sign; every one of them is False for NaN.
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
