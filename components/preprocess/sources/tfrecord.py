"""TFRecord files of tf.train.Examples from other programs: TFDS, TFX, tf.io.TFRecordWriter, Beam."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import xxhash

from shardline.components.preprocess.lazy import pa, pc
from shardline.components.preprocess.sources.columns import (
    ColumnUse,
    Rows,
    Scan,
    TypedColumns,
    override_type,
    typed,
)
from shardline.components.preprocess.sources.example import Span
from shardline.components.preprocess.sources.formats import BATCH_BYTES, Block, chosen
from shardline.components.preprocess.sources.table import TableRows
from shardline.components.preprocess.sources.text_formats import is_wide
from shardline.components.preprocess.tfrecord import (
    KINDS,
    Kind,
    Record,
    decode,
    detect_compression,
    read_records,
)
from shardline.components.storage import copies, match_files
from shardline.trainer.base.errors import BadRecordError, SourceError, printable
from shardline.trainer.base.progress import report

_KINDS = {"binary": "string", "float": "float32", "int64": "int64"}
_ROWS = 1024


class TfRecordFile(NamedTuple):
    """A TFRecord file: its path, compression ("gzip" or ""), and the split of its folder."""

    path: str
    compression: str
    split: str | None


class ExampleRows(TableRows):
    """Examples of TFRecord files as rows: each feature a column, of one value or of a list of fixed length.

    The key is a hash of the whole record unless a feature is the key. Where examples have an encoded image,
    only the columns that are named are read besides. SourceError if a file cannot be read or lacks a feature.
    """

    def __init__(self, name: str, files: Sequence[TfRecordFile], use: ColumnUse, scan: Scan | None) -> None:
        super().__init__(name, _ExampleColumns(files, use, scan), use, ("bytes",))
        self.numbers_copies = "key" not in self._names
        self._eval = next((file.split for file in files if _folder(file.path) == "eval"), None)

    def report(self) -> None:
        """Reports which split TFX's "eval" is, and how columns are read."""
        if self._eval:
            report("preprocess", f"Split-eval is the {self._eval} split")
        super().report()

    def _image(self, value: Any, rows: Rows) -> Any:
        if isinstance(value, bytes):
            return value
        return Span(rows.path, value["offset"], value["length"])


class _FeatureScan:
    """Finds the type of a feature, batch by batch of lists; `records` counts those that are not empty."""

    def __init__(self) -> None:
        self.kind, self.sizes, self.records, self.is_wide = "", set[int](), 0, False

    def add(self, lists: Any) -> None:
        """Adds lists, whose values are of the type of those before."""
        values, sizes = lists.flatten(), pc.list_value_length(lists).drop_null()
        sizes = sizes.filter(pc.greater(sizes, 0))
        if not len(sizes):
            return
        self.kind = _KINDS[str(values.type)]
        self.sizes.update(pc.unique(sizes).to_pylist())
        self.records += len(sizes)
        if self.kind == "int64" and not self.is_wide:
            self.is_wide = is_wide(*pc.min_max(values).as_py().values())

    def type(self, *, is_target: bool, has_gaps: bool) -> str:
        """Returns the type as in `Scan.types`; for a vector with its length, such as float32[3]."""
        sizes, kind = sorted(self.sizes) or [1], self.kind or "string"
        if kind == "string" and is_target and sizes[-1] > 1:
            return "strings"
        if len(sizes) > 1:
            return f"lists of {sizes[0]} to {sizes[-1]} values (pad them to one length)"
        if kind == "int64" and has_gaps and sizes[0] > 1:
            return "lists of whole numbers that some examples lack (fill them)"
        return kind + (f"[{sizes[0]}]" if sizes[0] > 1 else "")


class _ExampleColumns(TypedColumns):
    """Features of the records of some files, as columns."""

    def __init__(self, files: Sequence[TfRecordFile], use: ColumnUse, scan: Scan | None) -> None:
        self._files, self._image = files, use.column("image")
        self._root = os.path.commonpath([path for path, *_ in files])
        super().__init__(scan or self._scan(use))

    def _scan(self, use: ColumnUse) -> Scan:
        found, blocks, rows, fault = dict[str, _FeatureScan](), list[Block](), 0, ""
        targets, stored, sound_rows = use.target_columns, dict[str, Kind](), 0
        for file, first, records in self._chunks():
            sound = [record.data for record in records if isinstance(record, Record)]
            # Most of the first records decide; another kind is a fault of the others.
            columns, faults = decode(sound, stored)
            blocks.append(Block(len(blocks), 1, first))
            rows += len(records)
            sound_rows += len(sound) - len(faults)
            for reason in faults.values():
                fault = fault or f"{file.path!r} has a record that cannot be read: {reason}"
            for name, lists in columns.items():
                found.setdefault(name, _FeatureScan()).add(lists)
            stored = {name: KINDS[feature.kind] for name, feature in found.items() if feature.kind}
        if not found:
            raise SourceError(fault or f"there is no record in {self._files[0].path!r}")
        gaps = {name for name, feature in found.items() if feature.records < sound_rows}
        types = {
            name: override_type(
                feature.type(is_target=name in targets, has_gaps=name in gaps), use.types.get(name, "")
            )
            for name, feature in sorted(found.items())  # protobuf's order is of the process
        }
        if self._image in found and found[self._image].kind == "string":
            types[self._image] = "bytes"
            wanted = {"key", self._image, *use.features.values(), *targets, use.time}
            types = {name: kind for name, kind in types.items() if name in wanted}
        wide = tuple(name for name, feature in found.items() if feature.is_wide)
        return Scan(types, tuple(gaps), wide, blocks=tuple(blocks), rows=rows, stored=stored)

    def batches(self, names: Sequence[str], numbers: Iterator[int] | None = None) -> Iterator[Rows]:
        """Yields the values of some columns, row by row and file by file; or of some batches."""
        for file, first, records in chosen(self._chunks(), numbers):
            yield self._rows(file, first, records, names)

    def _chunks(self) -> Iterator[tuple[TfRecordFile, int, list[Any]]]:
        """Yields records, or their errors, that follow each other in a file, and the number of the first."""
        for file in self._files:
            first, held, size = 0, list[Any](), 0
            for record in read_records(file.path, compression=file.compression):
                held.append(record)
                size += len(record.data) if isinstance(record, Record) else 0
                if len(held) == _ROWS or size > BATCH_BYTES:
                    yield file, first, held
                    first, held, size = first + len(held), [], 0
            if held:
                yield file, first, held

    def _rows(self, file: TfRecordFile, first: int, records: Sequence[Any], names: Sequence[str]) -> Rows:
        faults = {
            index: record.reason for index, record in enumerate(records) if isinstance(record, BadRecordError)
        }
        data = [b"" if index in faults else record.data for index, record in enumerate(records)]
        found, wrong = decode(data, self.scan.stored)
        faults = wrong | faults
        columns = dict[str, Any]()
        for name in names:
            lists = found.get(name, pa.nulls(len(records)))
            if name == self._image and self.types[name] == "bytes":
                columns[name] = self._images(file, records, lists, faults)
            else:
                columns[name] = self._values(name, lists, faults)
        place = "record" if len(self._files) == 1 else f"{os.path.relpath(file.path, self._root)} record"
        keys = [xxhash.xxh3_128_hexdigest(each) for each in data]
        return Rows(columns, len(records), place, first, file.split, faults, keys, file.path)

    def _values(self, name: str, lists: Any, faults: dict[int, str]) -> Any:
        """Returns the values of a feature, and notes records whose bytes are no text."""
        kind = self.types[name]
        if not pa.types.is_list(lists.type) or not len(lists.flatten()):
            return typed(pa.nulls(len(lists)), kind)
        if pa.types.is_binary(lists.type.value_type):
            lists = self._texts(name, lists, faults)
        elif kind.startswith("string"):
            lists = lists.cast(pa.list_(pa.string()))
        if "[" in kind or kind == "strings":
            return typed(lists, kind)
        empty = pc.equal(pc.list_value_length(lists), 0)
        lists = pc.if_else(pc.fill_null(empty, True), None, lists)
        return typed(pc.list_element(lists, 0), kind)

    def _texts(self, name: str, lists: Any, faults: dict[int, str]) -> Any:
        texts = pa.list_(pa.string())
        try:
            return lists.cast(texts)
        except pa.ArrowInvalid:
            rows = lists.to_pylist()
            for index, row in enumerate(rows):
                try:
                    rows[index] = row and [value.decode() for value in row]
                except UnicodeDecodeError:
                    rows[index] = None
                    faults[index] = f"feature {printable(name)!r} is {row!r:.60}, not printable text in UTF-8"
            return pa.array(rows, texts)

    def _images(self, file: TfRecordFile, records: Sequence[Any], lists: Any, faults: dict[int, str]) -> Any:
        """Returns images of records, as spans of the file unless that is compressed."""
        images = list[Any]()
        for index, (record, values) in enumerate(zip(records, lists.to_pylist(), strict=True)):
            if index not in faults and len(values or ()) != 1:
                faults[index] = f"feature {self._image!r} has {len(values or ())} values, one is needed"
            image = None if index in faults else values[0]
            if image is not None and not file.compression:
                offset = record.offset + record.data.find(image)
                image = {"offset": offset, "length": len(image)}
            images.append(image)
        kind = pa.binary() if file.compression else pa.struct({"offset": pa.int64(), "length": pa.int64()})
        return pa.array(images, kind)


# Folders of TFX's splits. Its Evaluator uses "eval", as the gate uses the test split.
_FOLDER = re.compile(r"Split-(.+)")
_SPLITS = {"train": "train", "validation": "validation", "val": "validation", "test": "test"}


def open_tfrecords(pattern: str, use: ColumnUse, scan: Scan | None = None) -> ExampleRows:
    """Returns the examples of TFRecord files, plain or gzip (detected by their first bytes)."""
    paths = [file.path for file in match_files(pattern)]
    copies.prefetch(paths)
    splits = _splits_of(paths)
    files = [
        TfRecordFile(path, detect_compression(path), split) for path, split in zip(paths, splits, strict=True)
    ]
    return ExampleRows(pattern, files, use, scan)


def _folder(path: str) -> str | None:
    """Returns NAME of a file in a folder Split-NAME."""
    match = _FOLDER.fullmatch(os.path.basename(os.path.dirname(path)))
    return match[1] if match else None


def _splits_of(paths: Sequence[str]) -> list[str | None]:
    """Returns the split of each file, if they are in folders Split-NAME, one of which is Split-train."""
    names = [_folder(path) for path in paths]
    if "train" not in names:
        return [None] * len(paths)
    known = {**_SPLITS, "eval": "validation" if "test" in names else "test"}
    if other := next((path for path, name in zip(paths, names, strict=True) if name not in known), None):
        raise SourceError(
            f"{other!r} is in none of the folders Split-{', Split-'.join(known)}; name those to read in the "
            "pattern"
        )
    return [known[name] for name in names if name]
