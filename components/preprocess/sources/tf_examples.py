"""Features of tf.train.Examples as columns of a table: TFRecord files of TFX, Beam and others."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import xxhash

from shardline.components.preprocess.schema import labels
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources.columns import FAULT, ROW, SPLIT, TypedColumns
from shardline.components.preprocess.sources.csv_text import Batch, CsvScan, is_wide
from shardline.components.preprocess.sources.example import Span
from shardline.components.preprocess.sources.table import TableRows
from shardline.components.preprocess.tfrecord.example import (
    Kind,
    Value,
    ValuePosition,
    locate,
    only_span,
    parse,
    values,
)
from shardline.components.preprocess.tfrecord.framing import Record, read_records
from shardline.trainer.base.errors import BadRecordError, SourceError, printable
from shardline.trainer.data.features import COLUMN_TYPES, LABEL

_DTYPES: Mapping[Kind, str] = {"bytes": "string", "float": "float32", "int64": "int64"}
_ROWS = 1024


class TfRecordFile(NamedTuple):
    """A TFRecord file: its path, compression ("gzip" or ""), and the split of its folder."""

    path: str
    compression: str
    split: str | None


def to_text(value: Value, name: str) -> str:
    """Returns the text of a feature; ValueError if it is not text, or an unprintable key."""
    with contextlib.suppress(UnicodeDecodeError):
        text = value.decode() if isinstance(value, bytes) else str(value)
        if name != "key" or text.isprintable():
            return text
    raise ValueError(f"feature {printable(name)!r} is {value!r:.60}, not printable text in UTF-8")


class ExampleRows(TableRows):
    """Examples of TFRecord files as rows: each feature a column, of one value or of a list of fixed length.

    The key is a hash of the whole record unless a feature is the key. Where examples have an encoded image,
    only the columns that are named are read besides. SourceError if a file cannot be read or lacks a feature.
    """

    def __init__(self, name: str, files: Sequence[TfRecordFile], settings: PreprocessSettings) -> None:
        features, overrides = settings.features, settings.columns
        image = features.get("image", "image")
        targets = {column for label in labels.parse(settings.label) for column in label.columns}
        targets = targets or {features.get(LABEL, LABEL)}
        found = _survey(files)
        if image in found:
            wanted = {"key", image, *features.values(), *targets, settings.split_by_time}
            found = {column: stats for column, stats in found.items() if column in wanted}
        self.numbers_copies = "key" not in {*features, *found}
        types = {column: stats.column_type(is_target=column in targets) for column, stats in found.items()}
        types |= {
            column: COLUMN_TYPES[kind] for column, kind in overrides.items() if types.get(column) == "int64"
        }
        if self.numbers_copies:
            types["key"] = "string"
        if image in found and found[image].kind == "bytes":
            types[image] = "bytes"
        gaps = {column for column, stats in found.items() if stats.lengths[0]}
        wide = {column for column, stats in found.items() if stats.is_wide}
        super().__init__(
            name, _ExampleColumns(files, CsvScan(types, gaps, wide), image), settings, ("bytes",)
        )

    def _image(self, value: Any) -> Any:
        return value


class _FeatureStats:
    """Statistics of a feature in the records of some files.

    Attributes:
        kind: Kind of its lists, and of the first that is not empty.
        lengths: Number of records by the length of the list in them; 0 where there is none.
        is_wide: Whether some whole numbers are not exact as 32-bit floats.
    """

    def __init__(self) -> None:
        self.kind: Kind = "bytes"
        self.lengths = Counter[int]()
        self.is_wide = False
        self._first = ""

    def add(self, record: str, name: str, kind: Kind, found: Sequence[Value]) -> None:
        """Adds the values of the feature in one record."""
        self.lengths[len(found)] += 1
        if kind == "int64" and found and not self.is_wide:
            self.is_wide = is_wide(*cast(list[int], [min(found), max(found)]))
        if not self._first:
            self.kind = kind
            self._first = record if found else ""
        elif found and kind != self.kind:
            raise SourceError(
                f"feature {printable(name)!r} is {kind} in {record}, and {self.kind} in {self._first}; make "
                "them the same"
            )

    def column_type(self, *, is_target: bool) -> str:
        """Returns the type as in `TypedColumns`; for a vector with its length, such as float32[3]."""
        sizes = sorted(self.lengths.keys() - {0}) or [1]
        if self.kind == "bytes" and is_target and sizes[-1] > 1:
            return "strings"
        if len(sizes) > 1:
            return f"lists of {sizes[0]} to {sizes[-1]} values (pad them to one length)"
        if self.kind == "int64" and self.lengths[0] and sizes[0] > 1:
            return "lists of whole numbers that some examples lack (fill them)"
        return _DTYPES[self.kind] + (f"[{sizes[0]}]" if sizes[0] > 1 else "")


def _survey(files: Sequence[TfRecordFile]) -> dict[str, _FeatureStats]:
    """Reads all records once, and returns the statistics of their features; invalid records are left out."""
    found, count = dict[str, _FeatureStats](), 0
    for path, compression, _ in files:
        for record in read_records(path, compression=compression):
            if not isinstance(record, Record):
                continue
            try:
                features = parse(record.data)
            except ValueError:
                continue
            count += 1
            for name, (kind, numbers) in features.items():
                stats = found.get(name) or found.setdefault(name, _FeatureStats())
                stats.add(f"{path} record {record.number}", name, kind, numbers)
    for stats in found.values():
        stats.lengths[0] += count - stats.lengths.total()
    return found


class _ExampleColumns(TypedColumns):
    """Features of the records of some files, as columns."""

    row_metadata = (ROW, SPLIT, FAULT)

    def __init__(self, files: Sequence[TfRecordFile], found: CsvScan, image: str) -> None:
        super().__init__(found)
        self._files, self._image = files, image
        self._root = os.path.commonpath([path for path, *_ in files])

    def batches(self, names: Sequence[str]) -> Iterator[Batch]:
        """Yields the values of some columns, row by row and file by file."""
        for file in self._files:
            records = read_records(file.path, compression=file.compression)
            while batch := list(islice(records, _ROWS)):
                rows = (self._row(file, record, names) for record in batch)
                yield dict(zip(names, zip(*rows, strict=True), strict=True))

    def _row(self, file: TfRecordFile, record: Record | BadRecordError, names: Sequence[str]) -> list[Any]:
        number = record.number if isinstance(record, Record) else record.name.rpartition(" ")[2]
        metadata = {ROW: f"record {number}", SPLIT: file.split, FAULT: ""}
        if len(self._files) > 1:
            metadata[ROW] = f"{os.path.relpath(file.path, self._root)} record {number}"
        try:
            if not isinstance(record, Record):
                raise ValueError(record.reason)
            positions = locate(record.data)
            if "key" in names:
                metadata["key"] = xxhash.xxh3_128_hexdigest(record.data)
            return [
                self._value(file, record, position, name)
                if (position := positions.get(name.encode()))
                else metadata.get(name)
                for name in names
            ]
        except ValueError as fault:
            metadata[FAULT] = str(fault)
            return [metadata.get(name) for name in names]

    def _value(self, file: TfRecordFile, record: Record, position: ValuePosition, name: str) -> Any:
        if name == self._image and position.kind == "bytes":
            start, length = only_span(record.data, {name.encode(): position}, name.encode())
            span = Span(file.path, record.offset + start, length)
            return record.data[start : start + length] if file.compression else span
        found: Sequence[Any] = values(record.data, position)
        if position.kind == "bytes":
            found = [to_text(value, name) for value in found]
        if self.types[name] == "strings":
            return found
        if position.kind == "int64" and self.types[name] in ("string", "float32"):
            found = [*map(str if self.types[name] == "string" else float, found)]
        return found[0] if len(found) == 1 else found or None
