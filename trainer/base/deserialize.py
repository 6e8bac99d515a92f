"""Records: JSON, TOML or the object of a parameter, read as a dataclass with each value of its field's type.

What a program has written is restored: keys that are not known are those of another version. What a person
has written is read: a key that is not known is a slip, and the nearest one is named.
"""

from __future__ import annotations

import datetime
import difflib
import functools
import math
import reprlib
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from shardline.trainer.base import files
from shardline.trainer.base.errors import SettingsError, ShardlineError, printable

_T = TypeVar("_T")

_TYPE_NAMES: Mapping[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    datetime.datetime: "a date and time",
}
_REFUSED = (TypeError, ValueError, OverflowError, ShardlineError)


def restore(kind: type[_T], content: Any, what: str, error: type[ShardlineError], remedy: str = "") -> _T:
    """Returns a dataclass from the JSON value that was made of it; keys that it does not know are left out.

    Raises `error`, which names `what`, the field, what was found, and the remedy, where it does not fit.
    """
    try:
        return typing.cast(_T, _convert(kind, content, ""))
    except _REFUSED as failure:
        raise error(f"{what} is damaged: {failure}{f'; {remedy}' if remedy else ''}") from None


def load(kind: type[_T], path: Path, error: type[ShardlineError], remedy: str = "") -> _T:
    """Returns a dataclass from a JSON file; raises `error` as `restore` does, or where it has no object."""
    try:
        content = files.read_json(path, error)
    except error as failure:
        raise error(f"{failure}{f'; {remedy}' if remedy else ''}") from None
    return restore(kind, content, str(path), error, remedy)


def read(kind: type[_T], values: Any, name: str) -> _T:
    """Returns a dataclass from an object that a person wrote, with the integers that a STRUCT makes floats.

    `name` is the object's in messages, as in "data"; "" for none.
    """
    if not isinstance(values, Mapping):
        raise SettingsError(f"{name} must be a mapping with {', '.join(field_types(kind))}, got {values!r}")
    return kind(**read_fields(kind, restore_integers(values), f"{name}." if name else ""))


def read_fields(
    kind: type[Any],
    values: Mapping[str, Any],
    prefix: str = "",
    *,
    leave_out: Collection[str] = (),
    also: Collection[str] = (),
    whole: bool = True,
) -> dict[str, Any]:
    """Returns what a person wrote for the fields of a dataclass, each value of its field's type.

    Args:
        kind: The dataclass.
        values: What a person wrote.
        prefix: What stands in front of a key in messages, as in "train.".
        leave_out: Fields that cannot be given.
        also: Keys that are read elsewhere.
        whole: Whether the fields without a default must be there.
    """
    known = {name: hint for name, hint in field_types(kind).items() if name not in leave_out}
    check_keys(values, [*known, *also], prefix)
    if whole and (missing := [name for name in _required(kind) if name in known and name not in values]):
        raise SettingsError(f"{prefix}{missing[0]} is missing")
    given = {key: value for key, value in values.items() if key in known}
    try:
        return {
            key: _convert(known[key], value, f"{prefix}{key}", strict=True) for key, value in given.items()
        }
    except (TypeError, ValueError, OverflowError) as error:
        raise SettingsError(str(error)) from None


def check_types(settings: Any) -> None:
    """Checks that each field of a dataclass holds what its type says; SettingsError when one does not."""
    for name, kind in field_types(type(settings)).items():
        try:
            _convert(kind, getattr(settings, name), name, strict=True)
        except (TypeError, ValueError, OverflowError) as error:
            raise SettingsError(str(error)) from None


def check_keys(found: Iterable[str], known: Collection[str], prefix: str = "") -> None:
    """Refuses a key that is not known, with the nearest one; raises SettingsError."""
    for key in found:
        if key not in known:
            hint = did_you_mean(key, known, prefix) or f"there are {', '.join(known)}"
            raise SettingsError(f"unknown key {prefix}{key}; {hint}")


def did_you_mean(found: str, known: Iterable[str], prefix: str = "", *, after: str = "") -> str:
    """Returns "did you mean X?" for the nearest of what is known, "" where nothing is near.

    `prefix` stands in front of the name that is meant, `after` in front of the question.
    """
    near = difflib.get_close_matches(found, sorted(known), n=1)
    return f"{after}did you mean {prefix}{near[0]}?" if near else ""


def field_types(kind: Any) -> Mapping[str, Any]:
    """Returns the types of a dataclass's fields by name."""
    return _field_types(kind)


@functools.cache
def _field_types(kind: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(kind)
    return {item.name: hints[item.name] for item in fields(kind)}


def own_fields(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the values that are fields of a dataclass."""
    return {name: values[name] for name in field_types(kind) if name in values}


def restore_integers(value: Any) -> Any:
    """Returns a JSON value with whole floats as integers, all the way down.

    Parameters travel as protobuf Struct: 64 arrives as 64.0, and keras.layers.Dense refuses that.
    """
    if isinstance(value, Mapping):
        return {name: restore_integers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [restore_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _convert(kind: Any, value: Any, name: str, *, strict: bool = False) -> Any:
    """Returns a value as a field of this type has it; TypeError or ValueError where it does not fit.

    `strict` is for what a person wrote: it refuses keys that a dataclass does not know.
    """
    origin, inner, is_record = typing.get_origin(kind), typing.get_args(kind), is_dataclass(kind)
    if kind is Any or (is_record and isinstance(value, kind)):
        return value
    if origin in (types.UnionType, typing.Union):
        failures = []
        for each in inner:
            try:
                return _convert(each, value, name, strict=strict)
            except (TypeError, ValueError) as failure:
                failures.append(failure)
        raise failures[0]  # of the first, as None comes last
    if origin is typing.Literal:
        if value not in inner:
            known = f"{', '.join(map(repr, inner[:-1]))} or {inner[-1]!r}"
            raise ValueError(f"{name or 'it'} must be {known}, got {reprlib.repr(value)}")
        return value
    if is_record:
        wanted = f" with {', '.join(field_types(kind))}" if strict else ""
        content = _check_instance(value, Mapping, f"a mapping{wanted}", name)
        if strict:
            return kind(**read_fields(kind, content, f"{name}."))
        if missing := [each for each in _required(kind) if each not in content]:
            raise TypeError(f"{name}.{missing[0]} is missing".lstrip("."))
        hints = {each: hint for each, hint in field_types(kind).items() if each in content}
        return kind(
            **{
                each: _convert(hint, content[each], f"{name}.{each}".lstrip("."))
                for each, hint in hints.items()
            }
        )
    if origin is tuple:
        items = _check_instance(value, list | tuple, f"a list{_items_text(inner[0])}", name)
        kinds = inner[:1] * len(items) if inner[-1] is Ellipsis else inner
        pairs = enumerate(zip(kinds, items, strict=True))
        return tuple(_convert(each, item, f"{name}[{index}]", strict=strict) for index, (each, item) in pairs)
    if origin is not None:
        found = _check_instance(value, Mapping, f"a mapping{_items_text(inner[1])}", name).items()
        return {
            key: _convert(inner[1], item, f"{name}.{printable(key)}", strict=strict) for key, item in found
        }
    return _convert_scalar(kind, value, name, strict)


def _convert_scalar(kind: Any, value: Any, name: str, strict: bool) -> Any:
    if kind is float and type(value) is int:
        return value if strict else float(value)  # as it was written: 1 and not 1.0
    is_wrong = (kind is float and not math.isfinite(value)) if type(value) is kind else True
    if is_wrong:
        raise TypeError(f"{name or 'it'} must be {_TYPE_NAMES.get(kind, 'null')}, got {reprlib.repr(value)}")
    if kind is int and not -(2**63) <= value < 2**63:
        raise TypeError(f"{name or 'it'} must be a whole number of 64 bits, got {reprlib.repr(value)}")
    if kind is str:
        value.encode(errors="surrogateescape")  # bytes of a file's name; half of a character cannot be shown
    return value


def _items_text(kind: Any) -> str:
    plural = {str: "texts", int: "whole numbers", float: "numbers"}
    return f" of {plural[kind]}" if kind in plural else " of mappings" if is_dataclass(kind) else ""


def _required(kind: Any) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind) if item.default is item.default_factory is MISSING)


def _check_instance(value: Any, kind: Any, words: str, name: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name or 'it'} must be {words}, got {reprlib.repr(value)}")
    return value
