"""Schema of a dataset's values, in the format of Frictionless' Table Schema: reading and drafting.

It refuses the parts of Table Schema that are not checked here: an ignored constraint would be taken for one
that holds.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardline.components.preprocess.schema.labels import MOST_CLASSES, SHARE
from shardline.components.storage import remote_files
from shardline.trainer.base import files
from shardline.trainer.base.errors import SettingsError, printable
from shardline.trainer.data.features import CLASS, REGRESSION

if TYPE_CHECKING:
    from shardline.components.preprocess.inspect.profile import Numbers, Profile
    from shardline.trainer.data.manifest import Manifest

ANY, NUMBER, INTEGER, STRING, BOOLEAN, LIST = "any", "number", "integer", "string", "boolean", "list"

#: Types as in the setting `columns`.
TYPES: Mapping[str, str] = {STRING: "text", INTEGER: "integer", NUMBER: "number"}

#: Shardline's own property of a field: the largest share of examples without a value.
MAX_MISSING = "shardline:maxMissing"

#: Constraints that each type can have.
_NUMBER_CONSTRAINTS = ("required", "minimum", "maximum", "enum")
CONSTRAINTS: Mapping[str, tuple[str, ...]] = {
    NUMBER: _NUMBER_CONSTRAINTS,
    INTEGER: _NUMBER_CONSTRAINTS,
    STRING: ("required", "enum", "pattern", "minLength", "maxLength"),
    BOOLEAN: ("required",),
    LIST: ("required", "enum"),
    ANY: ("required",),
}

#: Most bytes of a file.
_LARGEST = 16 << 20

#: Share of the range of the numbers by which a drafted range is wider at each end.
_WIDER = 0.1

# Significant digits of a limit, relative to the range; of a constant number, to itself.
_DIGITS, _DIGITS_OF_ONE = 2, 6

# Properties that are only documentation.
_NOTES = ("title", "description", "example")
_SCHEMA_PROPERTIES = ("fields", "missingValues", "$schema", "name", *_NOTES)
_FIELD_PROPERTIES = ("name", "type", "constraints", MAX_MISSING, *_NOTES)


@dataclass(frozen=True)
class Field:
    """Type and constraints of the values of a column.

    Attributes:
        name: Name of a feature, of a label, or "key".
        type: One of those in `CONSTRAINTS`.
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
    resolved = remote_files.resolve(path)
    with remote_files.as_source_error(resolved), remote_files.open_read(resolved) as file:
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
    if not isinstance(missing, list) or not all(isinstance(value, str) for value in missing):
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
    if not isinstance(kind, str) or kind not in CONSTRAINTS:
        raise SettingsError(f"{where} is of the unknown type {kind!r}; known: {', '.join(CONSTRAINTS)}")
    if not isinstance(constraints, dict):
        raise SettingsError(f'{where}: constraints must be an object, such as {{"minimum": 0}}')
    _check_known(constraints, CONSTRAINTS[kind], f"constraint of a {kind}", where)
    for word, value in constraints.items():
        is_right, what = _FORMS[kind if word == "enum" else word]
        if not is_right(value):
            raise SettingsError(f"{where}: {word} must be {what}, not {printable(repr(value))[:60]}")
    for low, high in (("minimum", "maximum"), ("minLength", "maxLength")):
        if {low, high} <= constraints.keys() and constraints[low] > constraints[high]:
            raise SettingsError(
                f"{where}: {low} {constraints[low]} is above {high} {constraints[high]}; no value can fit"
            )
    most = content.get(MAX_MISSING, 1.0)
    if not _is_number(most) or not 0 <= most <= 1:
        raise SettingsError(f"{where}: {MAX_MISSING} must be a share, 0..1, not {printable(repr(most))[:60]}")
    return Field(name, kind, constraints, most)


def _check_known(found: Iterable[str], known: tuple[str, ...], what: str, where: str) -> None:
    for word in found:
        if word not in known:
            raise SettingsError(
                f"{where} has {printable(word)!r}, no {what} that is checked; known: {', '.join(known)}"
            )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_pattern(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(re.compile(value))
    except re.error:
        return False


def _is_list(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, list) and bool(value) and all(type(item) in kinds for item in value)
    )


_NUMBERS = (_is_list(int, float), "a list of numbers, one or more")
_TEXTS = (_is_list(str), "a list of texts, one or more")
_LENGTH = (lambda value: type(value) is int and value >= 0, "a whole number from 0")
#: Check of a constraint's value, and its description; for an enum, by the type of the field.
_FORMS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "required": (lambda value: isinstance(value, bool), "true or false"),
    "minimum": (_is_number, "a number"),
    "maximum": (_is_number, "a number"),
    "pattern": (_is_pattern, "a regular expression"),
    "minLength": _LENGTH,
    "maxLength": _LENGTH,
    NUMBER: _NUMBERS,
    INTEGER: _NUMBERS,
    STRING: _TEXTS,
    LIST: _TEXTS,
}


def draft(manifest: Manifest, found: Profile) -> dict[str, Any]:
    """Returns a Table Schema of a dataset, labels first.

    Numbers get a range that is wider by a tenth than theirs at each end. A text of few different values (at
    most 50, and one for each ten examples) gets an enum of them. A column is required if every example has
    it; otherwise twice the share that lacks it is allowed.
    """
    from shardline.components.preprocess.inspect.profile import LONGEST_VALUE, number_names

    numbers = found.numbers
    fields: list[dict[str, Any]] = []
    for label in manifest.labels:
        if label.kind == REGRESSION:
            names = number_names(label).items()
            fields += [_number_field(output, numbers[name], whole=False) for output, name in names]
        else:
            kind = STRING if label.kind == CLASS else LIST
            fields.append({"name": label.name, "type": kind, "constraints": {"enum": list(label.outputs)}})
    for feature in manifest.columns:
        if lengths := numbers.get(f"{feature.name} length") if feature.dtype == "string" else None:
            counts = found.categories[feature.name].counts if feature.name in found.categories else {}
            values = sorted(filter(None, counts))
            short = lengths.spread is not None and lengths.spread.largest <= LONGEST_VALUE
            few = short and 0 < len(values) <= min(MOST_CLASSES, SHARE * lengths.examples)
            constraints = {"enum": values} if few else {}
            fields.append(_draft_field(feature.name, STRING, constraints, lengths.zeros / lengths.examples))
        elif feature.name in numbers:
            fields.append(_number_field(feature.name, numbers[feature.name], whole=feature.dtype == "int64"))
    origin = f"Drafted from {manifest.records:,} examples of {manifest.source}; edit what they do not show."
    return {"description": origin, "fields": fields, "missingValues": [""]}


def _number_field(name: str, column: Numbers, *, whole: bool) -> dict[str, Any]:
    constraints: dict[str, Any] = {}
    if column.spread:
        low, high = _widened(column.spread.least, column.spread.largest, whole=whole)
        constraints |= {"minimum": low, "maximum": high}
    return _draft_field(name, INTEGER if whole else NUMBER, constraints, column.missing / column.examples)


def _draft_field(name: str, kind: str, constraints: dict[str, Any], missing: float) -> dict[str, Any]:
    if not missing:
        return {"name": name, "type": kind, "constraints": {"required": True, **constraints}}
    allowed = math.ceil(200 * missing) / 100
    share = {MAX_MISSING: allowed} if allowed < 1 else {}
    return {"name": name, "type": kind, "constraints": constraints, **share}


def _widened(least: float, largest: float, *, whole: bool) -> tuple[float, float]:
    low: float
    high: float
    margin = _WIDER * (largest - least)
    if whole:
        low, high = int(least) - math.floor(margin), int(largest) + math.floor(margin)
    else:
        unit = largest - least or abs(least) or 1.0
        decimals = (_DIGITS if margin else _DIGITS_OF_ONE) - math.floor(math.log10(unit))
        low, high = (round(limit * 10.0**decimals, 6) for limit in (least - margin, largest + margin))
        low, high = (
            round(limit / 10.0**decimals, max(decimals, 0)) for limit in (math.floor(low), math.ceil(high))
        )
    limits = (max(low, 0) if least >= 0 else low), (min(high, 0) if largest <= 0 else high)
    low, high = (int(limit) if limit == int(limit) else limit for limit in limits)
    return low, high
