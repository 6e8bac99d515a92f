"""TFRecord files of tf.train.Examples from other programs (TFDS, TFX, Beam): each feature a column."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, cast

import xxhash

from shardline.components.preprocess.schema import labels
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources.columns import FAULT, ROW, SPLIT, TypedColumns
from shardline.components.preprocess.sources.csv_text import Batch, CsvScan, is_wide
from shardline.components.preprocess.sources.example import Span
from shardline.components.preprocess.sources.table import TableRows
from shardline.components.preprocess.tfrecord.example import Kind, Value, parse
from shardline.components.preprocess.tfrecord.framing import Record, detect_compression, read_records
from shardline.components.storage import remote_files
from shardline.components.storage.listing import find_files
from shardline.trainer.base.errors import BadRecordError, SourceError, printable
from shardline.trainer.base.progress import report
from shardline.trainer.data.features import CLASS, COLUMN_TYPES, LABEL

# Folders of TFX's splits. Its Evaluator uses "eval", as the gate uses the test split.
_FOLDER = re.compile(r"Split-(.+)")
_SPLITS = {"train": "train", "validation": "validation", "val": "validation", "test": "test"}

_DTYPES: Mapping[Kind, str] = {"bytes": "string", "float": "float32", "int64": "int64"}
_ROWS = 1024


class TfRecordFile(NamedTuple):
    """A TFRecord file: its path, compression ("gzip" or ""), and the split of its folder."""

    path: str
    compression: str
    split: str | None


def open_tfrecords(pattern: str, settings: PreprocessSettings) -> ExampleRows:
    """Returns the examples of TFRecord files, plain or gzip (detected by their first bytes).

    Raises:
        SourceError: No file matches, one is not a TFRecord file, there is no record, or a feature is missing.
    """
    paths = find_files(pattern)
    remote_files.prefetch_copies(filter(remote_files.is_on_network, paths))
    splits = _splits_of(paths)
    files = [
        TfRecordFile(path, detect_compression(path), split) for path, split in zip(paths, splits, strict=True)
    ]
    return ExampleRows(pattern, files, settings)


def _splits_of(paths: Sequence[str]) -> list[str | None]:
    """Returns the split of each file, if they are in folders Split-NAME, one of which is Split-train."""
    found = [_FOLDER.fullmatch(os.path.basename(os.path.dirname(path))) for path in paths]
    names = [match[1] if match else None for match in found]
    if "train" not in names:
        return [None] * len(paths)
    known = {**_SPLITS, "eval": "validation" if "test" in names else "test"}
    if other := next((path for path, name in zip(paths, names, strict=True) if name not in known), None):
        raise SourceError(
            f"{other!r} is in none of the folders Split-{', Split-'.join(known)}; name those to read in the "
            "pattern"
        )
    if "eval" in names:
        report("preprocess", f"Split-eval is the {known['eval']} split")
    return [known[name] for name in names if name]


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
    only the columns that are named are read besides.

    Raises:
        SourceError: A file cannot be read, or lacks a feature.
    """

    def __init__(self, name: str, files: Sequence[TfRecordFile], settings: PreprocessSettings) -> None:
        image = settings.features.get("image", "image")
        found = _survey(files)
        if image in found and not settings.label:  # a number is the index of a class
            others = {ours: theirs for ours, theirs in settings.features.items() if ours != LABEL}
            label = f"{CLASS}:{settings.features.get(LABEL, LABEL)}"
            settings = replace(settings, label=label, features=others)
        features, overrides = settings.features, settings.columns
        targets = {column for label in labels.parse(settings.label) for column in label.columns}
        targets = targets or {features.get(LABEL, LABEL)}
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
        kinds = {column: stats.kind for column, stats in found.items()}
        columns = _ExampleColumns(files, CsvScan(types, gaps, wide), image, kinds)
        super().__init__(name, columns, settings, ("bytes",))

    def _image(self, value: Any) -> Any:
        return value


class _FeatureStats:
    """Statistics of a feature in the records of some files.

    Attributes:
        kind: Kind of its first list that is not empty.
        lengths: Number of records by the length of a list of this kind in them; 0 where there is none.
        is_wide: Whether some whole numbers are not exact as 32-bit floats.
    """

    def __init__(self) -> None:
        self.kind: Kind = "bytes"
        self.lengths = Counter[int]()
        self.is_wide = False

    def add(self, kind: Kind, found: Sequence[Value]) -> None:
        """Adds the values of the feature in one record."""
        if found and not self.lengths.total():
            self.kind = kind
        if found and kind == self.kind:
            self.lengths[len(found)] += 1
            if kind == "int64" and not self.is_wide:
                self.is_wide = is_wide(*cast(list[int], [min(found), max(found)]))

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
    found, count, fault = dict[str, _FeatureStats](), 0, ""
    for path, compression, _ in files:
        for record in read_records(path, compression=compression):
            if not isinstance(record, Record):
                continue
            try:
                features = parse(record.data)
            except ValueError as error:
                fault = fault or f": {error}"
                continue
            count += 1
            for name, (kind, numbers) in features.items():
                (found.get(name) or found.setdefault(name, _FeatureStats())).add(kind, numbers)
    if not count:
        raise SourceError(f"there is no record in {files[0].path!r} (of {len(files)} files){fault}")
    for stats in found.values():
        stats.lengths[0] += count - stats.lengths.total()
    return found


class _ExampleColumns(TypedColumns):
    """Features of the records of some files, as columns."""

    row_metadata = (ROW, SPLIT, FAULT)

    def __init__(
        self, files: Sequence[TfRecordFile], found: CsvScan, image: str, kinds: Mapping[str, Kind]
    ) -> None:
        super().__init__(found)
        self._files, self._image, self._kinds = files, image, kinds
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
            features = parse(record.data)
            if "key" in names:
                metadata["key"] = xxhash.xxh3_128_hexdigest(record.data)
            return [
                self._value(file, record, name, *features[name]) if name in features else metadata.get(name)
                for name in names
            ]
        except ValueError as fault:
            metadata[FAULT] = str(fault)
            return [metadata.get(name) for name in names]

    def _value(self, file: TfRecordFile, record: Record, name: str, kind: Kind, found: Sequence[Any]) -> Any:
        if found and kind != (wanted := self._kinds[name]):
            raise ValueError(f"feature {printable(name)!r} is {kind}, not {wanted}")
        if name == self._image and self.types[name] == "bytes":
            if len(found) != 1:
                raise ValueError(f"feature {printable(name)!r} has {len(found)} values, one is needed")
            image = found[0]
            span = Span(file.path, record.offset + record.data.find(image), len(image))
            return image if file.compression else span
        if kind == "bytes":
            found = [to_text(value, name) for value in found]
        if self.types[name] == "strings":
            return found
        if kind == "int64" and self.types[name] in ("string", "float32"):
            found = [*map(str if self.types[name] == "string" else float, found)]
        return found[0] if len(found) == 1 else found or None
