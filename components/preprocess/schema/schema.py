"""Schema of a dataset's values, in the format of Frictionless' Table Schema.

It refuses the parts of Table Schema that are not checked here: an ignored constraint would be taken for one
that holds.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardline.components.storage import as_source_error, open_read, resolve
from shardline.trainer.base import files
from shardline.trainer.base.errors import SettingsError, printable, short

ANY, NUMBER, INTEGER, STRING, BOOLEAN, LIST = "any", "number", "integer", "string", "boolean", "list"

#: Types as in the setting `columns`.
TYPES: Mapping[str, str] = {STRING: "text", INTEGER: "integer", NUMBER: "number"}

#: Texts of a CSV file for a missing number, where another value made the column text.
NO_VALUES = frozenset({"", "NA", "N/A", "#N/A", "n/a", "NULL", "null", "NaN", "nan"})

#: Shardline's own property of a field: the largest share of examples without a value.
MAX_MISSING = "shardline:maxMissing"

#: Most bytes of a file.
_LARGEST = 16 << 20

# Properties that are only documentation.
_NOTES = ("title", "description", "example")
_SCHEMA_PROPERTIES = ("fields", "missingValues", "$schema", "name", *_NOTES)
_FIELD_PROPERTIES = ("name", "type", "constraints", MAX_MISSING, *_NOTES)


@dataclass(frozen=True)
class Field:
    """Type and constraints of the values of a column.

    Attributes:
        name: Name of a feature, of a label, or "key".
        type: One of those in `_CONSTRAINTS`.
        constraints: Constraints of Table Schema, by name.
        max_missing: Largest share of examples without a value, 0..1.
    """

    name: str
    type: str
    constraints: Mapping[str, Any]
    max_missing: float = 1.0


@dataclass(frozen=True)
class Schema:
    """A schema read from a file.

    Attributes:
        digest: "sha256:..." of its bytes.
        fields: Fields by column name.
        missing: Texts, and numbers as texts, that mean a missing value.
    """

    path: str
    digest: str
    fields: Mapping[str, Field]
    missing: tuple[str, ...] = ("",)


def read(path: str) -> Schema:
    """Reads a schema from a local path or a URL; SettingsError if it has parts that are not checked."""
    resolved = resolve(path)
    with as_source_error(resolved), open_read(resolved) as file:
        data = file.read(_LARGEST + 1)
    where = f"schema {printable(path)}"
    if len(data) > _LARGEST:
        raise SettingsError(f"{where} has more than {_LARGEST >> 20} MiB; a schema is a small JSON file")
    content = files.parse_json(data, where, SettingsError)
    if not isinstance(content, dict) or not isinstance(content.get("fields"), list) or not content["fields"]:
        raise SettingsError(
            f'{where} is no Table Schema: it has no list "fields" with a field for each column'
        )
    _check_known(content, _SCHEMA_PROPERTIES, "property", where)
    missing = content.get("missingValues", [""])
    if not isinstance(missing, list) or not all(map(_is_text, missing)):
        raise SettingsError(f'{where}: missingValues must be a list of texts, such as ["", "NA", "-999"]')
    fields: dict[str, Field] = {}
    for number, content_of_field in enumerate(content["fields"], start=1):
        field = _field(content_of_field, f"{where}, field {number}")
        if field.name in fields:
            raise SettingsError(f"{where} has two fields {field.name!r}; leave one out")
        fields[field.name] = field
    return Schema(path, f"sha256:{hashlib.sha256(data).hexdigest()}", fields, tuple(missing))


def _field(content: Any, where: str) -> Field:
    if not isinstance(content, dict) or not isinstance(content.get("name"), str) or not content["name"]:
        raise SettingsError(f'{where} must be an object with the column\'s "name" and "type"')
    name, kind, constraints = content["name"], content.get("type", ""), content.get("constraints", {})
    where = f"{where} ({printable(name)})"
    _check_known(content, _FIELD_PROPERTIES, "property", where)
    if name == "image":
        raise SettingsError(f"{where}: images are checked by check_images, not by a schema; leave it out")
    if not isinstance(kind, str) or kind not in _CONSTRAINTS:
        raise SettingsError(f"{where} is of the unknown type {kind!r}; known: {', '.join(_CONSTRAINTS)}")
    if not isinstance(constraints, dict):
        raise SettingsError(f'{where}: constraints must be an object, such as {{"minimum": 0}}')
    _check_known(constraints, _CONSTRAINTS[kind], f"constraint of a {kind}", where)
    for word, value in constraints.items():
        is_right, what = _CONSTRAINTS[kind][word]
        if not is_right(value):
            raise SettingsError(f"{where}: {word} must be {what}, not {short(value)}")
    for low, high in (("minimum", "maximum"), ("minLength", "maxLength")):
        if {low, high} <= constraints.keys() and constraints[low] > constraints[high]:
            raise SettingsError(
                f"{where}: {low} {constraints[low]} is above {high} {constraints[high]}; no value can fit"
            )
    most = content.get(MAX_MISSING, 1.0)
    if not _is_number(most) or not 0 <= most <= 1:
        raise SettingsError(f"{where}: {MAX_MISSING} must be a share, 0..1, not {short(most)}")
    return Field(name, kind, constraints, most)


def _check_known(found: Iterable[str], known: Collection[str], what: str, where: str) -> None:
    for word in found:
        if word not in known:
            raise SettingsError(
                f"{where} has {printable(word)!r}, no {what} that is checked; known: {', '.join(known)}"
            )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def whole(pattern: str) -> str:
    """Returns the pattern of a whole text."""
    return rf"\A(?:{pattern})\z"


def _is_pattern(value: Any) -> bool:
    """Returns whether RE2 reads it, whose time is bounded for any pattern and text."""
    import pyarrow as pa  # late: only patterns need it
    import pyarrow.compute as pc

    # RE2 takes a repetition that it does not know for text.
    if not isinstance(value, str) or re.search(r"(?<!\\)\{(?:,|\d*,?\d{5,})", value):
        return False
    try:
        return all(pc.match_substring_regex(pa.array([""]), form) for form in (value, whole(value)))
    except ValueError:
        return False


def _is_text(value: Any) -> bool:
    """Returns whether it is a text that UTF-8 can hold."""
    return isinstance(value, str) and value == value.encode(errors="ignore").decode()


def _is_list(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and bool(value) and all(map(is_item, value))


_NUMBERS = (_is_list(_is_number), "a list of numbers, one or more")
_TEXTS = (_is_list(_is_text), "a list of texts, one or more")
_NUMBER = (_is_number, "a number")
_LENGTH = (lambda value: type(value) is int and value >= 0, "a whole number from 0")
_PATTERN = (_is_pattern, "a regular expression of RE2 (github.com/google/re2/wiki/Syntax)")
_BASE = {"required": (lambda value: isinstance(value, bool), "true or false")}
_OF_NUMBERS = {**_BASE, "minimum": _NUMBER, "maximum": _NUMBER, "enum": _NUMBERS}
#: Constraints that each type can have: the check of a value, and its description.
_CONSTRAINTS: Mapping[str, Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    NUMBER: _OF_NUMBERS,
    INTEGER: _OF_NUMBERS,
    STRING: {**_BASE, "enum": _TEXTS, "pattern": _PATTERN, "minLength": _LENGTH, "maxLength": _LENGTH},
    BOOLEAN: _BASE,
    LIST: {**_BASE, "enum": _TEXTS},
    ANY: _BASE,
}
