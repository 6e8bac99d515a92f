"""What `shardline doctor` says of one thing that it has looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Diagnosis:
    """One line of the doctor's report.

    Attributes:
        what: What was looked at: "bucket".
        level: "ok", "warning" (it may do, or could not be looked at) or "error" (runs will fail).
        found: What was found, in one line.
        fix: What to do; "" where there is nothing to do.
    """

    what: str
    level: Level
    found: str
    fix: str = ""


def ok(what: str, found: str) -> Diagnosis:
    """Returns what is as it should be."""
    return Diagnosis(what, "ok", found)


def warning(what: str, found: str, fix: str) -> Diagnosis:
    """Returns what may do, or could not be looked at."""
    return Diagnosis(what, "warning", found, fix)


def error(what: str, found: str, fix: str) -> Diagnosis:
    """Returns what makes runs fail."""
    return Diagnosis(what, "error", found, fix)
