"""TFRecord files of tf.train.Examples from other programs: TFDS, TFX, tf.io.TFRecordWriter, Beam."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import xxhash

from shardline.components.preprocess.example import Features, Kind, Value, only_value, parse
from shardline.components.preprocess.schema import labels
from shardline.components.preprocess.schema.labels import LARGEST_CLASS
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources.columns import (
    FAULT,
    ROW,
    SPLIT,
    Batch,
    CsvScan,
    TypedColumns,
    is_wide,
)
from shardline.components.preprocess.sources.example import BadExample, Example, Source, Span
from shardline.components.preprocess.sources.table import TableRows
from shardline.components.preprocess.tfrecord import Record, detect_compression, read_records
from shardline.components.storage import remote_files
from shardline.components.storage.remote_files import find_files
from shardline.trainer.base.errors import BadRecordError, SourceError, printable
from shardline.trainer.base.progress import report
from shardline.trainer.data.features import COLUMN_TYPES, LABEL, Feature

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
            features = parse(record.data)
            if "key" in names:
                metadata["key"] = xxhash.xxh3_128_hexdigest(record.data)
            return [
                self._value(file, record, features, name) if name in features else metadata.get(name)
                for name in names
            ]
        except ValueError as fault:
            metadata[FAULT] = str(fault)
            return [metadata.get(name) for name in names]

    def _value(self, file: TfRecordFile, record: Record, features: Features, name: str) -> Any:
        kind, values = features[name]
        if name == self._image and kind == "bytes":
            return _image(file, record, only_value(features, name))
        found: Sequence[Any] = [to_text(value, name) for value in values] if kind == "bytes" else values
        if self.types[name] == "strings":
            return found
        if kind == "int64" and self.types[name] in ("string", "float32"):
            found = [*map(str if self.types[name] == "string" else float, found)]
        return found[0] if len(found) == 1 else found or None


def _image(file: TfRecordFile, record: Record, image: Any) -> bytes | Span:
    """Returns an image of a record, as a span of the file unless that is compressed."""
    return image if file.compression else Span(file.path, record.offset + record.data.find(image), len(image))


_ROLES = ("image", "label", "key")
_TEXT = ("utf-8", "surrogateescape")

# Folders of TFX's splits. Its Evaluator uses "eval", as the gate uses the test split.
_FOLDER = re.compile(r"Split-(.+)")
_SPLITS = {"train": "train", "validation": "validation", "val": "validation", "test": "test"}


def open_tfrecords(pattern: str, settings: PreprocessSettings) -> Source:
    """Returns the examples of TFRecord files, plain or gzip (detected by their first bytes).

    Those with an encoded image and one class each are read record by record, all others as a table. Raises
    SourceError if no file matches, one is not a TFRecord file, or the first record lacks a feature.
    """
    paths = find_files(pattern)
    remote_files.prefetch_copies(paths)
    splits = _splits_of(paths)
    files = [
        TfRecordFile(path, detect_compression(path), split) for path, split in zip(paths, splits, strict=True)
    ]
    path, first = next(_sound_records(files), ("", None))
    try:
        found = parse(first.data) if first else {}
    except ValueError as fault:
        raise SourceError(f"{path!r}: the first record: {fault}") from None
    features = settings.features
    has_image = features.get("image", "image") in found or "image" in features
    if found and (settings.label or settings.split_by_time or settings.columns or not has_image):
        return ExampleRows(pattern, files, settings)
    return TfRecords(files, features)


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


def _sound_records(files: Sequence[TfRecordFile]) -> Iterator[tuple[str, Record]]:
    for path, compression, _ in files:
        for record in read_records(path, compression=compression):
            if isinstance(record, Record):
                yield path, record


class TfRecords:
    """Examples of TFRecord files, each with an encoded image, in the order of their names.

    Labels are int64 class indices (the classes are then named "0", "1", ...) or bytes class names (sorted).
    The key is a hash of the whole record unless a feature of the files is the key. `features` are names of
    the files' features by Shardline's: image, label, key, and any others of one value each. Raises
    SourceError if the first record lacks one.
    """

    def __init__(self, files: Sequence[TfRecordFile], features: Mapping[str, str]) -> None:
        self._files = files
        self._names = {"image": "image", "label": "label"} | dict(features)
        self._image = self._names.pop("image")
        # Kinds of the features other than the image, by Shardline's name.
        self._kinds: Mapping[str, Kind] = {}
        self._kinds = self._first_kinds()
        self.features = tuple(
            Feature(ours, _DTYPES[kind]) for ours, kind in sorted(self._kinds.items()) if ours not in _ROLES
        )
        self.numbers_copies = "key" not in self._names

    @functools.cached_property
    def class_names(self) -> Sequence[str]:
        """The classes, for which all files are read once."""
        found = set[Any]()
        for _, record in _sound_records(self._files):
            with contextlib.suppress(ValueError):
                found.add(self._read(record)[1]["label"])
        if self._kinds["label"] == "int64":
            return tuple(map(str, range(max(found, default=0) + 1)))
        return tuple(sorted(name.decode(*_TEXT) for name in found))

    def __iter__(self) -> Iterator[Example | BadExample]:
        """Yields the examples; the image is a span of the file unless that is compressed."""
        index: Mapping[Value, int] = {}
        if self._kinds["label"] == "bytes":
            index = {name.encode(*_TEXT): label for label, name in enumerate(self.class_names)}
        names = [feature.name for feature in self.features]
        for file in self._files:
            for record in read_records(file.path, compression=file.compression):
                if isinstance(record, BadRecordError):
                    yield BadExample(record.name, record.reason)
                    continue
                try:
                    image, values = self._read(record)
                    key = xxhash.xxh3_128_hexdigest(record.data)
                    if "key" in self._names:
                        key = to_text(values["key"], "key")
                    others = {
                        name: to_text(value, name) if isinstance(value := values[name], bytes) else value
                        for name in names
                    }
                except ValueError as fault:
                    yield BadExample(f"{file.path} record {record.number}", str(fault))
                    continue
                label = index[values["label"]] if index else cast(int, values["label"])
                yield Example(key, label, _image(file, record, image), file.split, others)

    def _read(self, record: Record) -> tuple[Value, Mapping[str, Value]]:
        """Returns a record's image and other values by name; ValueError if it has not the needed features."""
        features = parse(record.data)
        image = only_value(features, self._image, "bytes")
        found = {
            ours: only_value(features, name, self._kinds.get(ours)) for ours, name in self._names.items()
        }
        label = found["label"]
        if label.__class__ is int:
            if not 0 <= label <= LARGEST_CLASS:
                raise ValueError(f"label {label} is out of range 0..{LARGEST_CLASS:,}")
        elif label.__class__ is float or not label:
            raise ValueError(f"label {label!r} is neither a class index nor a class name")
        return image, found

    def _first_kinds(self) -> dict[str, Kind]:
        for path, record in _sound_records(self._files):
            features = parse(record.data)
            try:
                self._read(record)
                return {ours: features[theirs][0] for ours, theirs in self._names.items()}
            except ValueError as fault:
                names = printable(", ".join(features))[:300]
                raise SourceError(
                    f"{path!r}: the first record: {fault}; it has {names}; say which is which with features, "
                    "such as image=image/encoded,label=image/class/label"
                ) from None
        raise SourceError(f"there is no record in {self._files[0].path!r} (of {len(self._files)} files)")
