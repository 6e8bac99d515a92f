"""Deserialization: JSON, TOML or a parameter's object as a dataclass, each value checked against its type.

`restore` and `load` take what a program wrote, and ignore keys that are no fields.
`read_dataclass` takes what a person wrote: an unknown key is an error that suggests the nearest known one.

A type may have a rule for its values, `Annotated[int, Within(1)]`.
"""

from __future__ import annotations

import datetime
import difflib
import functools
import math
import re
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from shardline.trainer.base import files
from shardline.trainer.base.errors import SettingsError, ShardlineError, error_prefix, printable

_T = TypeVar("_T")

_TYPE_NAMES: Mapping[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    datetime.datetime: "a date and time",
}
#: Half of a character; a byte of a file's name that is not UTF-8 is none.
_HALF = re.compile("[\ud800-\udc7f\udd00-\udfff]")
#: Largest number of keys that are all named for an unknown one.
_MOST_NAMED = 20
_REFUSED = (TypeError, ValueError, OverflowError, ShardlineError)


class Rule(NamedTuple):
    """Rule for the values of a type: what they must be, and whether one is."""

    description: str
    allows: Callable[[Any], bool]


class Within(NamedTuple):
    """Range of a number, from its smallest to its largest value."""

    least: float
    most: float = math.inf

    @property
    def description(self) -> str:
        """The range in words."""
        return f"at least {self.least:,}" if self.most == math.inf else f"{self.least:,} to {self.most:,}"

    def allows(self, value: float) -> bool:
        """Whether a number is in the range."""
        return self.least <= value <= self.most


#: Numbers from 0 on, and from 1 on.
Natural = Annotated[int, Within(0)]
Count = Annotated[int, Within(1)]
#: Text without the bytes of a file's name that are not UTF-8.
Text = Annotated[str, Rule("text in UTF-8", lambda text: text == text.encode(errors="ignore").decode())]


def restore(kind: type[_T], content: Any, what: str, error: type[ShardlineError], remedy: str = "") -> _T:
    """Returns a dataclass from the JSON that a program made of it, without unknown keys.

    Raises `error`, with `what`, the field, its value and the remedy, where a value has the wrong type.
    """
    try:
        return typing.cast(_T, convert(kind, content, "", strict=False))
    except _REFUSED as failure:
        raise error(f"{what} is damaged: {failure}{f'; {remedy}' if remedy else ''}") from None


def load(kind: type[_T], path: Path, error: type[ShardlineError], remedy: str = "") -> _T:
    """Returns a dataclass from a JSON file; raises `error` as `restore`, or when it holds no object."""
    try:
        content = files.read_json(path, error)
    except error as failure:
        raise error(f"{failure}{f'; {remedy}' if remedy else ''}") from None
    return restore(kind, content, str(path), error, remedy)


def read_dataclass(kind: type[_T], values: Any, name: str = "", **given: Any) -> _T:
    """Returns a dataclass from an object that a person wrote, and the fields `given`, which it may not have.

    `name` is the object's name in messages, such as "data"; "" for none. Raises SettingsError when a key is
    unknown or missing, or a value is of another type or refused by the dataclass.
    """
    prefix = f"{name}." if name else ""
    own = read_fields(kind, values, name, leave_out=given)
    with error_prefix(prefix):
        return kind(**own, **given)


def read_options(kind: type[_T], values: Mapping[str, Any], name: str, **given: Any) -> _T:
    """Returns a dataclass from the fields among `values`, and its others in the mapping `values[name]`.

    These are parameters, whose whole floats become integers; the fields `given` are neither. Raises
    SettingsError as `read`, and for an option that has a value of its own.
    """
    own, options = {key: values[key] for key in field_types(kind) if key in values}, values[name]
    if not isinstance(options, Mapping):
        raise SettingsError(f"{name} must be a mapping, got {options!r}")
    if twice := next((key for key in options if key in own), ""):
        raise SettingsError(f"{name} has {twice}, which has a value of its own; leave it out there")
    check_keys(options, [key for key in field_types(kind) if key not in {*own, *given}], f"{name}.")
    return read_dataclass(kind, restore_integers({**own, **options}), **given)


def read_fields(
    kind: Any,
    values: Any,
    name: str = "",
    *,
    leave_out: Collection[str] = (),
    also: Collection[str] = (),
    whole: bool = True,
    strict: bool = True,
) -> dict[str, Any]:
    """Returns the values of the fields of a dataclass, each checked against its type.

    Args:
        kind: The dataclass.
        values: Values by key.
        name: Name of their mapping in messages, such as "train"; "" for none.
        leave_out: Fields that may not be set.
        also: Further keys that are allowed, and read elsewhere.
        whole: Whether fields without a default are required.
        strict: Whether a person wrote the values; else unknown keys are ignored.
    """
    known = {key: hint for key, hint in _annotated_types(kind).items() if key not in leave_out}
    prefix, wanted = f"{name}." if name else "", f" with {', '.join(known)}" if strict else ""
    if not isinstance(values, Mapping):
        raise _mistyped(name, f"a mapping{wanted}", values)
    if strict:
        check_keys(values, [*known, *also], prefix)
    required = [item.name for item in fields(kind) if item.default is item.default_factory is MISSING]
    if whole and (missing := [key for key in required if key in known and key not in values]):
        raise SettingsError(f"{prefix}{missing[0]} is missing")
    return {
        key: convert(known[key], value, f"{prefix}{key}", strict=strict)
        for key, value in values.items()
        if key in known
    }


def check_types(settings: Any) -> None:
    """Checks that each field of a dataclass has a value of its type; raises SettingsError otherwise."""
    kind: Any = type(settings)
    for name, hint in _annotated_types(kind).items():
        convert(hint, getattr(settings, name), name)


def check_keys(keys: Iterable[str], known: Collection[str], prefix: str = "") -> None:
    """Raises SettingsError for an unknown key, and suggests the nearest known one."""
    for key in keys:
        if key not in known:
            listed = f"there are {', '.join(known)}"
            if len(known) > _MOST_NAMED:
                listed = f"the nearest are {nearest(str(key), known, 5)}"
            raise SettingsError(f"unknown key {prefix}{key}; {did_you_mean(key, known, prefix) or listed}")


def did_you_mean(name: str, known: Iterable[str], prefix: str = "", *, after: str = "") -> str:
    """Returns "did you mean X?" with the nearest known name, "" where none is near.

    `prefix` precedes the suggested name, `after` the question.
    """
    near = nearest(str(name), known, 1, 0.6)
    return f"{after}did you mean {prefix}{near}?" if near else ""


def nearest(name: str, known: Iterable[str], most: int = 8, likeness: float = 0.0) -> str:
    """Returns the known names that are most like one, at most `most`, whose likeness is at least so, 0..1."""
    return ", ".join(difflib.get_close_matches(name, list(known), most, likeness))


def field_types(kind: Any) -> Mapping[str, Any]:
    """Returns the types of a dataclass's fields by name, without their annotations."""
    hints = typing.get_type_hints(kind)
    return {item.name: hints[item.name] for item in fields(kind)}


@functools.cache
def _annotated_types(kind: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {item.name: hints[item.name] for item in fields(kind)}


def restore_integers(value: Any) -> Any:
    """Returns a JSON value with whole floats as integers, at every level.

    Parameters travel as protobuf Struct: 64 arrives as 64.0, and keras.layers.Dense refuses that.
    """
    if isinstance(value, Mapping):
        return {name: restore_integers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [restore_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def convert(kind: Any, value: Any, name: str, *, strict: bool = True) -> Any:
    """Returns a value as a field's type, `strict` if a person wrote it; SettingsError if it is of another."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or (type(kind) is type and kind not in _TYPE_NAMES and isinstance(value, kind)):
        return value
    if origin is Annotated:
        value = convert(inner[0], value, name, strict=strict)
        for rule in inner[1:]:
            if hasattr(rule, "allows") and not rule.allows(value):
                raise SettingsError(f"{name} must be {rule.description}, got {value!r}")
        return value
    if origin in (types.UnionType, typing.Union):
        failures = []
        for each in inner:
            try:
                return convert(each, value, name, strict=strict)
            except SettingsError as failure:
                failures.append(failure)
        raise failures[0]  # None is the last type of a union
    if origin is typing.Literal:
        if value not in inner:
            raise _mistyped(name, f"{', '.join(map(repr, inner[:-1]))} or {inner[-1]!r}", value)
        return value
    if is_dataclass(kind):
        own = read_fields(kind, value, name, strict=strict)
        with error_prefix(f"{name}." if name else ""):
            return typing.cast(Any, kind)(**own)
    if origin is tuple:
        items = _check_instance(value, list | tuple, f"a list{_items_text(inner[0])}", name)
        kinds = inner[:1] * len(items) if inner[-1] is Ellipsis else inner
        pairs = enumerate(zip(kinds, items, strict=True))
        return tuple(convert(each, item, f"{name}[{index}]", strict=strict) for index, (each, item) in pairs)
    if origin is not None:
        items = _check_instance(value, Mapping, f"a mapping{_items_text(inner[1])}", name).items()
        kind = inner[1]
        return {key: convert(kind, item, f"{name}.{printable(key)}", strict=strict) for key, item in items}
    return _convert_scalar(kind, value, name, strict)


def _convert_scalar(kind: Any, value: Any, name: str, strict: bool) -> Any:
    if kind is float and type(value) is int and abs(value) <= sys.float_info.max:
        return value if strict else float(value)  # as a person wrote it: 1, not 1.0
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise _mistyped(name, _TYPE_NAMES.get(kind, "null"), value)
    if kind is int and not -(2**63) <= value < 2**63:
        raise _mistyped(name, "a whole number of 64 bits", value)
    if kind is str and _HALF.search(value):
        raise _mistyped(name, "text without half of a character", value)
    return value


def _items_text(kind: Any) -> str:
    plural = {str: "texts", int: "whole numbers", float: "numbers"}
    return f" of {plural[kind]}" if kind in plural else " of mappings" if is_dataclass(kind) else ""


def _check_instance(value: Any, kind: Any, expected: str, name: str) -> Any:
    if not isinstance(value, kind):
        raise _mistyped(name, expected, value)
    return value


def _mistyped(name: str, expected: str, value: Any) -> SettingsError:
    return SettingsError(f"{name or 'it'} must be {expected}, got {reprlib.repr(value)}")
