"""A table: a row per example, a column per feature, with or without images."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardline.components.preprocess import storage
from shardline.components.preprocess.sources.columns import open_columns
from shardline.components.preprocess.sources.labels import is_outside
from shardline.components.preprocess.sources.remote import fetched
from shardline.components.preprocess.sources.source import BadExample, Example
from shardline.trainer.data.manifest import Feature
from shardline.trainer.errors import SourceError

#: A whole number above this is no index of a class.
LARGEST_LABEL = 99_999

_ROLES = ("label", "image", "key")
_LARGEST_FLOAT32 = 3.4028235677973366e38


class Table:
    """Rows of a CSV, JSONL or Parquet file.

    The label is a class name (sorted) or a class index (the classes are then named "0", "1", ...). A column
    image holds paths relative to the table. The key is a column, or the number of the row, which only stays
    the same where new rows are added at the end.

    Args:
        path: Of the file.
        features: Columns by our names: label, image, key; and others, where not all of the rest are wanted.

    Raises:
        SourceError: The file cannot be read, is empty, or has not these columns.
    """

    def __init__(self, path: str, features: Mapping[str, str]) -> None:
        self._path = storage.resolve(path)
        self._columns = open_columns(self._path)
        types = self._columns.types
        self._names = {role: role for role in _ROLES if role in types or role == "label"} | dict(features)
        for ours, theirs in self._names.items():
            if theirs not in types:
                raise SourceError(
                    f"{path!r} has no column {theirs!r} for {ours}, it has {', '.join(types)}; say which is "
                    "which with features, such as label=species"
                )
        if set(features) <= set(_ROLES):
            others = [name for name in types if name not in self._names.values()]
            for name in others:
                if name in _ROLES:
                    raise SourceError(
                        f"{path!r} has a column {name!r} beside {self._names.get(name)!r} for it; rename it, "
                        "or name the columns to use with features"
                    )
            self._names |= {name: name for name in others}
        self._check_types()
        self.features = tuple(
            Feature(ours, types[theirs]) for ours, theirs in self._names.items() if ours not in _ROLES
        )
        self.class_names = self._find_class_names()

    def __iter__(self) -> Iterator[Example | BadExample]:
        root = os.path.dirname(self._path)
        return fetched(root, self._rows("")) if storage.is_remote(root) else self._rows(root)

    def _rows(self, root: str) -> Iterator[Example | BadExample]:
        index = {name: label for label, name in enumerate(self.class_names)}
        ours, types = tuple(self._names), self._columns.types
        checks = [(name, theirs, types[theirs]) for name, theirs in self._names.items()]
        number = 0
        for batch in self._columns.batches(list(self._names.values())):
            for row in zip(*(batch[theirs] for theirs in self._names.values()), strict=True):
                number += 1
                fault = next(filter(None, map(_fault, row, checks)), "")
                if fault:
                    yield BadExample(f"{self._path} row {number}", fault)
                    continue
                values = dict(zip(ours, row, strict=True))
                yield Example(
                    key=str(values.pop("key", f"row {number}")),
                    label=index[str(values.pop("label"))],
                    image=Path(root, os.path.normpath(values.pop("image"))) if "image" in values else None,
                    features=values,
                )

    def _check_types(self) -> None:
        types = self._columns.types
        for role, allowed in (("label", "string int64"), ("image", "string"), ("key", "string int64")):
            theirs = self._names.get(role)
            if theirs and types[theirs] not in allowed:
                raise SourceError(
                    f"column {theirs!r} of {self._path!r} is {types[theirs]}; as {role}, "
                    f"{allowed.replace(' ', ' or ')} is needed"
                )
        for theirs in self._names.values():
            if types[theirs] not in ("int64", "float32", "string"):
                raise SourceError(
                    f"column {theirs!r} of {self._path!r} is {types[theirs]}; only whole numbers, floats, "
                    "booleans and text can be used: convert it, or name the columns to use with features"
                )

    def _find_class_names(self) -> Sequence[str]:
        theirs = self._names["label"]
        found = {value for batch in self._columns.batches([theirs]) for value in batch[theirs]}
        if self._columns.types[theirs] == "string":
            return tuple(sorted(name for name in found if name))
        indices = [value for value in found if value is not None and 0 <= value <= LARGEST_LABEL]
        return tuple(str(number) for number in range(max(indices, default=-1) + 1))


def _fault(value: Any, check: tuple[str, str, str]) -> str:
    """Returns what is wrong with one value of a row; "" if nothing is."""
    ours, theirs, kind = check
    if value is None or (value == "" and ours in _ROLES):
        return f"has no value in column {theirs!r}"
    if kind == "float32" and not -_LARGEST_FLOAT32 <= value <= _LARGEST_FLOAT32:
        return f"has {value} in column {theirs!r}, not a number that 32 bits can hold"
    if ours == "label" and kind == "int64" and not 0 <= value <= LARGEST_LABEL:
        return f"has label {value} in column {theirs!r}, out of range 0..{LARGEST_LABEL:,}"
    if ours == "image" and is_outside(os.path.normpath(value)):
        return f"has an image outside the table's directory in column {theirs!r}"
    return ""
