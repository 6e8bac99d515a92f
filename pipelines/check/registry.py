"""Rules of a check, what they demand, and what they find.

A function looks at one kind of part of a pipeline and yields the code of a rule with what it found. It may
hold several rules; each stands in its docstring, and rules in a row may share what is below them:

    SL103 error: What is demanded.
        Fix: What to do about a finding.
        Source: Who says so.
"""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar


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
        where: Task, worker pool, parameter or schedule in question.
        why: What was found, in one line; never a secret's value.
    """

    code: str
    severity: Severity
    where: str
    why: str
    fix: str


@dataclass(frozen=True)
class Rule:
    """One rule: its stable code, never given to another, what it demands, what to do, and who says so."""

    code: str
    severity: Severity
    demand: str
    fix: str
    source: str


#: Codes of rules, and what was found.
Found = Iterator[tuple[str, str]]
Check = Callable[[Any], Found]
C = TypeVar("C", bound=Check)

#: All rules by code.
RULES: dict[str, Rule] = {}
#: The functions that look for what is wrong, by the class of the parts that they look at.
_CHECKS: list[tuple[type[Any], Check]] = []
_FLAGS = re.DOTALL | re.MULTILINE
_RULES = re.compile(r"^(SL\d{3} .+?)\n    Fix: (.+?)\n    Source: (.+?)(?=\n\S|\Z)", _FLAGS)
_RULE = re.compile(r"^(SL\d{3}) (error|warning): (.+?)(?=\nSL|\Z)", _FLAGS)


def rules(*subjects: type[Any]) -> Callable[[C], C]:
    """Registers a function and the rules in its docstring, for the parts of some classes."""

    def register(check: C) -> C:
        for head, *below in _RULES.findall(inspect.getdoc(check) or ""):
            for code, severity, demand in _RULE.findall(head):
                if code in RULES:
                    raise ValueError(f"two rules are called {code}")
                texts = (" ".join(text.split()) for text in (demand, *below))
                RULES[code] = Rule(code, Severity(severity), *texts)
        _CHECKS.extend((subject, check) for subject in subjects)
        return check

    return register


def apply(subjects: Mapping[type[Any], Sequence[Any]]) -> Iterator[Finding]:
    """Applies every rule to the parts of a pipeline that it looks at: by their class, each with a `where`."""
    for kind, check in _CHECKS:
        for subject in subjects.get(kind, ()):
            for code, why in check(subject):
                yield Finding(code, RULES[code].severity, subject.where, why, RULES[code].fix)
