"""Columns of a table in a file, CSV, JSONL or Parquet, or in many of them, read as batches of rows.

The types of columns are those that an Example can hold: int64 (booleans too), float32 and string; and for
labels strings, lists of text.
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
from typing import Any, TextIO
from urllib.parse import unquote

from shardline.components.preprocess import storage
from shardline.components.preprocess.listing import find_files
from shardline.components.preprocess.sources.csv_text import (
    EXACT,
    NOTHING_SAID,
    Batch,
    Found,
    Types,
    arrow_type,
    codec_of,
    csv_batches,
    csv_found,
    is_wide,
    opened,
)
from shardline.trainer.data.features import COLUMN_TYPES
from shardline.trainer.errors import ShardlineError, SourceError, printable

#: Names the rows in place of a column: the file, and the row's number in it from 1 on.
ROW = "\0row"

#: In place of a column too, where columns say so: the split that a row is in, and why it cannot be used.
SPLIT, FAULT = "\0split", "\0fault"

_PATTERN = re.compile(r"[*?\[]|\{[^{}]*,")
# Of a path such as year=2026/month=11/part-0.parquet.
_PARTITION = re.compile(r"([^/=]+)=([^/]*)")

_JSON_ROWS = 4096
_PARQUET_ROWS = 16_384
_INT64_LIMIT = 1 << 63
_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "int64": operator.index,  # of a boolean, and never of a float
    "float32": float,
    "string": str,
    "strings": list,
}


class TypedColumns:
    """Columns that can be read as batches of rows: of a file, or of a database.

    Attributes:
        types: "int64", "float32", "string", "strings", "bytes", or the place's own word for any other type,
            by column; with a length behind it, such as float32[3], for lists that all have it.
        gaps: Columns in which some rows are known to have no value.
        wide: Columns of whole numbers that are known to have some beyond those that 32-bit floats hold.
        codes: Columns that are text though their values could be read as numbers, and the first of those that
            would lose something of how they are written.
        guessed: Whether only the values say the types, as in CSV.
        about: What `batches` says of rows beside the columns: some of `ROW`, `SPLIT`, `FAULT`.
    """

    guessed = False
    about: Sequence[str] = ()

    def __init__(self, found: Found) -> None:
        self.types, self.gaps, self.wide, self.codes = found

    def batches(self, names: Sequence[str]) -> Iterator[Batch]:
        """Yields the values of some columns, row by row."""
        raise NotImplementedError


class Columns(TypedColumns):
    """Columns of a file whose name says its format.

    The types of CSV and JSONL are found by reading the file once: the narrowest that fits all. Attributes are
    those of `TypedColumns`; columns are in the order of the file.

    Args:
        path: The file.
        said: Types of columns in the words of `COLUMN_TYPES`; one with a ? behind it counts where only the
            values say the types, and they do not contradict.
        known: What an earlier look has found out.

    Raises:
        SourceError: The file cannot be read, has no rows, or a column is of another type.
    """

    def __init__(self, path: str, said: Types = NOTHING_SAID, known: Found | None = None) -> None:
        plain = path.removesuffix(codec_of(path)[1])
        suffix = PurePosixPath(plain).suffix.lower()
        if suffix not in _FORMATS or (plain != path and suffix == ".parquet"):
            raise SourceError(
                f"table {path!r} is none of {', '.join(_FORMATS)}, nor a text file of these with .gz or "
                f".zst; convert it to one, or name the files of a directory with a pattern, such as "
                f"{path}/**/*.parquet"
            )
        self._path, self.guessed = path, suffix == ".csv"
        find_types, self._read = _FORMATS[suffix]
        with _one_line(path):
            self.found = known or find_types(path, said)
        super().__init__(self.found)
        if not self.types:
            raise SourceError(f"{path!r} is empty: it has no column")

    def batches(self, names: Sequence[str]) -> Iterator[Batch]:
        """Yields the values of some columns, row by row of the file."""
        with _one_line(self._path):
            yield from self._read(self._path, self.found.types, names)


@contextlib.contextmanager
def _opened_text(path: str) -> Iterator[TextIO]:
    if not codec_of(path)[0]:
        with storage.open_text(path) as text:
            yield text
        return
    with opened(path) as plain:
        yield io.TextIOWrapper(io.BufferedReader(plain), "utf-8-sig", "surrogateescape", newline="")


def _parquet_types(path: str, said: Types) -> Found:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    import pyarrow.types as kinds

    def word(kind: Any) -> str:
        if kinds.is_dictionary(kind):
            kind = kind.value_type
        if kinds.is_integer(kind) or kinds.is_boolean(kind):
            return "int64"
        if kinds.is_floating(kind):
            return "float32"
        if kinds.is_timestamp(kind) or kinds.is_date(kind):
            return "timestamp"
        if kinds.is_list(kind) or kinds.is_large_list(kind):
            return "strings" if word(kind.value_type) == "string" else str(kind)
        return "string" if kinds.is_string(kind) or kinds.is_large_string(kind) else str(kind)

    with storage.open_read(path) as file:
        opened = pq.ParquetFile(file)
        types = {field.name: word(field.type) for field in opened.schema_arrow}
        # Not by statistics, which a writer may leave out, and which end the process where they are damaged.
        whole = [one.name for one in opened.schema_arrow if types[one.name] == "int64" and one.nullable]
        gaps, wide = set[str](), set[str]()
        for batch in opened.iter_batches(_PARQUET_ROWS, columns=whole) if whole else ():
            gaps |= {name for name in whole if batch[name].null_count}
            wide |= {name for name in whole if is_wide(*pc.min_max(batch[name]).as_py().values())}
        return Found(as_said(types, said), gaps, wide)


def as_said(types: Types, said: Types) -> Types:
    """Returns the types of columns that a file or a database declares, but for those that are said."""
    found = {name: COLUMN_TYPES.get(said.get(name, ""), kind) for name, kind in types.items()}
    fits = {name for name, kind in types.items() if kind in COLUMN_TYPES.values() or said.get(name) == "text"}
    return {name: found[name] if name in fits else kind for name, kind in types.items()}


def _parquet_batches(path: str, types: Types, names: Sequence[str]) -> Iterator[Batch]:
    import pyarrow.parquet as pq

    with storage.open_read(path) as file:
        for batch in pq.ParquetFile(file).iter_batches(_PARQUET_ROWS, columns=list(names)):
            yield as_lists(batch, types, names)


def as_lists(batch: Any, types: Types, names: Sequence[str]) -> Batch:
    """Returns some columns of a pyarrow.RecordBatch, as their types say."""
    return {
        name: (
            column if types[name] not in _CONVERSIONS else column.cast(arrow_type(types[name]))
        ).to_pylist()
        for name, column in zip(names, batch.select(list(names)).columns, strict=True)
    }


# Not through pyarrow.json, which takes a column's type from the first block and refuses the first float
# below whole numbers.
def _json_types(path: str, said: Types) -> Found:
    types: dict[str, str] = {}
    present, wide = Counter[str](), set[str]()
    number = 0
    for number, row in enumerate(_json_rows(path), start=1):
        for name, value in row.items():
            if value is None:
                continue
            present[name] += 1
            kind = _json_type(value)
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
    return Found(as_said(types, said), {name for name in types if present[name] < number}, wide)


def _json_batches(path: str, types: Types, names: Sequence[str]) -> Iterator[Batch]:
    rows = _json_rows(path)
    # A boolean is a number here, and so is a whole number among floats.
    conversions = {name: _CONVERSIONS[types[name]] for name in names}
    while batch := list(islice(rows, _JSON_ROWS)):
        yield {
            name: [None if (value := row.get(name)) is None else convert(value) for row in batch]
            for name, convert in conversions.items()
        }


def _json_rows(path: str) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a file, one in each line that is not empty."""
    with _opened_text(path) as text:
        lines = (line for line in storage.lines(text, path) if not line.isspace())
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


def _json_type(value: Any) -> str:
    if isinstance(value, int):
        return "int64" if -_INT64_LIMIT <= value < _INT64_LIMIT else "a number of more than 64 bits"
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return "strings"
    return {float: "float32", str: "string"}.get(type(value), f"a {type(value).__name__}")


@contextlib.contextmanager
def _one_line(path: str) -> Iterator[None]:
    """Turns what pyarrow raises about a file into one line; of a damaged one that may be anything."""
    try:
        yield
    except ShardlineError:
        raise
    except ImportError:
        raise SourceError("tables need pyarrow: pip install 'shardline[preprocess]'") from None
    except Exception as error:
        raise SourceError(f"cannot read {path!r}: {storage.reason(error)}") from None


_FindTypes = Callable[[str, Types], Found]
_ReadBatches = Callable[[str, Types, Sequence[str]], Iterator[Batch]]
_JSON = (_json_types, _json_batches)
_FORMATS: Mapping[str, tuple[_FindTypes, _ReadBatches]] = {
    ".csv": (csv_found, csv_batches),
    ".jsonl": _JSON,
    ".ndjson": _JSON,
    ".parquet": (_parquet_types, _parquet_batches),
}


def open_table(path: str, said: Types = NOTHING_SAID) -> tuple[TypedColumns, str]:
    """Returns the columns of a table, a file or a pattern of files, and the directory that it is in.

    `said` are types of columns, as `Columns` takes them.

    Raises:
        SourceError: No file matches, one cannot be read, or they have not the same columns.
    """
    path = storage.resolve(path)
    if not is_pattern(path):
        return Columns(path, said), os.path.dirname(path)
    root = path[: _PATTERN.search(path).start()].rpartition("/")[0]  # type: ignore[union-attr]
    return ManyFiles(root, find_files(path), said), root


def is_pattern(path: str) -> bool:
    """Returns whether a path stands for all files that match it."""
    return bool(_PATTERN.search(path))


class ManyFiles(TypedColumns):
    """Columns of several files, which are read one after the other in the order of their paths.

    Types are the narrowest that fit all files, those of the partitions in the paths int64, else string.
    """

    about = (ROW,)

    def __init__(self, root: str, paths: Sequence[str], said: Types) -> None:
        self._root, self._paths = root, paths
        found = [self._found(path, said) for path in paths]
        first = dict(found[0].types)
        for path, (types, *_) in zip(paths[1:], found[1:], strict=True):
            for column in sorted(first.keys() ^ types.keys()):
                has, lacks = (paths[0], path) if column in first else (path, paths[0])
                raise SourceError(
                    f"{lacks!r} has no column {column!r}, which {has!r} has; make the files' columns the same"
                )
            first = {name: self._joined(name, first[name], types[name], path) for name in first}
        gaps: Set[str] = frozenset().union(*(one.gaps for one in found))
        wide: Set[str] = frozenset().union(*(one.wide for one in found))
        codes = {name: code for one in reversed(found) for name, code in one.codes.items()}
        super().__init__(Found(first, gaps, wide, codes))
        self.guessed = any(".csv" in os.path.basename(path).lower() for path in paths)

    def batches(self, names: Sequence[str]) -> Iterator[Batch]:
        """Yields the values of some columns, `ROW` among them if wanted, row by row and file by file."""
        for path in self._paths:
            partitions = self._partitions(path)
            stored = [name for name in names if name not in partitions and name != ROW]
            # Where only partitions are wanted, some column says how many rows there are.
            stored = stored or [next(name for name in self.types if name not in partitions)]
            place, numbers = os.path.relpath(path, self._root or "."), count(1)
            for batch in Columns(path, known=Found(self.types)).batches(stored):
                rows = len(batch[stored[0]])
                yield {
                    name: [f"{place} row {next(numbers)}" for _ in range(rows)]
                    if name == ROW
                    else [partitions[name]] * rows
                    if name in partitions
                    else batch[name]
                    for name in names
                }

    def _found(self, path: str, said: Types) -> Found:
        columns, partitions = Columns(path, said), self._partitions(path, typed=False)
        for name in partitions:
            if name in columns.types:
                raise SourceError(f"{path!r} has a column {name!r} in it and in its path; rename one")
        kinds = {name: "int64" if _is_whole(str(value)) else "string" for name, value in partitions.items()}
        kinds |= {name: "string" for name in kinds if said.get(name) == "text"}
        return columns.found._replace(types={**columns.types, **kinds})

    def _partitions(self, path: str, *, typed: bool = True) -> dict[str, str | int]:
        found: dict[str, str | int] = {
            unquote(name): unquote(value) for name, value in _PARTITION.findall(os.path.dirname(path))
        }
        if typed:
            found = {
                name: int(value) if self.types[name] == "int64" else value for name, value in found.items()
            }
        return found

    def _joined(self, column: str, one: str, other: str, path: str) -> str:
        kinds = {one, other}
        if len(kinds) == 1:
            return one
        if kinds == {"int64", "float32"}:
            return "float32"
        if kinds <= {"int64", "float32", "string"} and not path.endswith(".parquet"):
            return "string"  # of text files only the values say the type
        raise SourceError(
            f"column {printable(column)!r} is {other} in {path!r}, and {one} in {self._paths[0]!r}; make the "
            "files' columns the same"
        )


def _is_whole(text: str) -> bool:
    return bool(re.fullmatch(r"-?(0|[1-9]\d*)", text)) and abs(int(text)) < 1 << 63
