"""Anomalies: what in the examples of a source does not fit its schema, looked at column by column.

Some hundred examples are looked at together, as arrays: one by one that takes longer than the whole survey.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from shardline.components.preprocess.schema.labels import NO_VALUES
from shardline.components.preprocess.schema.schema import (
    ANY,
    BOOLEAN,
    INTEGER,
    LIST,
    NUMBER,
    STRING,
    Field,
    Schema,
)
from shardline.trainer.base.errors import printable
from shardline.trainer.data.features import CLASS, LABEL, MULTILABEL, Anomaly, Feature, Label

_Mask = npt.NDArray[np.bool_]
#: What is wrong, what was expected, and of which of some values.
_Fault = tuple[str, str, _Mask]
#: Returns the values of a column in some examples: from their keys, labels and features.
_Extract = Callable[[Sequence[str], Sequence[Any], Sequence[Mapping[str, Any]]], Sequence[Any]]
#: Yields what is wrong with some values.
_Check = Callable[[Sequence[Any]], Iterator[_Fault]]

#: Problems that are no constraint of Table Schema.
ABSENT, NEW, TYPE, MISSING = "missing column", "new column", "type", "missing values"

# Values that are text and could be read as numbers: a fault of the whole column, if it has no other.
_TEXT = "text"
_TRUTHS = {"true": 1.0, "false": 0.0}
_EXPECTED = {NUMBER: "a number", INTEGER: "a whole number", BOOLEAN: "true or false", STRING: "text"}
_IN_USE = "no such field in the schema; the column is used all the same"
_LONGEST = 60


class SchemaCheck:
    """Compares examples with a schema and counts what does not fit.

    Args:
        schema, features, labels: What is expected, and what the source declares.
        column: Column of the only label, by which a schema may call it too; "" where it has none.
        integer_texts: Features of text that hold whole numbers, which may be missing.
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
        self._found: dict[tuple[str, str], Anomaly] = {}
        self._count = 0
        columns = {name: (take, kind) for name, take, kind in _columns(features, labels)}
        if LABEL in columns and LABEL not in schema.fields and column in schema.fields:
            columns[column] = columns.pop(LABEL)
        self._new = [name for name in columns if name not in schema.fields]
        columns |= {name: (columns[name][0], "name") for name in integer_texts}
        columns["key"] = (lambda keys, labels, values: keys), "name"
        self._columns = {
            name: (take, _column_check(schema.fields[name], schema, kind))
            for name, (take, kind) in columns.items()
            if name in schema.fields
        }

    def add(
        self, keys: Sequence[str], labels: Sequence[Any], values: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Looks at some examples."""
        self._count += len(keys)
        for name, (take, look) in self._columns.items():
            column = take(keys, labels, values)
            for problem, expected, mask in look(column):
                if not (count := int(np.count_nonzero(mask))):
                    continue
                known = self._found.get((name, problem))
                if not known:
                    first = int(mask.argmax())
                    value = "" if problem == MISSING else printable(repr(column[first]))[:_LONGEST]
                    known = Anomaly(name, problem, expected, 0, 0, keys[first], value)
                self._found[name, problem] = replace(known, examples=known.examples + count)

    def anomalies(self) -> tuple[Anomaly, ...]:
        """Returns what does not fit, by column in the order of the schema; columns that are new come last."""
        told = []
        for name, field in self._schema.fields.items():
            if name not in self._columns:
                told.append(Anomaly(name, ABSENT, "no such column in the source"))
            for (column, problem), one in sorted(self._found.items()):
                found = replace(one, of=self._count)
                if column != name or (problem == _TEXT and (name, TYPE) in self._found):
                    continue
                if problem == MISSING and field.constraints.get("required"):
                    found = replace(found, problem="required")
                elif problem == MISSING and found.examples > field.max_missing * self._count:
                    found = replace(found, expected=f"a value in all but {field.max_missing * 100:.4g} %")
                elif problem == MISSING:
                    continue
                told.append(replace(found, problem=TYPE) if problem == _TEXT else found)
        return (*told, *(Anomaly(name, NEW, _IN_USE) for name in self._new))


def _columns(features: Sequence[Feature], labels: Sequence[Label]) -> Iterator[tuple[str, _Extract, str]]:
    """Yields the columns of a source: name, how their values are taken, and what these are."""
    for label in labels:
        yield from _label_columns(label, several=len(labels) > 1)
    for feature in features:
        name, kind = feature.name, feature.dtype + "".join(f"[{side}]" for side in feature.shape)
        yield name, lambda _, __, values, name=name: [one[name] for one in values], kind  # type: ignore[misc]


def _label_columns(label: Label, *, several: bool) -> Iterator[tuple[str, _Extract, str]]:
    name, outputs = label.name, label.outputs

    def mine(labels: Sequence[Any]) -> Sequence[Any]:
        return [one[name] for one in labels] if several else labels

    def named(value: Any) -> list[str]:
        given = list(value)
        if all(isinstance(one, str) for one in given):
            return given
        return [output for output, there in zip(outputs, given, strict=True) if there]

    def numbers(at: int) -> _Extract:
        return lambda _, labels, __: [
            float(one[at] if hasattr(one, "__len__") else one) for one in mine(labels)
        ]

    if label.kind == CLASS:
        yield name, lambda _, labels, __: [outputs[one] for one in mine(labels)], "name"
    elif label.kind == MULTILABEL:
        yield name, lambda _, labels, __: list(map(named, mine(labels))), LIST
    else:
        for at, output in enumerate(outputs):
            yield output, numbers(at), "float32"


def _column_check(field: Field, schema: Schema, kind: str) -> _Check:
    """Returns what checks the values of a column, of a `kind` such as float32[3], "name" or "list"."""
    kind, _, width = kind.partition("[")
    if width:
        look, size = _column_check(field, schema, kind), int(width[:-1])

        def look_at_each(vectors: Sequence[Any]) -> Iterator[_Fault]:
            for problem, expected, mask in look([value for vector in vectors for value in vector]):
                wrong = np.count_nonzero(mask.reshape(-1, size), axis=1)
                yield problem, expected, wrong == size if problem == MISSING else wrong > 0

        return look_at_each
    if kind == LIST or field.type == LIST:
        return _list_check(field, kind)
    if kind in ("string", "name"):
        return _text_check(field, schema, kind)
    return _number_check(field, schema, kind)


def _list_check(field: Field, kind: str) -> _Check:
    known = frozenset(field.constraints.get("enum", ()))
    expected = f"some of {_listed(field)}"

    def look(values: Sequence[Any]) -> Iterator[_Fault]:
        if field.type not in (LIST, ANY) or kind != LIST:
            wanted = "a list of names" if field.type == LIST else _EXPECTED[field.type]
            yield TYPE, wanted, np.ones(len(values), bool)
            return
        yield MISSING, "a value", _mask(not value for value in values)
        if known:
            yield "enum", expected, _mask(not known.issuperset(value) for value in values)

    return look


def _text_check(field: Field, schema: Schema, kind: str) -> _Check:
    missing = frozenset(schema.missing)
    rules: Mapping[str, Callable[[Any], tuple[str, Callable[[str], Any]]]] = {
        "enum": lambda known: (f"one of {_listed(field)}", frozenset(known).__contains__),
        "pattern": lambda form: (f"the form {form}", re.compile(form).fullmatch),
        "minLength": lambda least: (f"{least:,} characters or more", lambda one: len(one) >= least),
        "maxLength": lambda most: (f"{most:,} characters or fewer", lambda one: len(one) <= most),
    }
    given = field.constraints if field.type == STRING else {}
    checks = [(word, *rules[word](value)) for word, value in given.items() if word in rules]
    is_number = field.type in (NUMBER, INTEGER, BOOLEAN)
    of_numbers = list(_number_rules(field, "")) if is_number else []
    words = _TRUTHS if field.type == BOOLEAN else {}

    def look(values: Sequence[str]) -> Iterator[_Fault]:
        absent = _mask(value in missing for value in values)
        if is_number:
            absent |= _mask(value.strip() in NO_VALUES for value in values)
            numbers = np.array([_number(value, words) for value in values])
            yield TYPE, _EXPECTED[field.type], ~absent & np.isnan(numbers)
            for problem, expected, is_wrong in of_numbers:
                yield problem, expected, ~absent & ~np.isnan(numbers) & is_wrong(numbers)
            if kind != "name":
                yield _TEXT, f"{_EXPECTED[field.type]}, and not as text", ~absent
        for problem, expected, is_right in checks:
            yield problem, expected, ~absent & _mask(not is_right(value) for value in values)
        yield MISSING, "a value", absent

    return look


def _number_check(field: Field, schema: Schema, kind: str) -> _Check:
    missing = np.array([number for number in map(_number, schema.missing) if not math.isnan(number)])
    checks = list(_number_rules(field, kind))

    def look(values: Sequence[float]) -> Iterator[_Fault]:
        numbers = np.asarray(values, np.int64 if kind == "int64" else np.float64)
        absent = np.isnan(numbers)
        if len(missing):
            absent |= np.isin(numbers, missing)
        for problem, expected, is_wrong in checks:
            yield problem, expected, ~absent & is_wrong(numbers)
        yield MISSING, "a value", absent

    return look


def _number_rules(field: Field, kind: str) -> Iterator[tuple[str, str, Callable[[npt.NDArray[Any]], _Mask]]]:
    """Yields problem, what is expected, and the check of an array; what is missing does not matter there."""
    if field.type == STRING:
        yield TYPE, _EXPECTED[STRING], lambda numbers: np.ones(len(numbers), bool)
        return
    if field.type == BOOLEAN:
        yield TYPE, _EXPECTED[BOOLEAN], lambda numbers: ~np.isin(numbers, (0, 1))
    if field.type == INTEGER and kind != "int64":
        yield TYPE, _EXPECTED[INTEGER], lambda numbers: (numbers != np.floor(numbers)) | np.isinf(numbers)

    # As it is and as 32 bits hold it.
    def allowed(*limits: float) -> npt.NDArray[np.float64]:
        given = np.array(limits, np.float64)
        with np.errstate(over="ignore"):
            return np.concatenate([given, given.astype(np.float32)]) if kind == "float32" else given

    if "minimum" in field.constraints:
        least = field.constraints["minimum"]
        low = allowed(least).min()
        yield "minimum", f"at least {least}", lambda numbers: numbers < low
    if "maximum" in field.constraints:
        most = field.constraints["maximum"]
        high = allowed(most).max()
        yield "maximum", f"at most {most}", lambda numbers: numbers > high
    if "enum" in field.constraints:
        known = allowed(*field.constraints["enum"])
        yield "enum", f"one of {_listed(field)}", lambda numbers: ~np.isin(numbers, known)


def _number(value: str, others: Mapping[str, float] = MappingProxyType({})) -> float:
    """Returns the number that a text is, or one of `others`, by their words; NaN where it is none."""
    with contextlib.suppress(ValueError):
        return float(value)
    return others.get(value.strip().lower(), math.nan)


def _mask(values: Iterator[Any]) -> _Mask:
    return np.fromiter(values, bool)


def _listed(field: Field) -> str:
    names = [printable(str(name)) for name in field.constraints.get("enum", ())]
    return ", ".join(names[:5]) + (f" or {len(names) - 5} more" if len(names) > 5 else "")
