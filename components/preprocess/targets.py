"""Targets: the labels of examples, checked, counted, and as they are stored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardline.components.preprocess.example import entries, parse_entries
from shardline.components.preprocess.labels import LARGEST_FLOAT
from shardline.components.preprocess.rows import Rows
from shardline.trainer.data.features import (
    CLASS,
    LABEL,
    MULTILABEL,
    REGRESSION,
    Label,
    Spread,
    Tally,
    is_class,
)
from shardline.trainer.errors import BadRecordError, SourceError, printable

_TRUTHS = {0: 0, 1: 1}


class Targets:
    """Checks, counts and serializes the labels of examples, where they are not one class each.

    Attributes:
        ranges: Smallest and largest value so far of each number, by label.
        positives: Examples so far of each class, by label.
    """

    def __init__(self, labels: Sequence[Label]) -> None:
        self._labels = labels
        self._stratum = next((one.name for one in labels if one.kind == CLASS), "")
        self.positives = {one.name: np.zeros(len(one.class_names), np.int64) for one in labels}
        self.ranges = {one.name: [[math.inf, -math.inf] for _ in one.outputs] for one in labels}

    def of(self, given: Any, name: str) -> tuple[int, bytes]:
        """Returns a stratum and the entries of one example.

        Raises BadRecordError if its labels are not those that were declared. Strata are mixed over the
        shards: those are the classes of the first label that has such, or else one of all examples.
        """
        several = len(self._labels) > 1
        if several and (not isinstance(given, Mapping) or given.keys() != {one.name for one in self._labels}):
            raise BadRecordError(
                name, f"has the labels {_short(given)}, not one for each label of the source"
            )
        stored, stratum = {}, 0
        for label in self._labels:
            value = given[label.name] if several else given
            stored[label.name] = kept = _store(label, value, name)
            self._count(label, kept)
            if label.name == self._stratum:
                stratum = int(kept[0])
        return stratum, entries(stored)

    def check(self, count: int) -> None:
        """Refuses labels that are the same for all of `count` examples: nothing could be learned of them."""
        for label in self._labels:
            for output, (least, largest) in zip(label.outputs, self.ranges[label.name], strict=True):
                if label.kind == REGRESSION and least == largest:
                    raise SourceError(
                        f"all {count:,} examples have the value {least:g} of {output!r}; a constant cannot "
                        "be learned: leave it out of label"
                    )
            found = self.positives[label.name]
            if label.kind == CLASS and (found > 0).sum() == 1:
                raise SourceError(
                    f"all {count:,} examples are of one class of {label.name!r}, "
                    f"{label.outputs[int(found.argmax())]!r}; bring a second"
                )
            for output, positives in zip(label.class_names, found.tolist(), strict=True):
                if label.kind == MULTILABEL and positives in (0, count):
                    how = "all" if positives else "none"
                    raise SourceError(
                        f"{how} of the {count:,} examples have {output!r}: leave it out of label, or bring "
                        "others"
                    )

    def _count(self, label: Label, kept: Sequence[float]) -> None:
        if label.kind == CLASS:
            self.positives[label.name][int(kept[0])] += 1
        elif label.kind == MULTILABEL:
            self.positives[label.name] += np.asarray(kept, np.int64)
        for span, value in zip(
            self.ranges[label.name] if label.kind == REGRESSION else (), kept, strict=False
        ):
            span[0], span[1] = min(span[0], value), max(span[1], value)


def _store(label: Label, value: Any, name: str) -> list[int] | list[float]:
    """Returns the values of a label as they are stored; BadRecordError for one that it cannot have."""
    if label.kind == CLASS:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise BadRecordError(name, f"label {label.name!r} is {_short(value)}, not the index of a class")
        index = value.__index__()
        if not 0 <= index < len(label.outputs):
            raise BadRecordError(name, f"label {label.name!r} is out of range 0..{len(label.outputs) - 1}")
        return [index]
    if label.kind == REGRESSION:
        values = [value] if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str) else value
        if len(values) != len(label.outputs):
            raise BadRecordError(name, f"has {len(values)} numbers for {len(label.outputs)}")
        return [_number(one, output, name) for one, output in zip(values, label.outputs, strict=True)]
    return _truths(label, value, name)


def _truths(label: Label, value: Any, name: str) -> list[int]:
    if (
        value is None
        or isinstance(value, str)
        or not isinstance(value, Sequence | np.ndarray | set | frozenset)
    ):
        raise BadRecordError(name, f"label {label.name!r} is {_short(value)}, not a list of names")
    if all(isinstance(one, str) for one in value):
        for one in value:
            if one not in label.outputs:
                raise BadRecordError(name, f"label {label.name!r} has {one!r}, which is none of its names")
        chosen = set(value)
        return [int(output in chosen) for output in label.outputs]
    if len(value) != len(label.outputs) or any(one not in _TRUTHS for one in value):
        raise BadRecordError(
            name, f"label {label.name!r} is {_short(value)}, not a 0 or 1 for each of its names"
        )
    return [_TRUTHS[one] for one in value]


def _number(value: Any, output: str, name: str) -> float:
    if isinstance(value, str | bytes | bool) or value is None:
        raise BadRecordError(name, f"{output!r} is {_short(value)}, not a number")
    number = float(np.float32(value)) if abs(float(value)) <= LARGEST_FLOAT else math.inf
    if not math.isfinite(number):
        raise BadRecordError(name, f"{output!r} is {_short(value)}, not a finite number")
    return number


def _short(value: Any) -> str:
    return printable(repr(value))[:60]


class Counts:
    """What the labels are in rows, counted block by block.

    Attributes:
        records: Number of rows so far.
    """

    def __init__(self, labels: Sequence[Label]) -> None:
        self._labels = labels
        self._classes = np.zeros(len(labels[0].outputs), np.int64) if is_class(labels) else None
        self._values: dict[str, list[list[Any]]] = {label.name: [] for label in labels}
        self.records = 0

    def add(self, block: Rows) -> None:
        """Counts some rows."""
        self.records += block.count
        if self._classes is not None:
            self._classes += np.bincount(block.heads["label"], minlength=len(self._classes))
            return
        for entry in block.features():
            stored = parse_entries(entry)
            for name, values in self._values.items():
                values.append(stored[name][1])

    def tallies(self) -> dict[str, Tally]:
        """Returns what each label is in the rows, one or more."""
        if self._classes is not None:
            return {LABEL: Tally(tuple(self._classes.tolist()))}
        return {label.name: tally(label, self._values[label.name]) for label in self._labels}


def tally(label: Label, values: Sequence[Sequence[Any]]) -> Tally:
    """Returns what a label is in some examples, one or more, whose stored values are given."""
    table = np.asarray(values, np.float64).reshape(len(values), -1)
    if label.kind == CLASS:
        return Tally(tuple(np.bincount(table[:, 0].astype(np.int64), minlength=len(label.outputs)).tolist()))
    if label.kind == MULTILABEL:
        return Tally(tuple(int(count) for count in table.sum(axis=0)))
    columns = zip(
        *(found(table, axis=0).tolist() for found in (np.min, np.max, np.mean, np.std)), strict=True
    )
    return Tally(spreads=tuple(Spread(*numbers) for numbers in columns))


def describe(label: Label, tallies: Sequence[Tally]) -> str:
    """Returns a label in a line: "fare, regression, 3.25 to 88 USD"."""
    name = f"{label.name}, " if label.name != LABEL else ""
    if label.kind == REGRESSION:
        units = label.units or ("",) * len(label.outputs)
        parts = [
            f"{output}, {min(each.least for each in found):g} to {max(each.largest for each in found):g} "
            f"{unit}"
            for output, unit, *found in zip(
                label.outputs, units, *(one.spreads for one in tallies), strict=True
            )
        ]
        first, _, rest = parts[0].rstrip().partition(", ")
        if len(parts) == 1:
            return f"{first}, {label.kind}, {rest}"
        return f"{name}{label.kind} of {len(parts)} numbers: {'; '.join(map(str.rstrip, parts))}"
    named = printable(", ".join(label.outputs[:5])) + (", ..." if len(label.outputs) > 5 else "")
    return f"{name}{label.kind} of {len(label.outputs):,}: {named}"
