"""Parameters of a pipeline, checked against what it declares."""

from __future__ import annotations

import datetime
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shardline.components.text import short
from shardline.pipelines.check.secrets import kind_of
from shardline.pipelines.spec import declared
from shardline.pipelines.tables import read_toml
from shardline.trainer import files
from shardline.trainer.errors import PipelineError, SettingsError
from shardline.trainer.records import did_you_mean

#: Whole numbers travel as doubles, here as on the platform.
_LARGEST_INTEGER = 2**53


class Given(dict[str, Any]):
    """Values of parameters by name, as they were given, with the file of those that came from one.

    Attributes:
        origins: File of a value, by the name of the parameter.
    """

    origins: Mapping[str, Path] = {}

    def with_texts(self, texts: Mapping[str, str]) -> Given:
        """Returns these values and those that a command line gives, which win."""
        both = Given({**self, **texts})
        both.origins = {name: path for name, path in self.origins.items() if name not in texts}
        return both


def read_parameters(path: Path) -> Given:
    """Returns the parameters in a TOML file: names and values, tables and arrays for objects and lists.

    Raises SettingsError when there is no such file or it is no TOML, or a value is none that JSON has.
    """
    found = Given(read_toml(path, f"no parameter file {path}; it has lines NAME = VALUE (TOML)"))
    for name, value in found.items():
        if wrong := next(_not_json(name, value), None):
            raise SettingsError(f"{path}: {wrong}")
    found.origins = dict.fromkeys(found, path)
    return found


def _not_json(name: str, value: Any) -> Iterator[str]:
    """Yields what in a TOML value is none that JSON has, with its key."""
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _not_json(f"{name}.{key}", item)
    elif isinstance(value, (datetime.date, datetime.time)):
        yield f"{name} is a date or time, {value}; put it in quotes to pass it on as text"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{name} must be finite, got {value}"


def check_parameters(spec: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the given parameters with their declared types: str, int, float, bool, dict or list.

    They are given as text, as on a command line, or of the declared type already. Raises PipelineError when
    one is unknown, mistyped, not one of its literals, or missing, or holds a secret.
    """
    known = declared(spec)
    checked = {}
    for name, value in given.items():
        try:
            checked[name] = _check(name, value, known)
        except PipelineError as error:
            file = given.origins.get(name) if isinstance(given, Given) else None
            raise PipelineError(f"{file}: {error}" if file else str(error)) from None
    for name, declaration in known.items():
        if name not in given and "defaultValue" not in declaration and not declaration.get("isOptional"):
            raise PipelineError(
                f"the parameter {name} ({_type_of(declaration)}) has no default and must be given"
            )
    return checked


def _check(name: str, value: Any, known: Mapping[str, Mapping[str, Any]]) -> Any:
    if name not in known:
        raise PipelineError(_unknown(name, known))
    converted = convert(name, value, known[name])
    if kind := kind_of(name, converted):
        raise PipelineError(
            f"the parameter {name} holds {kind}, which everybody who sees the run would see; put it into "
            "Secret Manager, give its name there, projects/PROJECT/secrets/NAME/versions/latest, and "
            "revoke this one"
        )
    return converted


def _unknown(name: str, known: Mapping[str, Mapping[str, Any]]) -> str:
    listing = ", ".join(f"{other} ({_type_of(item)})" for other, item in known.items())
    hint = f"{did_you_mean(name, known)} ".lstrip()
    return f"the pipeline has no parameter {name!r}; {hint}it has {listing or 'none'}"


def convert(name: str, value: Any, declaration: Mapping[str, Any]) -> Any:
    """Returns the value of a parameter with its declared type; PipelineError when it is of another."""
    kind = declaration["parameterType"]
    if kind not in _TYPES:
        raise PipelineError(f"the parameter {name} is of type {kind}, which cannot be given")
    shown = short(repr(value), 80)
    try:
        converted = _TYPES[kind][0](value)
    except (ValueError, TypeError) as error:
        because = f" ({error})" if isinstance(error, _ReasonError) else ""
        raise PipelineError(
            f"the parameter {name} is declared as {_type_of(declaration)}, got {shown}{because}"
        ) from None
    literals = declaration.get("literals")
    if literals and converted not in literals:
        raise PipelineError(f"the parameter {name} is one of {', '.join(map(str, literals))}, got {shown}")
    return converted


class _ReasonError(ValueError):
    """A value is refused for a reason that the type does not say."""


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    if "\0" in value:
        raise _ReasonError("a NUL character cannot be passed on")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _ReasonError("it is not valid UTF-8") from None
    return value


def _integer(value: Any) -> int:
    number = _double(value)
    if isinstance(value, str) and not re.fullmatch(r"\s*[+-]?[0-9]+\s*", value):
        raise ValueError  # int() takes 1_000
    if abs(number) > _LARGEST_INTEGER or (isinstance(value, str) and abs(int(value)) > _LARGEST_INTEGER):
        raise _ReasonError("whole numbers are exact up to 2**53 only")
    if number != int(number):
        raise ValueError
    return int(value)


def _double(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    number = float(value)
    if not math.isfinite(number):
        raise _ReasonError("it must be finite")
    return number


def _boolean(value: Any) -> bool:
    words = {"true": True, "false": False}
    if isinstance(value, str):
        if value.strip().lower() not in words:
            raise _ReasonError("write true or false")
        return words[value.strip().lower()]
    if not isinstance(value, bool):
        raise TypeError
    return value


def _json(kind: type, value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = files.parse_json(value, "it", PipelineError)
        except PipelineError as error:
            raise _ReasonError(error) from None
    if not isinstance(value, kind):
        raise TypeError
    return value


#: How a value of each type is read, and what the type is called in a message.
_TYPES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "STRING": (_string, "str"),
    "NUMBER_INTEGER": (_integer, "int"),
    "NUMBER_DOUBLE": (_double, "float"),
    "BOOLEAN": (_boolean, "bool"),
    "STRUCT": (functools.partial(_json, dict), "a JSON object"),
    "LIST": (functools.partial(_json, list), "a JSON array"),
}


def _type_of(declaration: Mapping[str, Any]) -> str:
    kind = str(declaration["parameterType"])
    return _TYPES[kind][1] if kind in _TYPES else kind
