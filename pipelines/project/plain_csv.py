"""Columns of a CSV file where pyarrow, which reads those of a run, is not installed."""

from __future__ import annotations

import csv
import functools
import io
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from shardline.components.preprocess.schema.labels import NO_VALUES, is_number
from shardline.components.preprocess.sources.columns import TypedColumns
from shardline.components.preprocess.sources.csv_text import (
    CODE,
    EXACT,
    LONG_CODE,
    CsvScan,
    DecodedText,
)
from shardline.trainer.base.errors import SourceError

_ROWS = 4096


class PlainCsv(TypedColumns):
    """Columns of a CSV file, of the types that `csv_text` finds; SourceError if it cannot be read."""

    guessed = True

    def __init__(self, path: str) -> None:
        self._path, rows = path, self._rows()
        self._names = next(rows, [])
        if len(set(self._names)) < len(self._names) or "" in (self._names or [""]):
            raise SourceError(f"{path!r} has no columns, one without a name, or two of one name")
        found = {name: set[str]() for name in self._names}
        gaps, wide = set[str](), set[str]()
        for row in rows:
            for name, value in zip(self._names, row, strict=True):
                if value in NO_VALUES:
                    gaps.add(name)
                    continue
                kind = _kind(value.strip())
                found[name].add(kind)
                if kind in ("integer", "long") and abs(int(value)) > EXACT:
                    wide.add(name)
        types = {name: _narrowest(kinds) for name, kinds in found.items()}
        super().__init__(CsvScan(types, gaps, {name for name in wide if types[name] == "int64"}))

    def batches(self, names: Sequence[str]) -> Iterator[Any]:
        """Yields the values of some columns, row by row."""
        rows, convert = self._rows(), {"int64": int, "float32": float, "string": str}
        next(rows)
        while batch := list(islice(rows, _ROWS)):
            yield {name: self._values(name, batch, convert[self.types[name]]) for name in names}

    def _values(self, name: str, rows: Sequence[Sequence[str]], convert: Any) -> Sequence[Any]:
        texts = (row[self._names.index(name)] for row in rows)
        return [None if convert is not str and text in NO_VALUES else convert(text) for text in texts]

    def _rows(self) -> Iterator[list[str]]:
        """Yields the cells of the header and of each row."""
        width = 0
        with open(self._path, "rb") as file:
            plain = DecodedText(file)
            encoding = "utf-8-sig" if plain.encoding == "utf-8" else plain.encoding
            text = io.TextIOWrapper(io.BufferedReader(plain), encoding, newline="")
            reader = csv.reader(text, delimiter=plain.delimiter, strict=True)
            try:
                for row in filter(None, reader):
                    width = width or len(row)
                    if len(row) != width:
                        raise csv.Error(f"{len(row)} cells, and {width} names of columns")
                    yield row
            except (csv.Error, UnicodeDecodeError) as error:
                raise SourceError(f"cannot read {self._path!r}, line {reader.line_num:,}: {error}") from None


@functools.lru_cache(1 << 16)
def _kind(text: str) -> str:
    """Returns what a text could be: integer, long (one that a float would change), float, code or text."""
    if not is_number(text) or "_" in text:
        return "text"
    if re.search(CODE, text):
        return "code"
    if not re.fullmatch(r"-?\d+", text):
        return "float"
    if not -(2**63) <= int(text) < 2**63:
        return "code"
    return "long" if re.search(LONG_CODE, text) else "integer"


def _narrowest(kinds: set[str]) -> str:
    if kinds & {"text", "code"} or kinds >= {"long", "float"}:
        return "string"
    return "float32" if "float" in kinds else "int64"
