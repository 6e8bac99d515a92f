"""List requests' `filter` and `order_by`: of https://google.aip.dev/160 and 132 what is used here."""

from __future__ import annotations

import datetime
import enum
import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.contract.fake.api import refuse

#: How a field of a resource is read: by its name, as the filter has it.
Reader = Callable[[Any, str], Any]


@dataclass(frozen=True)
class Ranked:
    """A value that is compared by its place among others."""

    name: str
    ranks: Sequence[str]


_TOKEN = re.compile(
    r"""\s*(?:(?P<paren>[()])|(?P<word>AND|OR|NOT)\b|(?P<minus>-)?(?P<field>[A-Za-z_](?:[\w.]|"[^"]*"|`[^`]*`)*)
    \s*(?P<op>!=|<=|>=|=~|=|<|>|:)\s*(?P<value>"(?:[^"\\]|\\.)*"|\([^()]*\)|[^\s()]+))""",
    re.VERBOSE,
)
_VALUE = re.compile(r'"(?:[^"\\]|\\.)*"|(?!OR\b)[^\s()]+')
_COMPARE = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def matching(resources: Iterable[Any], text: str, read: Reader) -> list[Any]:
    """Returns the resources that a filter lets through, or answers INVALID_ARGUMENT."""
    tokens = _tokens(text)
    return [item for item in resources if not tokens or _either(list(tokens), item, read)]


def ordered(resources: Sequence[Any], order_by: str, fields: Sequence[str]) -> list[Any]:
    """Returns resources in a request's order; the newest first where it has none."""
    found = list(resources)
    for part in reversed((order_by or "create_time desc").split(",")):
        name, _, direction = part.strip().partition(" ")
        if name not in fields or direction.strip() not in ("", "asc", "desc"):
            refuse(f"order_by: cannot order by {part.strip()!r}")
        known = [item for item in found if getattr(item, name) is not None]
        unknown = [item for item in found if getattr(item, name) is None]
        known.sort(key=lambda item, name=name: getattr(item, name), reverse=direction.strip() == "desc")
        found = known + unknown
    return found


def _tokens(text: str) -> list[re.Match[str]]:
    tokens, end = [], 0
    while text[end:].strip():
        token = _TOKEN.match(text, end)
        if token is None:
            refuse(f"filter: cannot be read at {text[end:].strip()!r}")
            raise AssertionError
        tokens.append(token)
        end = token.end()
    return tokens


def _either(tokens: list[re.Match[str]], item: Any, read: Reader) -> bool:
    found = _both(tokens, item, read)
    while tokens and tokens[0]["word"] == "OR":
        tokens.pop(0)
        found = _both(tokens, item, read) or found
    return found


def _both(tokens: list[re.Match[str]], item: Any, read: Reader) -> bool:
    found = _single(tokens, item, read)
    while tokens and tokens[0]["word"] != "OR" and tokens[0]["paren"] != ")":
        if tokens[0]["word"] == "AND":
            tokens.pop(0)
        found = _single(tokens, item, read) and found
    return found


def _single(tokens: list[re.Match[str]], item: Any, read: Reader) -> bool:
    token = tokens.pop(0)
    if token["word"] == "NOT":
        return not _single(tokens, item, read)
    if token["paren"] == "(":
        found = _either(tokens, item, read)
        tokens.pop(0)
        return found
    actual, value = read(item, token["field"]), token["value"]
    # field=("a" OR "b") is one of these values.
    values = _VALUE.findall(value) if value.startswith("(") else [value]
    found = any(_compare(actual, token["op"], _unquoted(each)) for each in values)
    return found != bool(token["minus"])


def _unquoted(value: str) -> str:
    return re.sub(r"\\(.)", r"\1", value[1:-1]) if value.startswith('"') else value


def _compare(actual: Any, operation: str, wanted: str) -> bool:
    if isinstance(actual, Ranked):
        return _COMPARE[operation](actual.ranks.index(actual.name), actual.ranks.index(wanted))
    if isinstance(actual, enum.Enum):
        return _COMPARE[operation](actual.name, wanted)
    if isinstance(actual, datetime.datetime):
        # Resources' times are finer than a datetime, which compares only with its own kind.
        return _COMPARE[operation](actual.timestamp(), datetime.datetime.fromisoformat(wanted).timestamp())
    if operation == ":":
        if wanted == "*":
            return actual not in (None, "", {})
        pattern = wanted if "*" in wanted else f"*{wanted}*"
        return fnmatch.fnmatchcase(str(actual or ""), pattern)
    if operation == "=~":
        return re.search(wanted, str(actual or "")) is not None
    return _COMPARE[operation]("" if actual is None else str(actual), wanted)
