"""Columns of a table in a file, CSV, JSONL or Parquet, or in many of them, read as batches of rows.

Of a CSV file, its delimiter and encoding, the types of its values, and unclosed quotes that swallow rows are
found by reading it once.
"""

from __future__ import annotations

import contextlib
import io
import json
import operator
import os
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import count, islice
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote

from shardline.components.preprocess.schema.labels import is_number
from shardline.components.storage import remote_files
from shardline.components.storage.remote_files import find_files
from shardline.trainer.base.errors import ShardlineError, SourceError, printable
from shardline.trainer.data.features import COLUMN_TYPES

#: Values of one batch, a list by column; None where there is none.
Batch = Mapping[str, Sequence[Any]]

#: Types of columns by name, as in `Columns.types`.
Types = Mapping[str, str]

#: No types are overrides of any column.
NO_TYPES: Types = MappingProxyType({})

#: Whole numbers up to this one are exact as floats of 32 bits.
EXACT = 1 << 24

_BLOCK = 1 << 20
_BYTE_ORDER_MARKS = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}

# A row appended to a file: where it becomes a part of a value, a quote is not closed.
_END = "\x1e\x04"

#: Texts that a number would change: a leading zero, a plus, a prefix, 12E4 (programs write 1e-05, 1e+20 or
#: 1.0E20), and in a column of floats digits beyond 64 bits.
CODE = r"^(\+|-?0[0-9xX]|-?[0-9]+[eE][0-9]+$)"
LONG_CODE = rf"{CODE}|^-?[0-9]{{19,}}$"

# A value whose lines have as many cells as rows is taken for rows if this share of at least so many cells are
# numbers in columns of numbers; in a table of texts, if it has so many lines.
_SHARE, _NUMBERS, _LINES = 0.9, 2, 20


class CsvScan(NamedTuple):
    """Properties of columns found before they are read; each as in `columns.TypedColumns`."""

    types: Types
    gaps: Set[str] = frozenset()
    wide: Set[str] = frozenset()
    codes: Mapping[str, str] = NO_TYPES


def detect_codec(path: str) -> tuple[str, str]:
    """Returns the compression of a file, in pyarrow's terms, and the suffix of its name for it."""
    ends = {".gz": "gzip", ".zst": "zstd"}
    return next(((codec, end) for end, codec in ends.items() if path.lower().endswith(end)), ("", ""))


@contextlib.contextmanager
def open_decompressed(path: str) -> Iterator[Any]:
    """Opens the decompressed content of a file."""
    codec, _ = detect_codec(path)
    with remote_files.open_read(path) as file:
        if not codec:
            yield file
            return
        import pyarrow as pa

        with pa.CompressedInputStream(pa.PythonFile(file, "r"), codec) as plain:
            yield plain


class DecodedText(io.RawIOBase):
    """A CSV file, followed by a row `_END` of `columns` columns.

    Its `delimiter` is inferred from its first line; its `encoding` is UTF-16 by its byte-order mark, else
    UTF-8.
    """

    def __init__(self, file: Any, columns: int = 0) -> None:
        self._file, block = file, file.read(_BLOCK)
        encoding = _BYTE_ORDER_MARKS.get(bytes(block[:2]), "utf-8")
        line = re.sub('"[^"]*"', "", block.decode(encoding, "replace")).partition("\n")[0]
        self.encoding, self.delimiter = encoding[:6].rstrip("-"), next((x for x in ",;\t" if x in line), ",")
        end = f"\n{self.delimiter.join([_END] * columns)}\n" if columns else ""
        self._block, self._end = memoryview(block), end.encode(encoding)

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads into a buffer."""
        if not self._block:
            block = self._file.read(len(buffer))
            if not block:
                block, self._end = self._end, b""
            self._block = memoryview(block)
        count = min(len(buffer), len(self._block))
        buffer[:count], self._block = self._block[:count], self._block[count:]
        return count


class ColumnTypes:
    """Finds the narrowest types that fit all values of a CSV file, batch by batch of texts.

    `line` is the line in which the next row begins, unless there are empty lines.
    """

    def __init__(self, names: Sequence[str], overrides: Mapping[str, str], delimiter: str) -> None:
        first = {"text": "string", "number": "float32"}
        self.types = {name: first.get(overrides.get(name, "").rstrip("?"), "int64") for name in names}
        self.gaps, self.wide, self.codes, self.line = set[str](), set[str](), dict[str, str](), 2
        self._overrides, self._delimiter, self._last, self._has_ended = overrides, delimiter, 1, False
        self._suspects: list[tuple[int, int, str]] = []

    def add(self, batch: Any) -> None:
        """Adds rows, the last of them that of `DecodedText`."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if batch.num_rows and all(column[-1].as_py() == _END for column in batch.columns):
            self._has_ended, batch = True, batch.slice(0, batch.num_rows - 1)
        for name, column in zip(self.types, batch.columns, strict=True):
            if column.null_count:
                self.gaps.add(name)
            text = pc.utf8_trim_whitespace(column)
            while (kind := self.types[name]) != "string":
                try:
                    numbers = pc.cast(text, pa.int64() if kind == "int64" else pa.float64())
                except pa.ArrowInvalid:
                    self.types[name] = {"int64": "float32", "float32": "string"}[kind]
                    continue
                if kind == "int64" and is_wide(*pc.min_max(numbers).as_py().values()):
                    self.wide.add(name)
                pattern = CODE if kind == "int64" else LONG_CODE
                codes = text.filter(pc.match_substring_regex(text, pattern))
                if len(codes) and name not in self._overrides:
                    self.types[name], self.codes[name] = "string", str(codes[0])
                break
        self._check_quotes(batch)

    def finish(self, path: str) -> CsvScan:
        """Returns the result; raises SourceError where an unclosed quote swallows rows."""
        if not self._has_ended:
            raise SourceError(f"{path!r} ends within the quotes that open in line {self._last:,}; close them")
        for line, column_index, value in self._suspects:
            if self._holds_rows(column_index, value.split("\n")):
                raise SourceError(
                    f"{path!r}, line {line:,}: the quotes that open there contain the next "
                    f"{value.count(chr(10)):,} lines, which are rows of the table; close them"
                )
        return CsvScan(self.types, self.gaps, self.wide, self.codes)

    def _check_quotes(self, batch: Any) -> None:
        """Notes values of several lines that have as many delimiters as that many rows."""
        import numpy as np
        import pyarrow.compute as pc

        def count(column: Any, text: str) -> Any:
            return pc.fill_null(pc.count_substring(column, text), 0).to_numpy()

        added, suspects = np.zeros(batch.num_rows + 1, np.int64), list[tuple[int, int, str]]()
        for column_index, (name, column) in enumerate(zip(self.types, batch.columns, strict=True)):
            if self.types[name] == "string" and (breaks := count(column, "\n")).any():
                added[1:] += breaks
                wanted = breaks * (len(self.types) - 1)
                rows = np.flatnonzero((wanted > 0) & (count(column, self._delimiter) == wanted))
                suspects += [(row, column_index, column[row].as_py()) for row in rows.tolist()]
        lines = self.line + np.cumsum(added) + np.arange(len(added))
        self._suspects += [(int(lines[row]), column_index, value) for row, column_index, value in suspects]
        self._last, self.line = int(lines[-2:][0]), int(lines[-1])

    def _holds_rows(self, column_index: int, lines: Sequence[str]) -> bool:
        first, *whole, last = (line.split(self._delimiter) for line in lines)
        kinds = [*self.types.values()]
        rows = [[""] * column_index + first, *whole, last + [""] * (len(kinds) - column_index - 1)]
        if any(len(row) != len(kinds) for row in rows):
            return False
        columns = [column for column, kind in enumerate(kinds) if column != column_index and kind != "string"]
        cells = [row[column] for row in rows for column in columns if row[column].strip()]
        if cells:
            return len(cells) >= _NUMBERS and sum(map(is_number, cells)) > _SHARE * len(cells)
        return len(lines) >= _LINES


def is_wide(least: int | None, largest: int | None) -> bool:
    """Returns whether some whole numbers between these are not exact as floats of 32 bits."""
    return max(abs(least or 0), abs(largest or 0)) > EXACT


def scan_csv(path: str, overrides: Types) -> CsvScan:
    """Scans the values of a CSV file for the properties of its columns."""
    import pyarrow as pa

    line = 2
    try:
        with open_decompressed(path) as file, _csv_reader(DecodedText(file)) as reader:
            names = reader.schema.names
        for name in names:
            if not name:
                raise SourceError(f"{path!r} has a column without a name (an index of pandas?); name it")
            if names.count(name) > 1:
                raise SourceError(f"{path!r} has a column {name!r} {names.count(name)} times; rename it")
        as_text = dict.fromkeys(names, pa.string())
        with open_decompressed(path) as file:
            stream = DecodedText(file, len(names))
            found = ColumnTypes(names, overrides, stream.delimiter)
            with _csv_reader(stream, as_text, empty_is_none=True) as reader:
                for batch in reader:
                    found.add(batch)
                    line = found.line
    except pa.ArrowInvalid as error:
        message, _, more = str(error).partition("\n")
        if not more and "straddling" not in message:
            raise
        why = f"quotes contain more than a row ({message}); close them"
        raise SourceError(f"cannot read {path!r} from line {line:,} on: {why}") from None
    return found.finish(path)


def csv_batches(path: str, types: Types, names: Sequence[str]) -> Iterator[Batch]:
    """Yields the values of some columns, row by row."""
    all_types = {name: arrow_type(kind) for name, kind in types.items()}
    with open_decompressed(path) as file, _csv_reader(DecodedText(file), all_types) as reader:
        for batch in reader:
            yield {name: batch[name].to_pylist() for name in names}


def _csv_reader(
    stream: DecodedText, types: Mapping[str, Any] | None = None, *, empty_is_none: bool = False
) -> Any:
    """Opens values below a header line. Empty fields and NA, null, NaN are missing values."""
    import pyarrow.csv

    return pyarrow.csv.open_csv(
        io.BufferedReader(stream, 1 << 20),
        # Messages name the row only with one thread.
        read_options=pyarrow.csv.ReadOptions(use_threads=False, encoding=stream.encoding),
        parse_options=pyarrow.csv.ParseOptions(delimiter=stream.delimiter, newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=empty_is_none),
    )


def arrow_type(kind: str) -> Any:
    """Returns the type of Arrow in which a column is read."""
    import pyarrow as pa

    # Floats are read with 64 bits and rounded to 32 when they are stored.
    text = pa.string()
    return {"int64": pa.int64(), "float32": pa.float64(), "string": text, "strings": pa.list_(text)}[kind]


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
        if suffix not in _FORMATS or (detect_codec(path)[0] and suffix == ".parquet"):
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
    return PurePosixPath(path.removesuffix(detect_codec(path)[1])).suffix.lower()


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
            wide |= {name for name in whole if is_wide(*pc.min_max(batch[name]).as_py().values())}
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
            column if types[name] not in _CONVERSIONS else column.cast(arrow_type(types[name]))
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
    with open_decompressed(path) as plain:
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


_CSV, _JSON = (scan_csv, csv_batches), (_json_types, _json_batches)
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
