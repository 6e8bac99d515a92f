"""Anomalies: examples of a source that do not fit its schema, checked column by column, as Arrow has them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from shardline.components.preprocess.schema.schema import (
    ANY,
    BOOLEAN,
    INTEGER,
    LIST,
    NO_VALUES,
    NUMBER,
    STRING,
    Field,
    Schema,
    whole,
)
from shardline.trainer.base.errors import printable, short
from shardline.trainer.manifest import CLASS, LABEL, MULTILABEL, Anomaly, Feature, Label

_Mask = npt.NDArray[np.bool_]
#: The problem, what was expected, and a mask of the values that have it.
_Fault = tuple[str, str, _Mask]
#: Yields the problems of some values of a column.
_Check = Callable[[Any], Iterator[_Fault]]
#: Returns a schema's column of examples from those that are stored.
_Take = Callable[[Mapping[str, Any]], Any]

#: Problems other than constraints of Table Schema.
ABSENT, NEW, TYPE, MISSING = "missing column", "new column", "type", "missing values"

# Text that could be read as numbers: a problem of the whole column, reported if it has no other.
_TEXT = "text"
_TRUTHS = {"true": 1.0, "false": 0.0}
_EXPECTED = {NUMBER: "a number", INTEGER: "a whole number", BOOLEAN: "true or false", STRING: "text"}
_EXPECTED[LIST] = "a list of names"
_IN_USE = "no such field in the schema; the column is used all the same"


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
        import pyarrow as pa

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
                    value = "" if problem == MISSING else short(values[first].as_py())
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


def _columns(features: Sequence[Feature], labels: Sequence[Label]) -> Iterator[tuple[str, _Take, str]]:
    """Yields the columns by their names in a schema, with their kinds: float32[3], "name", "list"."""
    for label in labels:
        if label.kind == CLASS:
            yield label.name, partial(_class_names, label), "name"
        elif label.kind == MULTILABEL:
            yield label.name, partial(_name_lists, label), LIST
        else:
            for index, output in enumerate(label.outputs):
                yield output, partial(_numbers_at, label.name, index), "float32"
    for feature in features:
        name, kind = feature.name, feature.dtype + "".join(f"[{side}]" for side in feature.shape)
        yield name, lambda stored, name=name: stored[name], kind  # type: ignore[misc]


def _class_names(label: Label, stored: Mapping[str, Any]) -> Any:
    import pyarrow as pa

    return pa.array(label.outputs, pa.string()).take(stored[label.name])


def _name_lists(label: Label, stored: Mapping[str, Any]) -> Any:
    import pyarrow as pa

    flags = stored[label.name].flatten().to_numpy().reshape(-1, len(label.outputs)) != 0
    ends = np.cumsum(np.count_nonzero(flags, axis=1))
    names = pa.array(label.outputs, pa.string()).take(pa.array(flags.nonzero()[1]))
    return pa.ListArray.from_arrays(pa.array([0, *ends], pa.int32()), names)


def _numbers_at(name: str, index: int, stored: Mapping[str, Any]) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    values = stored[name]
    return pc.list_element(values, index) if pa.types.is_fixed_size_list(values.type) else values


def _column_check(field: Field, schema: Schema, kind: str) -> _Check:
    """Returns the check of a column's values, of a `kind` as `_columns` has it."""
    kind, _, width = kind.partition("[")
    if width:
        return partial(_vector_faults, _column_check(field, schema, kind), int(width[:-1]))
    is_list = kind == LIST
    if is_list != (field.type == LIST) and (field.type != ANY):
        return lambda values: iter([(TYPE, _EXPECTED[field.type], np.ones(len(values), bool))])
    if is_list:
        return partial(_list_faults, field)
    if kind in ("string", "name") and field.type in (STRING, ANY):
        return partial(_text_faults, field, schema.missing)
    return partial(_number_faults, field, schema, kind)


def _vector_faults(check: _Check, size: int, vectors: Any) -> Iterator[_Fault]:
    for problem, expected, mask in check(vectors.flatten()):
        wrong = np.count_nonzero(mask.reshape(-1, size), axis=1)
        yield problem, expected, wrong == size if problem == MISSING else wrong > 0


def _list_faults(field: Field, values: Any) -> Iterator[_Fault]:
    import pyarrow.compute as pc

    yield MISSING, "a value", pc.list_value_length(values).to_numpy() == 0
    if "enum" in field.constraints:
        mask = np.zeros(len(values), bool)
        unknown = ~_is_in(values.flatten(), field.constraints["enum"])
        mask[pc.list_parent_indices(values).to_numpy()[unknown]] = True
        yield "enum", f"some of {_listed(field)}", mask


def _text_faults(field: Field, missing: Sequence[str], values: Any) -> Iterator[_Fault]:
    import pyarrow.compute as pc

    absent, lengths = _is_in(values, missing), pc.utf8_length(values).to_numpy()
    for word, limit in field.constraints.items():
        if word == "enum":
            yield word, f"one of {_listed(field)}", ~absent & ~_is_in(values, limit)
        elif word == "pattern":
            fits = pc.match_substring_regex(values, whole(limit)).to_numpy(zero_copy_only=False)
            yield word, f"the form {limit}", ~absent & ~fits
        elif word == "minLength":
            yield word, f"{limit:,} characters or more", ~absent & (lengths < limit)
        elif word == "maxLength":
            yield word, f"{limit:,} characters or fewer", ~absent & (lengths > limit)
    yield MISSING, "a value", absent


def _number_faults(field: Field, schema: Schema, kind: str, values: Any) -> Iterator[_Fault]:
    """Yields the problems of numbers, or of texts that should be numbers."""
    import pyarrow.compute as pc

    if is_text := kind in ("string", "name"):
        none = [*schema.missing, *NO_VALUES]
        absent = _is_in(values, none) | _is_in(pc.utf8_trim_whitespace(values), none)
        names, distinct = _TRUTHS if field.type == BOOLEAN else {}, values.dictionary_encode()
        found = np.array([_number(text, names) for text in distinct.dictionary.to_pylist()], np.float64)
        numbers = found[distinct.indices.to_numpy()]
        yield TYPE, _EXPECTED[field.type], ~absent & np.isnan(numbers)
    else:
        numbers = values.to_numpy()
        absent = np.isnan(numbers) | np.isin(numbers, list(map(_number, schema.missing)))
    for problem, expected, mask in _limit_faults(field, "" if is_text else kind, numbers):
        yield problem, expected, ~absent & ~np.isnan(numbers) & mask
    if kind == "string":
        yield _TEXT, f"{_EXPECTED[field.type]}, and not as text", ~absent
    yield MISSING, "a value", absent


def _limit_faults(field: Field, kind: str, numbers: npt.NDArray[Any]) -> Iterator[_Fault]:
    """Yields the problems of numbers; of those of missing values, which are ignored, too."""

    # The limits as written and as rounded to 32 bits.
    def allowed(*limits: float) -> npt.NDArray[np.float64]:
        exact = np.array(limits, np.float64)
        with np.errstate(over="ignore"):
            return np.concatenate([exact, exact.astype(np.float32)]) if kind == "float32" else exact

    if field.type == STRING:
        yield TYPE, _EXPECTED[STRING], np.ones(len(numbers), bool)
        return
    if field.type == BOOLEAN:
        yield TYPE, _EXPECTED[BOOLEAN], ~np.isin(numbers, (0, 1))
    if field.type == INTEGER and kind != "int64":
        yield TYPE, _EXPECTED[INTEGER], (numbers != np.floor(numbers)) | np.isinf(numbers)
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
    import pyarrow as pa
    import pyarrow.compute as pc

    mask: _Mask = pc.is_in(values, value_set=pa.array(known, pa.string())).to_numpy(zero_copy_only=False)
    return mask


def _listed(field: Field) -> str:
    names = [printable(str(name)) for name in field.constraints.get("enum", ())]
    return ", ".join(names[:5]) + (f" or {len(names) - 5} more" if len(names) > 5 else "")
