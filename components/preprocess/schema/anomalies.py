"""Anomalies: examples of a source that do not fit its schema, checked column by column.

Some hundred examples are checked together, as arrays: one by one that takes longer than the whole survey.
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
#: The problem, what was expected, and a mask of the values that have it.
_Fault = tuple[str, str, _Mask]
#: Returns the values of a column in some examples: from their keys, labels and features.
_Extract = Callable[[Sequence[str], Sequence[Any], Sequence[Mapping[str, Any]]], Sequence[Any]]
#: Yields the problems of some values.
_Check = Callable[[Sequence[Any]], Iterator[_Fault]]

#: Problems other than constraints of Table Schema.
ABSENT, NEW, TYPE, MISSING = "missing column", "new column", "type", "missing values"

# Text that could be read as numbers: a problem of the whole column, reported if it has no other.
_TEXT = "text"
_TRUTHS = {"true": 1.0, "false": 0.0}
_EXPECTED = {NUMBER: "a number", INTEGER: "a whole number", BOOLEAN: "true or false", STRING: "text"}
_IN_USE = "no such field in the schema; the column is used all the same"
_LONGEST = 60


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
        columns["key"] = (lambda keys, labels, values: keys), "name"
        self._columns = {
            name: (take, _column_check(schema.fields[name], schema, kind))
            for name, (take, kind) in columns.items()
            if name in schema.fields
        }

    def add(self, keys: Sequence[str], labels: Sequence[Any], values: Sequence[Mapping[str, Any]]) -> None:
        """Checks some examples."""
        self._count += len(keys)
        for name, (take, check) in self._columns.items():
            column = take(keys, labels, values)
            for problem, expected, mask in check(column):
                if not (count := int(np.count_nonzero(mask))):
                    continue
                known = self._anomalies.get((name, problem))
                if not known:
                    first = int(mask.argmax())
                    value = "" if problem == MISSING else printable(repr(column[first]))[:_LONGEST]
                    known = Anomaly(name, problem, expected, 0, 0, keys[first], value)
                self._anomalies[name, problem] = replace(known, examples=known.examples + count)

    def anomalies(self) -> tuple[Anomaly, ...]:
        """Returns the anomalies, by column in the order of the schema; new columns come last."""
        result = []
        for name, field in self._schema.fields.items():
            if name not in self._columns:
                result.append(Anomaly(name, ABSENT, "no such column in the source"))
            for (column, problem), anomaly in sorted(self._anomalies.items()):
                found = replace(anomaly, of=self._count)
                if column != name or (problem == _TEXT and (name, TYPE) in self._anomalies):
                    continue
                if problem == MISSING and field.constraints.get("required"):
                    found = replace(found, problem="required")
                elif problem == MISSING and found.examples > field.max_missing * self._count:
                    found = replace(found, expected=f"a value in all but {field.max_missing * 100:.4g} %")
                elif problem == MISSING:
                    continue
                result.append(replace(found, problem=TYPE) if problem == _TEXT else found)
        return (*result, *(Anomaly(name, NEW, _IN_USE) for name in self._new))


def _columns(features: Sequence[Feature], labels: Sequence[Label]) -> Iterator[tuple[str, _Extract, str]]:
    for label in labels:
        yield from _label_columns(label, is_multiple=len(labels) > 1)
    for feature in features:
        name, kind = feature.name, feature.dtype + "".join(f"[{side}]" for side in feature.shape)
        yield name, lambda _, __, values, name=name: [example[name] for example in values], kind  # type: ignore[misc]


def _label_columns(label: Label, *, is_multiple: bool) -> Iterator[tuple[str, _Extract, str]]:
    name, outputs = label.name, label.outputs

    def own_values(labels: Sequence[Any]) -> Sequence[Any]:
        return [values[name] for values in labels] if is_multiple else labels

    def named(value: Any) -> list[str]:
        names = list(value)
        if all(isinstance(name, str) for name in names):
            return names
        return [output for output, has in zip(outputs, names, strict=True) if has]

    def numbers(index: int) -> _Extract:
        return lambda _, labels, __: [
            float(value[index] if hasattr(value, "__len__") else value) for value in own_values(labels)
        ]

    if label.kind == CLASS:
        yield name, lambda _, labels, __: [outputs[index] for index in own_values(labels)], "name"
    elif label.kind == MULTILABEL:
        yield name, lambda _, labels, __: list(map(named, own_values(labels))), LIST
    else:
        for index, output in enumerate(outputs):
            yield output, numbers(index), "float32"


def _column_check(field: Field, schema: Schema, kind: str) -> _Check:
    """Returns the check of a column's values, of a `kind` such as float32[3], "name" or "list"."""
    kind, _, width = kind.partition("[")
    if width:
        check, size = _column_check(field, schema, kind), int(width[:-1])

        def check_vectors(vectors: Sequence[Any]) -> Iterator[_Fault]:
            for problem, expected, mask in check([value for vector in vectors for value in vector]):
                wrong = np.count_nonzero(mask.reshape(-1, size), axis=1)
                yield problem, expected, wrong == size if problem == MISSING else wrong > 0

        return check_vectors
    if kind == LIST or field.type == LIST:
        return _list_check(field, kind)
    if kind in ("string", "name"):
        return _text_check(field, schema, kind)
    return _number_check(field, schema, kind)


def _list_check(field: Field, kind: str) -> _Check:
    known = frozenset(field.constraints.get("enum", ()))
    expected = f"some of {_listed(field)}"

    def check(values: Sequence[Any]) -> Iterator[_Fault]:
        if field.type not in (LIST, ANY) or kind != LIST:
            wanted = "a list of names" if field.type == LIST else _EXPECTED[field.type]
            yield TYPE, wanted, np.ones(len(values), bool)
            return
        yield MISSING, "a value", _mask(not value for value in values)
        if known:
            yield "enum", expected, _mask(not known.issuperset(value) for value in values)

    return check


def _text_check(field: Field, schema: Schema, kind: str) -> _Check:
    missing = frozenset(schema.missing)
    rules: Mapping[str, Callable[[Any], tuple[str, Callable[[str], Any]]]] = {
        "enum": lambda known: (f"one of {_listed(field)}", frozenset(known).__contains__),
        "pattern": lambda form: (f"the form {form}", re.compile(form).fullmatch),
        "minLength": lambda least: (f"{least:,} characters or more", lambda one: len(one) >= least),
        "maxLength": lambda most: (f"{most:,} characters or fewer", lambda one: len(one) <= most),
    }
    constraints = field.constraints if field.type == STRING else {}
    checks = [(word, *rules[word](value)) for word, value in constraints.items() if word in rules]
    is_number = field.type in (NUMBER, INTEGER, BOOLEAN)
    number_rules = list(_number_rules(field, "")) if is_number else []
    names = _TRUTHS if field.type == BOOLEAN else {}

    def check(values: Sequence[str]) -> Iterator[_Fault]:
        absent = _mask(value in missing for value in values)
        if is_number:
            absent |= _mask(value.strip() in NO_VALUES for value in values)
            numbers = np.array([_number(value, names) for value in values])
            yield TYPE, _EXPECTED[field.type], ~absent & np.isnan(numbers)
            for problem, expected, is_wrong in number_rules:
                yield problem, expected, ~absent & ~np.isnan(numbers) & is_wrong(numbers)
            if kind != "name":
                yield _TEXT, f"{_EXPECTED[field.type]}, and not as text", ~absent
        for problem, expected, is_right in checks:
            yield problem, expected, ~absent & _mask(not is_right(value) for value in values)
        yield MISSING, "a value", absent

    return check


def _number_check(field: Field, schema: Schema, kind: str) -> _Check:
    missing = np.array([number for number in map(_number, schema.missing) if not math.isnan(number)])
    checks = list(_number_rules(field, kind))

    def check(values: Sequence[float]) -> Iterator[_Fault]:
        numbers = np.asarray(values, np.int64 if kind == "int64" else np.float64)
        absent = np.isnan(numbers)
        if len(missing):
            absent |= np.isin(numbers, missing)
        for problem, expected, is_wrong in checks:
            yield problem, expected, ~absent & is_wrong(numbers)
        yield MISSING, "a value", absent

    return check


def _number_rules(field: Field, kind: str) -> Iterator[tuple[str, str, Callable[[npt.NDArray[Any]], _Mask]]]:
    """Yields the problem, what is expected, and the check of an array; its missing values are ignored."""
    if field.type == STRING:
        yield TYPE, _EXPECTED[STRING], lambda numbers: np.ones(len(numbers), bool)
        return
    if field.type == BOOLEAN:
        yield TYPE, _EXPECTED[BOOLEAN], lambda numbers: ~np.isin(numbers, (0, 1))
    if field.type == INTEGER and kind != "int64":
        yield TYPE, _EXPECTED[INTEGER], lambda numbers: (numbers != np.floor(numbers)) | np.isinf(numbers)

    # The limits as written and as rounded to 32 bits.
    def allowed(*limits: float) -> npt.NDArray[np.float64]:
        exact = np.array(limits, np.float64)
        with np.errstate(over="ignore"):
            return np.concatenate([exact, exact.astype(np.float32)]) if kind == "float32" else exact

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
    """Returns the number that a text is, or its value in `others`; NaN if it has none."""
    with contextlib.suppress(ValueError):
        return float(value)
    return others.get(value.strip().lower(), math.nan)


def _mask(values: Iterator[Any]) -> _Mask:
    return np.fromiter(values, bool)


def _listed(field: Field) -> str:
    names = [printable(str(name)) for name in field.constraints.get("enum", ())]
    return ", ".join(names[:5]) + (f" or {len(names) - 5} more" if len(names) > 5 else "")
