"""Columns of a table in a file, CSV, JSONL or Parquet, or in many of them, read as batches of rows."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import count, islice
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

from shardline.components.preprocess.sources import csv_text
from shardline.components.preprocess.sources.csv_text import EXACT, NO_TYPES, Batch, CsvScan, Types
from shardline.components.storage import remote_files
from shardline.components.storage.listing import find_files
from shardline.trainer.base.errors import ShardlineError, SourceError, printable
from shardline.trainer.data.features import COLUMN_TYPES

#: Pseudo-column of row names: the file, and the row's number in it from 1.
ROW = "\0row"

#: More pseudo-columns, if in `row_metadata`: the split of a row, and why it cannot be used.
SPLIT, FAULT = "\0split", "\0fault"

_PATTERN = re.compile(r"[*?\[]|\{[^{}]*,")
# Part of a path such as year=2026/month=11/part-0.parquet.
_PARTITION = re.compile(r"([^/=]+)=([^/]*)")
_WHOLE = re.compile(r"-?(0|[1-9]\d{0,17})")

_JSON_ROWS = 4096
_PARQUET_ROWS = 16_384
_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "int64": operator.index,  # accepts a boolean, but not a float
    "float32": float,
    "string": str,
    "strings": list,
}


class TypedColumns:
    """Columns that can be read as batches of rows: of a file, or of a database.

    Attributes:
        types: "int64", "float32", "string", "strings", "bytes", or the format's name of any other type, by
            column; with a length at the end, such as float32[3], for lists that all have it.
        gaps: Columns in which some rows are known to have no value.
        wide: Columns of whole numbers, some of which are known not to be exact as 32-bit floats.
        codes: Columns that are text though their values could be read as numbers, with the first value that a
            number would change.
        guessed: Whether the types are inferred from the values, as in CSV.
        row_metadata: Pseudo-columns of `batches`: some of `ROW`, `SPLIT`, `FAULT`.
    """

    guessed = False
    row_metadata: Sequence[str] = ()

    def __init__(self, found: CsvScan) -> None:
        self.types, self.gaps, self.wide, self.codes = found

    def batches(self, names: Sequence[str]) -> Iterator[Batch]:
        """Yields the values of some columns, row by row."""
        raise NotImplementedError


class Columns(TypedColumns):
    """Columns of one or more files, read in the order of their paths; their names end with the format.

    Types of CSV and JSONL are found by reading each file once: the narrowest that fits all values.

    Args:
        paths: The files.
        overrides: Types of columns as in `COLUMN_TYPES`; one with a ? at its end applies where the types are
            inferred from the values, and these do not contradict it.
        root: Directory to which names of rows of several files are relative, and below which partitions are
            columns; else None.

    Raises:
        SourceError: A file cannot be read or has no column, or the files' columns differ.
    """

    def __init__(self, *paths: str, overrides: Types = NO_TYPES, root: str | None = None) -> None:
        self._paths, self._root = paths, root
        self.guessed = any(_FORMATS.get(_suffix(path)) is _CSV for path in paths)
        self.row_metadata = () if root is None else (ROW,)
        scans = [self._scan(path, overrides) for path in paths]
        types = dict(scans[0].types)
        for path, scan in zip(paths[1:], scans[1:], strict=True):
            for column in sorted(types.keys() ^ scan.types.keys()):
                has, lacks = (paths[0], path) if column in types else (path, paths[0])
                raise SourceError(
                    f"{lacks!r} has no column {column!r}, which {has!r} has; make the files' columns the same"
                )
            types = {
                name: self._common_type(name, kind, scan.types[name], path) for name, kind in types.items()
            }
        gaps: Set[str] = frozenset().union(*(scan.gaps for scan in scans))
        wide: Set[str] = frozenset().union(*(scan.wide for scan in scans))
        codes = {name: code for scan in reversed(scans) for name, code in scan.codes.items()}
        super().__init__(CsvScan(types, gaps, wide, codes))
        self._types = types

    def batches(self, names: Sequence[str]) -> Iterator[Batch]:
        """Yields the values of some columns, which may include `ROW`, row by row and file by file."""
        for path in self._paths:
            partitions: dict[str, Any] = self._partitions(path)
            partitions |= {name: int(partitions[name]) for name in partitions if self._types[name] == "int64"}
            stored = [name for name in names if name not in partitions and name != ROW]
            # Where only partitions are requested, another column gives the number of rows.
            stored = stored or [next(name for name in self._types if name not in partitions)]
            file_name, numbers = os.path.relpath(path, self._root or "."), count(1)
            with _as_source_error(path):
                for batch in _FORMATS[_suffix(path)][1](path, self._types, stored):
                    rows = len(batch[stored[0]])
                    yield {
                        name: [f"{file_name} row {next(numbers)}" for _ in range(rows)]
                        if name == ROW
                        else [partitions[name]] * rows
                        if name in partitions
                        else batch[name]
                        for name in names
                    }

    def _scan(self, path: str, overrides: Types) -> CsvScan:
        suffix, partitions = _suffix(path), self._partitions(path)
        if suffix not in _FORMATS or (csv_text.detect_codec(path)[0] and suffix == ".parquet"):
            raise SourceError(
                f"table {path!r} is none of {', '.join(_FORMATS)}, nor a text file of these with .gz or "
                f".zst; convert it to one, or name the files of a directory with a pattern, such as "
                f"{path}/**/*.parquet"
            )
        with _as_source_error(path):
            found = _FORMATS[suffix][0](path, overrides)
        if not found.types:
            raise SourceError(f"{path!r} is empty: it has no column")
        for name in partitions:
            if name in found.types:
                raise SourceError(f"{path!r} has a column {name!r} in it and in its path; rename one")
        whole = {name for name, value in partitions.items() if _WHOLE.fullmatch(value)}
        kinds = {
            name: "int64" if name in whole and overrides.get(name) != "text" else "string"
            for name in partitions
        }
        return found._replace(types={**found.types, **kinds})

    def _partitions(self, path: str) -> dict[str, str]:
        pairs = _PARTITION.findall(os.path.dirname(path)) if self._root is not None else ()
        return {unquote(name): unquote(value) for name, value in pairs}

    def _common_type(self, column: str, one: str, other: str, path: str) -> str:
        if one == other:
            return one
        if {one, other} == {"int64", "float32"}:
            return "float32"
        if {one, other} <= {"int64", "float32", "string"} and not path.endswith(".parquet"):
            return "string"  # types of text files are inferred from values
        raise SourceError(
            f"column {printable(column)!r} is {other} in {path!r}, and {one} in {self._paths[0]!r}; make the "
            "files' columns the same"
        )


def _suffix(path: str) -> str:
    return PurePosixPath(path.removesuffix(csv_text.detect_codec(path)[1])).suffix.lower()


def _parquet_types(path: str, overrides: Types) -> CsvScan:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    import pyarrow.types as kinds

    def type_name(kind: Any) -> str:
        if kinds.is_dictionary(kind):
            kind = kind.value_type
        if kinds.is_integer(kind) or kinds.is_boolean(kind):
            return "int64"
        if kinds.is_floating(kind):
            return "float32"
        if kinds.is_timestamp(kind) or kinds.is_date(kind):
            return "timestamp"
        if kinds.is_list(kind) or kinds.is_large_list(kind):
            return "strings" if type_name(kind.value_type) == "string" else str(kind)
        return "string" if kinds.is_string(kind) or kinds.is_large_string(kind) else str(kind)

    with remote_files.open_read(path) as file:
        opened = pq.ParquetFile(file)
        types = {field.name: type_name(field.type) for field in opened.schema_arrow}
        # Not by statistics, which a writer may leave out, and which crash the process where they are damaged.
        whole = [f.name for f in opened.schema_arrow if types[f.name] == "int64" and f.nullable]
        gaps, wide = set[str](), set[str]()
        for batch in opened.iter_batches(_PARQUET_ROWS, columns=whole) if whole else ():
            gaps |= {name for name in whole if batch[name].null_count}
            wide |= {name for name in whole if csv_text.is_wide(*pc.min_max(batch[name]).as_py().values())}
        return CsvScan(override_types(types, overrides), gaps, wide)


def override_types(types: Types, overrides: Types) -> Types:
    """Returns the types of columns that a file or a database declares, with overrides applied."""
    overridden = {name: COLUMN_TYPES.get(overrides.get(name, ""), kind) for name, kind in types.items()}
    fits = {
        name for name, kind in types.items() if kind in COLUMN_TYPES.values() or overrides.get(name) == "text"
    }
    return {name: overridden[name] if name in fits else kind for name, kind in types.items()}


def _parquet_batches(path: str, types: Types, names: Sequence[str]) -> Iterator[Batch]:
    import pyarrow.parquet as pq

    with remote_files.open_read(path) as file:
        for batch in pq.ParquetFile(file).iter_batches(_PARQUET_ROWS, columns=list(names)):
            yield as_lists(batch, types, names)


def as_lists(batch: Any, types: Types, names: Sequence[str]) -> Batch:
    """Returns some columns of a pyarrow.RecordBatch as lists of values of their types."""
    return {
        name: (
            column if types[name] not in _CONVERSIONS else column.cast(csv_text.arrow_type(types[name]))
        ).to_pylist()
        for name, column in zip(names, batch.select(list(names)).columns, strict=True)
    }


# Not through pyarrow.json, which takes a column's type from the first block and refuses the first float
# below whole numbers.
def _json_types(path: str, overrides: Types) -> CsvScan:
    types: dict[str, str] = {}
    present, wide = Counter[str](), set[str]()
    number = 0
    for number, row in enumerate(_json_rows(path), start=1):
        for name, value in row.items():
            if value is None:
                continue
            present[name] += 1
            kind = {float: "float32", str: "string"}.get(type(value), f"a {type(value).__name__}")
            if isinstance(value, int):
                kind = "int64" if -(2**63) <= value < 2**63 else "a number of more than 64 bits"
            elif isinstance(value, list) and all(isinstance(item, str) for item in value):
                kind = "strings"
            known = types.setdefault(name, kind)
            if kind == "int64" and not -EXACT <= value <= EXACT:
                wide.add(name)
            if {kind, known} == {"int64", "float32"}:
                types[name] = "float32"
            elif kind != known:
                raise SourceError(
                    f"{path!r}, row {number}: {reprlib.repr(value)} in column {name!r} is {kind}, in the "
                    f"rows before it is {known}; make them the same"
                )
    return CsvScan(override_types(types, overrides), {name for name in types if present[name] < number}, wide)


def _json_batches(path: str, types: Types, names: Sequence[str]) -> Iterator[Batch]:
    rows = _json_rows(path)
    # Booleans are converted to numbers, and whole numbers among floats to floats.
    conversions = {name: _CONVERSIONS[types[name]] for name in names}
    while batch := list(islice(rows, _JSON_ROWS)):
        yield {
            name: [None if (value := row.get(name)) is None else convert(value) for row in batch]
            for name, convert in conversions.items()
        }


def _json_rows(path: str) -> Iterator[dict[str, Any]]:
    with csv_text.open_decompressed(path) as plain:
        text = remote_files.as_text(plain)
        lines = (line for line in remote_files.lines(text, path) if not line.isspace())
        for number, line in enumerate(lines, start=1):
            what = f"{path!r}, row {number}"
            try:
                row = json.loads(line)
            except RecursionError:
                raise SourceError(f"{what} is nested too deeply") from None
            except ValueError as error:
                raise SourceError(f"{what} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise SourceError(f"{what} is {reprlib.repr(row)}, not a JSON object")
            yield row


@contextlib.contextmanager
def _as_source_error(path: str) -> Iterator[None]:
    """Turns errors of pyarrow about a file into a SourceError; a damaged one may raise anything."""
    try:
        yield
    except ShardlineError:
        raise
    except ImportError:
        raise SourceError("tables need pyarrow: pip install 'shardline[preprocess]'") from None
    except Exception as error:
        why = remote_files.reason(error)
        hint = "; save it as UTF-8 (iconv -f latin1 -t utf-8 FILE > NEW)" if "invalid UTF8" in why else ""
        raise SourceError(f"cannot read {path!r}: {why}{hint}") from None


_CSV, _JSON = (csv_text.scan_csv, csv_text.csv_batches), (_json_types, _json_batches)
#: Functions that find the types of a file's columns and that read them, by suffix.
_FORMATS: Mapping[
    str, tuple[Callable[[str, Types], CsvScan], Callable[[str, Types, Sequence[str]], Iterator[Batch]]]
] = {
    ".csv": _CSV,
    ".tsv": _CSV,
    ".jsonl": _JSON,
    ".ndjson": _JSON,
    ".parquet": (_parquet_types, _parquet_batches),
}


def open_table(path: str, overrides: Types = NO_TYPES) -> tuple[TypedColumns, str]:
    """Returns the columns of a table, a file or a pattern of files, and its directory.

    `overrides` are types of columns, as for `Columns`, whose errors are raised.
    """
    path = remote_files.resolve(path)
    if not (match := _PATTERN.search(path)):
        return Columns(path, overrides=overrides), os.path.dirname(path)
    root = path[: match.start()].rpartition("/")[0]
    return Columns(*find_files(path), overrides=overrides, root=root), root


def is_pattern(path: str) -> bool:
    """Returns whether a path is a pattern of files."""
    return bool(_PATTERN.search(path))
