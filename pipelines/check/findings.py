"""What a check finds."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Severity(enum.StrEnum):
    """How bad a finding is."""

    #: The platform refuses it, or it fails or does something else than was meant.
    ERROR = "error"
    #: It works, and is likely to be regretted.
    WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, and what to do about it.

    Attributes:
        code: Stable name of the rule: SL101.
        severity: Error or warning.
        where: Task, worker pool, parameter or schedule in question.
        why: What was found, in one line; never a secret's value.
        fix: What to do.
    """

    code: str
    severity: Severity
    where: str
    why: str
    fix: str
