"""Records: dataclasses that were written as JSON, read again with each value of its field's type."""

from __future__ import annotations

import functools
import math
import reprlib
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from shardline.trainer import files
from shardline.trainer.errors import ShardlineError, printable

_T = TypeVar("_T")

_WORDS = {str: "text", int: "a whole number of 64 bits", float: "a finite number", bool: "true or false"}


def restore(kind: type[_T], content: Any, what: str, error: type[ShardlineError], remedy: str = "") -> _T:
    """Returns a dataclass from the JSON value that was made of it; keys that it does not know are left out.

    Raises `error`, which names `what`, the field, what was found there, and the remedy, where the value does
    not fit.
    """
    try:
        return typing.cast(_T, _as(kind, content, ""))
    except (TypeError, ValueError, OverflowError, ShardlineError) as failure:
        raise error(f"{what} is damaged: {failure}{f'; {remedy}' if remedy else ''}") from None


def load(kind: type[_T], path: Path, error: type[ShardlineError], remedy: str = "") -> _T:
    """Returns a dataclass from a JSON file; raises `error` as `restore` does, or where it has no object."""
    try:
        content = files.read_json(path, error)
    except error as failure:
        raise error(f"{failure}{f'; {remedy}' if remedy else ''}") from None
    return restore(kind, content, str(path), error, remedy)


def _as(kind: Any, value: Any, name: str) -> Any:
    """Returns a JSON value as a field of this type has it; TypeError or ValueError where it does not fit."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return _as_one_of(inner, value, name)
    if origin is typing.Literal:
        if value not in inner:
            known = f"{', '.join(map(repr, inner[:-1]))} or {inner[-1]!r}"
            raise ValueError(f"{name or 'it'} must be {known}, got {reprlib.repr(value)}")
        return value
    if is_dataclass(kind):
        return _as_dataclass(kind, _checked(value, Mapping, "a JSON object", name), name)
    if origin is tuple:
        items = _checked(value, list, "a JSON array", name)
        kinds = inner[:1] * len(items) if inner[-1] is Ellipsis else inner
        return tuple(_as(*pair, name) for pair in zip(kinds, items, strict=True))
    if origin is not None:
        found = _checked(value, Mapping, "a JSON object", name)
        return {key: _as(inner[1], item, f"{name}.{printable(key)}") for key, item in found.items()}
    if kind is float and type(value) is int:
        value = float(value)
    is_wrong = (kind is float and not math.isfinite(value)) if type(value) is kind else True
    if is_wrong or (kind is int and not -(2**63) <= value < 2**63):
        raise TypeError(f"{name or 'it'} must be {_WORDS.get(kind, 'null')}, got {reprlib.repr(value)}")
    if kind is str:
        value.encode(errors="surrogateescape")  # bytes of a file's name; half of a character cannot be shown
    return value


def _as_one_of(kinds: tuple[Any, ...], value: Any, name: str) -> Any:
    failures = []
    for kind in kinds:
        try:
            return _as(kind, value, name)
        except (TypeError, ValueError) as failure:
            failures.append(failure)
    raise failures[0]  # of the first, as None comes last


def _as_dataclass(kind: Any, content: Mapping[str, Any], name: str) -> Any:
    hints = _hints(kind)
    values = {}
    for item in fields(kind):
        if item.name in content:
            values[item.name] = _as(hints[item.name], content[item.name], f"{name}.{item.name}".lstrip("."))
        elif item.default is item.default_factory is MISSING:
            raise TypeError(f"{name or 'it'} has no {item.name}")
    return kind(**values)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _checked(value: Any, kind: Any, words: str, name: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name or 'it'} must be {words}, got {reprlib.repr(value)}")
    return value
