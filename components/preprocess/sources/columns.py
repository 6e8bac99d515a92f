"""Columns of a table in a file: CSV, JSONL or Parquet, read as batches of rows.

The types of columns are those that an Example can hold: int64 (booleans too), float32 and string; and for
labels strings, lists of text.
"""

from __future__ import annotations

import contextlib
import io
import json
import operator
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import islice
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TextIO

from shardline.components.preprocess import storage
from shardline.components.preprocess.sources.csv_text import EXACT, ColumnTypes, Stream, is_wide
from shardline.trainer.data.features import COLUMN_TYPES
from shardline.trainer.errors import ShardlineError, SourceError

#: Values of one batch, a list by column; None where there is none.
Batch = Mapping[str, Sequence[Any]]

#: Types of columns by name, in the words of `Columns.types`.
Types = Mapping[str, str]

#: No types, in the words of `COLUMN_TYPES`, by column.
NOTHING_SAID: Types = MappingProxyType({})


class Found(NamedTuple):
    """What is found out of columns before they are read; each as `TypedColumns` has it."""

    types: Types
    gaps: Set[str] = frozenset()
    wide: Set[str] = frozenset()
    codes: Mapping[str, str] = NOTHING_SAID


_JSON_ROWS = 4096
_PARQUET_ROWS = 16_384
_INT64_LIMIT = 1 << 63
_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "int64": operator.index,  # of a boolean, and never of a float
    "float32": float,
    "string": str,
    "strings": list,
}


class Columns:
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
        plain = path.removesuffix(_codec(path)[1])
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
        self.types, self.gaps, self.wide, self.codes = self.found
        if not self.types:
            raise SourceError(f"{path!r} is empty: it has no column")

    def batches(self, names: Sequence[str]) -> Iterator[Batch]:
        """Yields the values of some columns, row by row of the file."""
        with _one_line(self._path):
            yield from self._read(self._path, self.types, names)


def _codec(path: str) -> tuple[str, str]:
    """Returns how a whole file is compressed, in pyarrow's words, and the end of its name that says so."""
    ends = {".gz": "gzip", ".zst": "zstd"}
    return next(((codec, end) for end, codec in ends.items() if path.lower().endswith(end)), ("", ""))


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Any]:
    """Opens the plain content of a file."""
    codec, _ = _codec(path)
    with storage.open_read(path) as file:
        if not codec:
            yield file
            return
        import pyarrow as pa

        with pa.CompressedInputStream(pa.PythonFile(file, "r"), codec) as plain:
            yield plain


@contextlib.contextmanager
def _opened_text(path: str) -> Iterator[TextIO]:
    if not _codec(path)[0]:
        with storage.open_text(path) as text:
            yield text
        return
    with _opened(path) as plain:
        yield io.TextIOWrapper(io.BufferedReader(plain), "utf-8-sig", "surrogateescape", newline="")


def _csv_types(path: str, said: Types) -> Found:
    import pyarrow as pa

    line = 2
    try:
        with _opened(path) as file, _csv_reader(Stream(file)) as reader:
            names = reader.schema.names
        for name in names:
            if names.count(name) > 1 or not name:
                raise SourceError(f"{path!r} has a column {name!r} {names.count(name)} times; rename it")
        as_text = dict.fromkeys(names, pa.string())
        with _opened(path) as file:
            stream = Stream(file, len(names))
            found = ColumnTypes(names, said, stream.delimiter)
            with _csv_reader(stream, as_text, empty_is_none=True) as reader:
                for batch in reader:
                    found.take(batch)
                    line = found.line
    except pa.ArrowInvalid as error:
        words, _, more = str(error).partition("\n")
        if not more and "straddling" not in words:
            raise
        where = f"{path!r} from line {line:,} on"
        raise SourceError(
            f"cannot read {where}: quotes take in more than a row ({words}); close them"
        ) from None
    found.finish(path)
    return Found(found.types, found.gaps, found.wide, found.codes)


def _csv_batches(path: str, types: Types, names: Sequence[str]) -> Iterator[Batch]:
    all_types = {name: _arrow_type(kind) for name, kind in types.items()}
    with _opened(path) as file, _csv_reader(Stream(file), all_types) as reader:
        for batch in reader:
            yield {name: batch[name].to_pylist() for name in names}


def _csv_reader(
    stream: Stream, types: Mapping[str, Any] | None = None, *, empty_is_none: bool = False
) -> Any:
    """Opens values below a line with the names. Empty fields and NA, null, NaN are no value."""
    import pyarrow.csv

    return pyarrow.csv.open_csv(
        io.BufferedReader(stream, 1 << 20),
        # Only with one thread do messages name the row.
        read_options=pyarrow.csv.ReadOptions(use_threads=False, encoding=stream.encoding),
        parse_options=pyarrow.csv.ParseOptions(delimiter=stream.delimiter, newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=empty_is_none),
    )


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
            column if types[name] not in _CONVERSIONS else column.cast(_arrow_type(types[name]))
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


def _arrow_type(kind: str) -> Any:
    import pyarrow as pa

    # Floats are read as they are and rounded to 32 bits when they are stored.
    text = pa.string()
    return {"int64": pa.int64(), "float32": pa.float64(), "string": text, "strings": pa.list_(text)}[kind]


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
    ".csv": (_csv_types, _csv_batches),
    ".jsonl": _JSON,
    ".ndjson": _JSON,
    ".parquet": (_parquet_types, _parquet_batches),
}


class TypedColumns(Protocol):
    """Columns that can be read as batches of rows: of a file, or of a database.

    Attributes:
        types: "int64", "float32", "string", "strings", "bytes", or the place's own word for any other type,
            by column; with a length behind it, such as float32[3], for lists that all have it.
        gaps: Columns in which some rows are known to have no value.
        wide: Columns of whole numbers that are known to have some beyond those that 32-bit floats hold.
        codes: Columns that are text though their values could be read as numbers, and the first of those that
            would lose something of how they are written.
        guessed: Whether only the values say the types, as in CSV.
    """

    types: Types
    gaps: Set[str]
    wide: Set[str]
    codes: Mapping[str, str]
    guessed: bool

    def batches(self, names: Sequence[str]) -> Iterator[Batch]:
        """Yields the values of some columns, row by row."""
