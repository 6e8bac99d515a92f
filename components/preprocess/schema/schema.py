"""Schema of a dataset's values, in the format of Frictionless' Table Schema.

It refuses the parts of Table Schema that are not checked here: an ignored constraint would be taken for one
that holds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from shardline.components.storage import as_source_error, open_read, resolve
from shardline.trainer.base import files
from shardline.trainer.base.deserialize import Natural, Rule, Text, Within, check_keys, convert
from shardline.trainer.base.errors import SettingsError, error_prefix, printable

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
    with error_prefix(f"{where}: "):
        check_keys(content, _SCHEMA_PROPERTIES)
        missing = convert(tuple[Text, ...], content.get("missingValues", [""]), "missingValues")
    fields: dict[str, Field] = {}
    for number, content_of_field in enumerate(content["fields"], start=1):
        field = _field(content_of_field, f"{where}, field {number}")
        if field.name in fields:
            raise SettingsError(f"{where} has two fields {field.name!r}; leave one out")
        fields[field.name] = field
    return Schema(path, f"sha256:{hashlib.sha256(data).hexdigest()}", fields, missing)


def _field(content: Any, where: str) -> Field:
    if not isinstance(content, dict) or not isinstance(content.get("name"), str) or not content["name"]:
        raise SettingsError(f'{where} must be an object with the column\'s "name" and "type"')
    name, constraints = content["name"], content.get("constraints", {})
    with error_prefix(f"{where} ({printable(name)}): "):
        check_keys(content, _FIELD_PROPERTIES)
        if name == "image":
            raise SettingsError("images are checked by check_images, not by a schema; leave it out")
        kind = convert(Literal[*_CONSTRAINTS], content.get("type", ""), "type")
        convert(Mapping[str, Any], constraints, "constraints")
        check_keys(constraints, _CONSTRAINTS[kind], "constraints.")
        for word, value in constraints.items():
            convert(_CONSTRAINTS[kind][word], value, f"constraints.{word}")
        for low, high in (("minimum", "maximum"), ("minLength", "maxLength")):
            if {low, high} <= constraints.keys() and constraints[low] > constraints[high]:
                raise SettingsError(
                    f"{low} {constraints[low]} is above {high} {constraints[high]}; no value can fit"
                )
        most = convert(Annotated[float, Within(0, 1)], content.get(MAX_MISSING, 1.0), MAX_MISSING)
    return Field(name, kind, constraints, most)


def whole(pattern: str) -> str:
    """Returns the pattern of a whole text."""
    return rf"\A(?:{pattern})\z"


def _is_pattern(value: str) -> bool:
    """Returns whether RE2 reads it, whose time is bounded for any pattern and text."""
    import pyarrow as pa  # late: only patterns need it
    import pyarrow.compute as pc

    # RE2 takes a repetition that it does not know for text.
    if re.search(r"(?<!\\)\{(?:,|\d*,?\d{5,})", value):
        return False
    try:
        return all(pc.match_substring_regex(pa.array([""]), form) for form in (value, whole(value)))
    except ValueError:
        return False


_SOME = Rule("a list of one or more", bool)
_PATTERN = Rule("a regular expression of RE2 (github.com/google/re2/wiki/Syntax)", _is_pattern)
_BASE = {"required": bool}
_OF_NUMBERS = {**_BASE, "minimum": float, "maximum": float, "enum": Annotated[tuple[float, ...], _SOME]}
_OF_TEXTS = {**_BASE, "enum": Annotated[tuple[Text, ...], _SOME]}
#: Constraints that each type can have, and the types of their values.
_CONSTRAINTS: Mapping[str, Mapping[str, Any]] = {
    NUMBER: _OF_NUMBERS,
    INTEGER: _OF_NUMBERS,
    STRING: {**_OF_TEXTS, "pattern": Annotated[str, _PATTERN], "minLength": Natural, "maxLength": Natural},
    BOOLEAN: _BASE,
    LIST: _OF_TEXTS,
    ANY: _BASE,
}
