"""Columns of a CSV file where pyarrow, with which a run reads it, is not installed."""

from __future__ import annotations

import csv
import functools
import io
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from shardline.components.preprocess.schema.labels import NO_VALUES, is_number, is_whole
from shardline.components.preprocess.sources.columns import TypedColumns
from shardline.components.preprocess.sources.csv_text import CODE, EXACT, CsvScan, DecodedText
from shardline.trainer.base.errors import SourceError

# Bytes of the largest file: a table in memory is many times as large.
_LARGEST = 1 << 28


class PlainCsv(TypedColumns):
    """Columns of a CSV file in memory, of the types that `csv_text` finds. Raises SourceError."""

    def __init__(self, path: str) -> None:
        if os.path.getsize(path) > _LARGEST:
            raise SourceError(
                f"{path!r} is larger than 256 MiB: pip install 'shardline[preprocess]' to read it"
            )
        with open(path, "rb") as file:
            plain = DecodedText(file)
            encoding = "utf-8-sig" if plain.encoding == "utf-8" else plain.encoding
            text = io.TextIOWrapper(io.BufferedReader(plain), encoding, newline="")
            reader = csv.reader(text, delimiter=plain.delimiter, strict=True)
            try:
                names, *rows = [*filter(None, reader)] or [[""]]
            except (csv.Error, UnicodeDecodeError) as error:
                raise SourceError(f"cannot read {path!r}, up to line {reader.line_num:,}: {error}") from None
        if "" in names or len({*names}) < len(names) or any(len(row) != len(names) for row in rows):
            raise SourceError(f"{path!r} needs a first line with a name for each column, and no other, once")
        self._values = {name: [row[index] for row in rows] for index, name in enumerate(names)}
        kinds = {name: {*map(_kind, values)} - {""} for name, values in self._values.items()}
        types = {name: _narrowest(found) for name, found in kinds.items()}
        wide = {name for name, found in kinds.items() if types[name] == "int64" and found & {"wide", "long"}}
        gaps = {name for name, values in self._values.items() if not NO_VALUES.isdisjoint(values)}
        super().__init__(CsvScan(types, gaps, wide))

    def batches(self, names: Sequence[str]) -> Iterator[Any]:
        """Yields the values of some columns."""
        convert: dict[str, Any] = {"int64": int, "float32": float}
        yield {
            name: [convert[kind](value) if value not in NO_VALUES else None for value in self._values[name]]
            if (kind := self.types[name]) in convert
            else self._values[name]
            for name in names
        }


@functools.lru_cache(1 << 16)
def _kind(text: str) -> str:
    """Returns what a text could be, "" for a missing value; floats do not keep what is long."""
    text = text.strip()
    if text in NO_VALUES:
        return ""
    if not is_number(text) or "_" in text or re.search(CODE, text):
        return "text"
    if not is_whole(text):
        return "float"
    size = abs(int(text))
    return "text" if size >= 2**63 else "long" if size >= 10**18 else "wide" if size > EXACT else "whole"


def _narrowest(kinds: set[str]) -> str:
    if "text" in kinds or kinds >= {"long", "float"}:
        return "string"
    return "float32" if "float" in kinds else "int64"
