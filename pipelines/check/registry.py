"""Registry of the rules of a check, and their findings.

A function checks one kind of part of a pipeline and yields the code of a rule with what it found. Its
docstring declares its rules; consecutive rules may share a fix and a source:

    SL103 error: What is right.
        Fix: What to do about a finding.
        Source: Where this is documented.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

#: An error: the platform refuses it, or it fails or does something other than was meant. A warning: it works,
#: and will probably be regretted.
Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """A mistake in a task, worker pool, parameter or schedule, and what to do about it.

    `why` says in one line what was found; it never has the value of a secret.
    """

    code: str
    severity: Severity
    where: str
    why: str
    fix: str


@dataclass(frozen=True)
class Rule:
    """A rule: its code, which is never reused, what is right, what to do about a finding, and the source."""

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
#: Functions that find mistakes, with the class of the parts that they check.
_CHECKS: list[tuple[type[Any], Check]] = []
_FLAGS = re.DOTALL | re.MULTILINE
_RULES = re.compile(r"^(SL\d{3} .+?)\n    Fix: (.+?)\n    Source: (.+?)(?=\n\S|\Z)", _FLAGS)
_RULE = re.compile(r"^(SL\d{3}) (error|warning): (.+?)(?=\nSL|\Z)", _FLAGS)


def rules(*subjects: type[Any]) -> Callable[[C], C]:
    """Registers a function, and the rules in its docstring, for parts of these classes."""

    def register(check: C) -> C:
        for head, *below in _RULES.findall(inspect.getdoc(check) or ""):
            for code, severity, demand in _RULE.findall(head):
                if code in RULES:
                    raise ValueError(f"two rules have the code {code}")
                texts = (" ".join(text.split()) for text in (demand, *below))
                RULES[code] = Rule(code, severity, *texts)
        _CHECKS.extend((subject, check) for subject in subjects)
        return check

    return register


def apply(subjects: Sequence[Any]) -> Iterator[Finding]:
    """Applies every rule to the parts of a pipeline of its class; each part has a `where`."""
    for kind, check in _CHECKS:
        for subject in subjects:
            if type(subject) is kind:
                for code, why in check(subject):
                    yield Finding(code, RULES[code].severity, subject.where, why, RULES[code].fix)
