"""The rules: each is a small pure function from one part of a pipeline to what is wrong with it.

What a check finds.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar


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


class Subject(Protocol):
    """A part of a pipeline that rules look at."""

    @property
    def where(self) -> str:
        """What the part is called in a finding."""


S = TypeVar("S", bound=Subject)
Check = Callable[[S], Iterable[str]]


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        code: Stable name, never given to another rule: SL101.
        severity: Of its findings.
        subject: Class of the parts that it looks at.
        fix: What to do about a finding.
        check: Gives one line for each thing that is wrong. The first line of its docstring says what the
            rule demands; a line that begins with "Source:" says who says so.
    """

    code: str
    severity: Severity
    subject: type[Any]
    fix: str
    check: Check[Any]

    @property
    def demand(self) -> str:
        """What the rule demands, in one line."""
        return _docstring(self.check)[0]

    @property
    def source(self) -> str:
        """Who says so."""
        text = " ".join(_docstring(self.check))
        return text.partition("Source: ")[2]


#: All rules by code.
RULES: dict[str, Rule] = {}


def error(code: str, subject: type[S], *, fix: str) -> Callable[[Check[S]], Check[S]]:
    """Registers a rule whose findings are errors."""
    return _register(code, Severity.ERROR, subject, fix)


def warning(code: str, subject: type[S], *, fix: str) -> Callable[[Check[S]], Check[S]]:
    """Registers a rule whose findings are warnings."""
    return _register(code, Severity.WARNING, subject, fix)


def apply(subjects: Mapping[type[Any], Sequence[Subject]]) -> Iterator[Finding]:
    """Applies every rule to the parts that it looks at.

    Args:
        subjects: The parts of a pipeline by their class.
    """
    for rule in RULES.values():
        for subject in subjects.get(rule.subject, ()):
            for why in rule.check(subject):
                yield Finding(rule.code, rule.severity, subject.where, why, rule.fix)


def _register(code: str, severity: Severity, subject: type[S], fix: str) -> Callable[[Check[S]], Check[S]]:
    def decorate(check: Check[S]) -> Check[S]:
        if code in RULES:
            raise ValueError(f"two rules are called {code}")
        RULES[code] = Rule(code, severity, subject, fix, check)
        return check

    return decorate


def _docstring(check: Check[Any]) -> list[str]:
    return [line.strip() for line in (check.__doc__ or "").strip().splitlines()]
