"""Schema of a dataset's values, in the format of Frictionless' Table Schema, and examples that do not fit it.

It refuses the parts of Table Schema that are not checked here: an ignored constraint would be taken for one
that holds. Examples are checked column by column, as Arrow has them.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from shardline.components.preprocess.lazy import np, pa, pc
from shardline.components.storage import as_source_error, open_read, resolve
from shardline.trainer.base import files
from shardline.trainer.base.deserialize import Natural, Rule, Text, Within, check_keys, convert
from shardline.trainer.base.errors import SettingsError, error_prefix, printable, short
from shardline.trainer.manifest import CLASS, LABEL, MULTILABEL, Anomaly, Feature, Label

if TYPE_CHECKING:
    import numpy.typing as npt

    _Mask = npt.NDArray[np.bool_]
    #: The problem, what was expected, and a mask of the values that have it.
    _Fault = tuple[str, str, _Mask]
    #: Yields the problems of some values of a column.
    _Check = Callable[[Any], Iterator[_Fault]]
    #: Returns a schema's column of examples from those that are stored.
    _Take = Callable[[Mapping[str, Any]], Any]

_ANY, _NUMBER, _INTEGER, _STRING, _BOOLEAN, _LIST = "any", "number", "integer", "string", "boolean", "list"

# Types as in the setting `columns`.
_TYPES: Mapping[str, str] = {_STRING: "text", _INTEGER: "integer", _NUMBER: "number"}

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

# Problems other than constraints of Table Schema.
_ABSENT, _NEW, _TYPE, _MISSING = "missing column", "new column", "type", "missing values"

# Text that could be read as numbers: a problem of the whole column, reported if it has no other.
_TEXT = "text"
_TRUTHS = {"true": 1.0, "false": 0.0}
_EXPECTED = {_NUMBER: "a number", _INTEGER: "a whole number", _BOOLEAN: "true or false", _STRING: "text"}
_EXPECTED[_LIST] = "a list of names"
_IN_USE = "no such field in the schema; the column is used all the same"


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

    @property
    def column_types(self) -> dict[str, str]:
        """Types of fields as in the setting `columns`, of those that it can have."""
        return {name: _TYPES[field.type] for name, field in self.fields.items() if field.type in _TYPES}


def read_schema(path: str) -> Schema:
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


def _whole(pattern: str) -> str:
    """Returns the pattern of a whole text."""
    return rf"\A(?:{pattern})\z"


def _is_pattern(value: str) -> bool:
    """Returns whether RE2 reads it, whose time is bounded for any pattern and text."""
    # RE2 takes a repetition that it does not know for text.
    if re.search(r"(?<!\\)\{(?:,|\d*,?\d{5,})", value):
        return False
    try:
        return all(pc.match_substring_regex(pa.array([""]), form) for form in (value, _whole(value)))
    except ValueError:
        return False


_SOME = Rule("a list of one or more", bool)
_PATTERN = Rule("a regular expression of RE2 (github.com/google/re2/wiki/Syntax)", _is_pattern)
_BASE = {"required": bool}
_OF_NUMBERS = {**_BASE, "minimum": float, "maximum": float, "enum": Annotated[tuple[float, ...], _SOME]}
_OF_TEXTS = {**_BASE, "enum": Annotated[tuple[Text, ...], _SOME]}
#: Constraints that each type can have, and the types of their values.
_CONSTRAINTS: Mapping[str, Mapping[str, Any]] = {
    _NUMBER: _OF_NUMBERS,
    _INTEGER: _OF_NUMBERS,
    _STRING: {**_OF_TEXTS, "pattern": Annotated[str, _PATTERN], "minLength": Natural, "maxLength": Natural},
    _BOOLEAN: _BASE,
    _LIST: _OF_TEXTS,
    _ANY: _BASE,
}


class SchemaCheck:
    """Compares examples with a schema and counts what does not fit.

    Args:
        schema, features, labels: The expected schema, and what the source declares.
        column: Column of the only label, whose name a schema may use for it; "" for none.
        integer_texts: Text features that hold whole numbers, which may be missing.
    """

    def __init__(
        self,
        schema: Schema,
        features: Sequence[Feature],
        labels: Sequence[Label],
        column: str = "",
        integer_texts: Collection[str] = (),
    ) -> None:
        self._schema = schema
        self._anomalies: dict[tuple[str, str], Anomaly] = {}
        self._count = 0
        columns = {name: (take, kind) for name, take, kind in _columns(features, labels)}
        if LABEL in columns and LABEL not in schema.fields and column in schema.fields:
            columns[column] = columns.pop(LABEL)
        self._new = [name for name in columns if name not in schema.fields]
        columns |= {name: (columns[name][0], "name") for name in integer_texts}
        columns["key"] = (lambda stored: stored["key"]), "name"
        self._columns = {
            name: (take, _column_check(schema.fields[name], schema, kind))
            for name, (take, kind) in columns.items()
            if name in schema.fields
        }

    def add(self, keys: Sequence[str], columns: Mapping[str, Any]) -> None:
        """Checks some examples: their keys, and targets and features by name as they are stored."""
        self._count += len(keys)
        if "key" in self._columns:
            # A name of a file that is not UTF-8 has lone surrogates.
            texts = [key.encode("utf-8", "replace").decode() for key in keys]
            columns = {**columns, "key": pa.array(texts, pa.string())}
        for name, (take, check) in self._columns.items():
            values = take(columns)
            for problem, expected, mask in check(values):
                if count := int(np.count_nonzero(mask)):
                    first = int(mask.argmax())
                    value = "" if problem == _MISSING else short(values[first].as_py())
                    self._record(Anomaly(name, problem, expected, count, 0, keys[first], value))

    def found(self) -> list[Any]:
        """Returns what was found so far, as JSON can hold it."""
        return [self._count, *map(astuple, self._anomalies.values())]

    def merge(self, found: Sequence[Any]) -> None:
        """Adds what another check `found` in later examples."""
        self._count += found[0]
        for values in found[1:]:
            self._record(Anomaly(*values))

    def _record(self, anomaly: Anomaly) -> None:
        name = anomaly.column, anomaly.problem
        if known := self._anomalies.get(name):
            anomaly = replace(known, examples=known.examples + anomaly.examples)
        self._anomalies[name] = anomaly

    def anomalies(self) -> tuple[Anomaly, ...]:
        """Returns the anomalies, by column in the order of the schema; new columns come last."""
        result = []
        for name, field in self._schema.fields.items():
            if name not in self._columns:
                result.append(Anomaly(name, _ABSENT, "no such column in the source"))
            for (column, problem), anomaly in sorted(self._anomalies.items()):
                found = replace(anomaly, of=self._count)
                if column != name or (problem == _TEXT and (name, _TYPE) in self._anomalies):
                    continue
                if problem == _MISSING and field.constraints.get("required"):
                    found = replace(found, problem="required")
                elif problem == _MISSING and found.examples > field.max_missing * self._count:
                    found = replace(found, expected=f"a value in all but {field.max_missing * 100:.4g} %")
                elif problem == _MISSING:
                    continue
                result.append(replace(found, problem=_TYPE) if problem == _TEXT else found)
        return (*result, *(Anomaly(name, _NEW, _IN_USE) for name in self._new))


def _columns(features: Sequence[Feature], labels: Sequence[Label]) -> Iterator[tuple[str, _Take, str]]:
    """Yields the columns by their names in a schema, with their kinds: float32[3], "name", "list"."""
    for label in labels:
        if label.kind == CLASS:
            yield label.name, partial(_class_names, label), "name"
        elif label.kind == MULTILABEL:
            yield label.name, partial(_name_lists, label), _LIST
        else:
            for index, output in enumerate(label.outputs):
                yield output, partial(_numbers_at, label.name, index), "float32"
    for feature in features:
        name, kind = feature.name, feature.dtype + "".join(f"[{side}]" for side in feature.shape)
        yield name, lambda stored, name=name: stored[name], kind  # type: ignore[misc]


def _class_names(label: Label, stored: Mapping[str, Any]) -> Any:
    return pa.array(label.outputs, pa.string()).take(stored[label.name])


def _name_lists(label: Label, stored: Mapping[str, Any]) -> Any:
    flags = stored[label.name].flatten().to_numpy().reshape(-1, len(label.outputs)) != 0
    ends = np.cumsum(np.count_nonzero(flags, axis=1))
    names = pa.array(label.outputs, pa.string()).take(pa.array(flags.nonzero()[1]))
    return pa.ListArray.from_arrays(pa.array([0, *ends], pa.int32()), names)


def _numbers_at(name: str, index: int, stored: Mapping[str, Any]) -> Any:
    values = stored[name]
    return pc.list_element(values, index) if pa.types.is_fixed_size_list(values.type) else values


def _column_check(field: Field, schema: Schema, kind: str) -> _Check:
    """Returns the check of a column's values, of a `kind` as `_columns` has it."""
    kind, _, width = kind.partition("[")
    if width:
        return partial(_vector_faults, _column_check(field, schema, kind), int(width[:-1]))
    is_list = kind == _LIST
    if is_list != (field.type == _LIST) and (field.type != _ANY):
        return lambda values: iter([(_TYPE, _EXPECTED[field.type], np.ones(len(values), bool))])
    if is_list:
        return partial(_list_faults, field)
    if kind in ("string", "name") and field.type in (_STRING, _ANY):
        return partial(_text_faults, field, schema.missing)
    return partial(_number_faults, field, schema, kind)


def _vector_faults(check: _Check, size: int, vectors: Any) -> Iterator[_Fault]:
    for problem, expected, mask in check(vectors.flatten()):
        wrong = np.count_nonzero(mask.reshape(-1, size), axis=1)
        yield problem, expected, wrong == size if problem == _MISSING else wrong > 0


def _list_faults(field: Field, values: Any) -> Iterator[_Fault]:
    yield _MISSING, "a value", pc.list_value_length(values).to_numpy() == 0
    if "enum" in field.constraints:
        mask = np.zeros(len(values), bool)
        unknown = ~_is_in(values.flatten(), field.constraints["enum"])
        mask[pc.list_parent_indices(values).to_numpy()[unknown]] = True
        yield "enum", f"some of {_listed(field)}", mask


def _text_faults(field: Field, missing: Sequence[str], values: Any) -> Iterator[_Fault]:
    absent, lengths = _is_in(values, missing), pc.utf8_length(values).to_numpy()
    for word, limit in field.constraints.items():
        if word == "enum":
            yield word, f"one of {_listed(field)}", ~absent & ~_is_in(values, limit)
        elif word == "pattern":
            fits = pc.match_substring_regex(values, _whole(limit)).to_numpy(zero_copy_only=False)
            yield word, f"the form {limit}", ~absent & ~fits
        elif word == "minLength":
            yield word, f"{limit:,} characters or more", ~absent & (lengths < limit)
        elif word == "maxLength":
            yield word, f"{limit:,} characters or fewer", ~absent & (lengths > limit)
    yield _MISSING, "a value", absent


def _number_faults(field: Field, schema: Schema, kind: str, values: Any) -> Iterator[_Fault]:
    """Yields the problems of numbers, or of texts that should be numbers."""
    if is_text := kind in ("string", "name"):
        none = [*schema.missing, *NO_VALUES]
        absent = _is_in(values, none) | _is_in(pc.utf8_trim_whitespace(values), none)
        names, distinct = _TRUTHS if field.type == _BOOLEAN else {}, values.dictionary_encode()
        found = np.array([_number(text, names) for text in distinct.dictionary.to_pylist()], np.float64)
        numbers = found[distinct.indices.to_numpy()]
        yield _TYPE, _EXPECTED[field.type], ~absent & np.isnan(numbers)
    else:
        numbers = values.to_numpy()
        absent = np.isnan(numbers) | np.isin(numbers, list(map(_number, schema.missing)))
    for problem, expected, mask in _limit_faults(field, "" if is_text else kind, numbers):
        yield problem, expected, ~absent & ~np.isnan(numbers) & mask
    if kind == "string":
        yield _TEXT, f"{_EXPECTED[field.type]}, and not as text", ~absent
    yield _MISSING, "a value", absent


def _limit_faults(field: Field, kind: str, numbers: npt.NDArray[Any]) -> Iterator[_Fault]:
    """Yields the problems of numbers; of those of missing values, which are ignored, too."""

    # The limits as written and as rounded to 32 bits.
    def allowed(*limits: float) -> npt.NDArray[np.float64]:
        exact = np.array(limits, np.float64)
        with np.errstate(over="ignore"):
            return np.concatenate([exact, exact.astype(np.float32)]) if kind == "float32" else exact

    if field.type == _STRING:
        yield _TYPE, _EXPECTED[_STRING], np.ones(len(numbers), bool)
        return
    if field.type == _BOOLEAN:
        yield _TYPE, _EXPECTED[_BOOLEAN], ~np.isin(numbers, (0, 1))
    if field.type == _INTEGER and kind != "int64":
        yield _TYPE, _EXPECTED[_INTEGER], (numbers != np.floor(numbers)) | np.isinf(numbers)
    for word, limit in field.constraints.items():
        if word == "minimum":
            yield word, f"at least {limit}", numbers < allowed(limit).min()
        elif word == "maximum":
            yield word, f"at most {limit}", numbers > allowed(limit).max()
        elif word == "enum":
            yield word, f"one of {_listed(field)}", ~np.isin(numbers, allowed(*limit))


def _number(value: str, others: Mapping[str, float] = {}) -> float:
    """Returns the number that a text is, or its value in `others`; NaN if it has none."""
    with contextlib.suppress(ValueError):
        return float(value)
    return others.get(value.strip().lower(), math.nan)


def _is_in(values: Any, known: Any) -> _Mask:
    mask: _Mask = pc.is_in(values, value_set=pa.array(known, pa.string())).to_numpy(zero_copy_only=False)
    return mask


def _listed(field: Field) -> str:
    names = [printable(str(name)) for name in field.constraints.get("enum", ())]
    return ", ".join(names[:5]) + (f" or {len(names) - 5} more" if len(names) > 5 else "")
