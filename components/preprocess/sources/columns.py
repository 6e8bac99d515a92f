"""Columns of a table in a file, CSV, JSONL or Parquet, or in many of them, read as Arrow's record batches.

Batches are bounded by bytes. The types of columns are found by reading the files once, and of a CSV file also
its delimiter and encoding, and unclosed quotes that swallow rows.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote

from shardline.components.preprocess.schema.labels import LARGEST_FLOAT, is_number
from shardline.components.preprocess.sources.forms import Form, TextScan, is_wide
from shardline.components.storage import remote_files
from shardline.components.storage.remote_files import find_files
from shardline.trainer.base.errors import ShardlineError, SourceError, printable
from shardline.trainer.data.features import COLUMN_TYPES

#: Types of columns by name, as in `Scan.types`.
Types = Mapping[str, str]

#: No types are overrides of any column.
NO_TYPES: Types = MappingProxyType({})

#: Bytes that are read at a time, about, and the most of one row.
BATCH_BYTES, _LARGEST_ROW = 1 << 22, 1 << 26

_BLOCK = 1 << 20
_BYTE_ORDER_MARKS = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}

# A row appended to a file: where it becomes a part of a value, a quote is not closed.
_END = "\x1e\x04"

# A value whose lines have as many cells as rows is taken for rows if this share of at least so many cells are
# numbers in columns of numbers; in a table of texts, if it has so many lines.
_SHARE, _NUMBERS, _LINES = 0.9, 2, 20

_PATTERN = re.compile(r"[*?\[]|\{[^{}]*,")
# Part of a path such as year=2026/month=11/part-0.parquet.
_PARTITION = re.compile(r"([^/=]+)=([^/]*)")


class Rows(NamedTuple):
    """Some rows of a table.

    Attributes:
        columns: Arrow's arrays by column, of the column's type, with null for a missing value: int64,
            float64, string, list<string>, binary, timestamp[us], or lists of one size.
        size: Number of rows.
        place, first: What rows are called in messages, such as "part.csv row", and the number of the first.
        split: Split that the source assigns to all of them, None for none.
        faults: Why rows cannot be used, by their index.
        keys: Keys of rows without a column key; their names if there are none.
        path: The file that they are in.
    """

    columns: Mapping[str, Any]
    size: int
    place: str = "row"
    first: int = 1
    split: str | None = None
    faults: Mapping[int, str] = MappingProxyType({})
    keys: Sequence[str] = ()
    path: str = ""

    def name(self, index: int) -> str:
        """Returns the name of a row."""
        return f"{self.place} {self.first + index}"


@dataclass(frozen=True)
class Scan:
    """Facts about columns, found before they are read.

    Attributes:
        types: "int64", "float32", "string", "strings", "bytes", "time", "date", or the format's name of any
            other type, by column; with a length at the end, such as float32[3], for lists that all have it.
        gaps: Columns in which some rows are known to have no value.
        wide: Columns of whole numbers, some of which are known not to be exact as 32-bit floats.
        forms: How values of text become those of the type, by column.
        block: Bytes of a CSV file that are read at a time.
        batches, rows: Number of batches and of rows; 0 where that is not known.
    """

    types: dict[str, str]
    gaps: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()
    forms: dict[str, Form] = field(default_factory=dict)
    block: int = _BLOCK
    batches: int = 0
    rows: int = 0


def kind_of(kind: Any) -> str:
    """Returns the type of a column, as in `Scan.types`, of a type of Arrow's; "" for one without values."""
    import pyarrow.types as kinds

    if kinds.is_dictionary(kind):
        kind = kind.value_type
    if kinds.is_null(kind):
        return ""
    if kinds.is_integer(kind) or kinds.is_boolean(kind):
        return "int64"
    if kinds.is_floating(kind) or kinds.is_decimal(kind) or kinds.is_time(kind) or kinds.is_duration(kind):
        return "float32"
    if kinds.is_timestamp(kind):
        return "time"
    if kinds.is_date(kind):
        return "date"
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        of = kind_of(kind.value_type)
        return {"string": "strings", "": "lists"}.get(of, f"lists of {of}")
    if kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind):
        return "string"
    is_bytes = kinds.is_binary(kind) or kinds.is_large_binary(kind) or kinds.is_binary_view(kind)
    return "bytes" if is_bytes else " ".join(str(kind).split())[:60]


def typed(values: Any, kind: str, form: Form | None = None) -> Any:
    """Returns an array of Arrow's as one of a type of `Scan.types`, as in `Rows.columns`."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if kinds.is_dictionary(values.type):
        values = values.dictionary_decode()
    if form and form.kind != "string" and kind_of(values.type) == "string":
        return typed(form.apply(values.cast(pa.string())), kind)
    base, _, width = kind.partition("[")
    if width:
        size, found = int(width[:-1]), values.cast(pa.list_(arrow_type(base)))
        fitting = pc.equal(pc.list_value_length(found), size)
        found = pc.if_else(fitting, found, pa.scalar(None, found.type))
        return found.cast(pa.list_(arrow_type(base), size))
    if kinds.is_time(values.type):
        return pc.divide(values.cast(pa.time64("us")).cast(pa.int64()).cast(pa.float64()), 3.6e9)
    if kinds.is_duration(values.type):
        seconds = values.cast(pa.duration("us"), safe=False).cast(pa.int64()).cast(pa.float64())
        return pc.divide(seconds, 1e6)
    wanted = arrow_type(kind)
    if wanted is None or values.type == wanted:
        return values
    return values.cast(wanted, safe=not kinds.is_temporal(values.type))


def arrow_type(kind: str) -> Any:
    """Returns Arrow's type of a column in `Rows.columns`; None for one that is not used."""
    import pyarrow as pa

    # Floats are read with 64 bits and rounded to 32 when they are stored.
    text, time = pa.string(), pa.timestamp("us")
    known = {"int64": pa.int64(), "float32": pa.float64(), "string": text, "strings": pa.list_(text)}
    return {**known, "bytes": pa.binary(), "time": time, "date": time}.get(kind)


class ColumnScan:
    """Finds the type of a column, batch by batch.

    Args:
        name: The column.
        override: Its type as in `COLUMN_TYPES`, with a ? at its end if it is only expected; "" for none.
        guessed: Whether all values are text that may be numbers, as in CSV.
    """

    def __init__(self, name: str, override: str, *, guessed: bool) -> None:
        self._name, self._override, self._guessed = name, override, guessed
        self._text = TextScan(name, override)
        self._kind, self._first, self._sizes = "", "", set[int]()
        self.has_gaps = self.is_wide = False

    def add(self, values: Any, path: str) -> None:
        """Adds the values of a batch; SourceError if their type is another than in the batches before."""
        import pyarrow as pa
        import pyarrow.compute as pc

        kind = kind_of(values.type)
        self.has_gaps = self.has_gaps or bool(values.null_count)
        if kind == "int64" and not self.is_wide:
            self.is_wide = is_wide(*pc.min_max(typed(values, "int64")).as_py().values())
        elif kind == "float32" and not pa.types.is_decimal(values.type):
            self._check_whole(typed(values, kind), path)
        elif kind == "string":
            self._text.add(typed(values, "string").cast(pa.string()))
        elif kind.startswith(("lists", "strings")):
            self._sizes.update(pc.unique(pc.list_value_length(values).drop_null()).to_pylist())
        if not self._kind or {self._kind, kind} == {"lists", kind}:
            self._kind, self._first = kind or self._kind, path
        elif {kind, self._kind} == {"int64", "float32"}:
            self._kind = "float32"
        elif {kind, self._kind} == {"time", "date"}:
            self._kind = "time"
        elif kind not in ("", "lists", self._kind):
            where = f", and {self._kind} in {self._first!r}" if path != self._first else ", and elsewhere not"
            raise SourceError(
                f"column {printable(self._name)!r} is {kind} in {path!r}{where}; make the values the same"
            )

    def _check_whole(self, numbers: Any, path: str) -> None:
        """Raises SourceError for whole numbers that are no longer themselves as floats."""
        import pyarrow.compute as pc

        largest = pc.max(pc.abs(numbers)).as_py() or 0.0
        if 2.0**63 <= largest <= LARGEST_FLOAT and pc.all(pc.equal(numbers, pc.floor(numbers))).as_py():
            raise SourceError(
                f"{path!r} has a number of more than 64 bits in column {self._name!r}, {largest:.17g}, which "
                "a float changes; write it as text"
            )

    def finish(self) -> tuple[str, Form | None]:
        """Returns the type, and the form of text."""
        kind = self._kind or "float32"
        self.has_gaps = self.has_gaps or not self._kind
        if kind == "string":
            return self._text_type()
        if kind.startswith("lists") and len(self._sizes) == 1 and self._sizes != {0}:
            of = kind.removeprefix("lists of ")
            return (f"{of}[{self._sizes.pop()}]" if of in ("int64", "float32") else kind), None
        if kind.startswith("lists") and self._sizes:
            return f"{kind}, {min(self._sizes)} to {max(self._sizes)} values (pad them to one length)", None
        return override_type(kind, self._override), None

    def _text_type(self) -> tuple[str, Form | None]:
        form = self._text.finish()
        self.has_gaps = self.has_gaps or form.has_gaps
        self.is_wide = form.is_wide
        if form.kind in ("int64", "float32") and not self._guessed and not self._override:
            note = (
                f"column {self._name!r} is text that holds numbers; --column {self._name}=number reads them"
            )
            return "string", Form("string", note=note)
        return form.kind, form


def override_type(kind: str, override: str) -> str:
    """Returns the type of a column that a file or a database declares, with an override of `COLUMN_TYPES`."""
    fits = kind in COLUMN_TYPES.values() or override == "text"
    return COLUMN_TYPES.get(override, kind) if fits else kind


class TypedColumns:
    """Columns that can be read as batches of rows: of files, or of a database.

    Attributes:
        scan: Facts about them.
        guessed: Whether the types are inferred from the values, as in CSV.
    """

    guessed = False

    def __init__(self, scan: Scan) -> None:
        self.scan = scan

    @property
    def types(self) -> Types:
        """The type of each column, as in `Scan.types`."""
        return self.scan.types

    def keep_text(self, names: Collection[str], *, numbers: bool) -> None:
        """Keeps text as it is in some columns where it would become a time, or with `numbers` a number."""
        changed = {
            name
            for name, form in self.scan.forms.items()
            if name in names and (form.kind == "time" or (numbers and (form.decimal or form.fault)))
        }
        types = {name: "string" if name in changed else kind for name, kind in self.types.items()}
        kept = {name: form for name, form in self.scan.forms.items() if name not in changed}
        self.scan = replace(self.scan, types=types, forms=kept)

    def batches(self, names: Sequence[str], numbers: Iterator[int] | None = None) -> Iterator[Rows]:
        """Yields the values of some columns, row by row; only of some batches, whose numbers ascend."""
        raise NotImplementedError

    def values(self, name: str) -> Iterator[Any]:
        """Yields the values of a column, an array for each batch."""
        for rows in self.batches([name]):
            yield rows.columns[name]


class Columns(TypedColumns):
    """Columns of one or more files, read in the order of their paths; their names end with the format.

    Args:
        paths: The files.
        overrides: Types of columns as in `COLUMN_TYPES`; one with a ? at its end applies where the types are
            inferred from the values, and these do not contradict it.
        root: Directory to which names of rows of several files are relative, and below which partitions are
            columns; else None.
        scan: What an earlier scan of the same files has found; None to scan them.

    Raises:
        SourceError: A file cannot be read or has no column, or the files' columns differ.
    """

    def __init__(
        self,
        *paths: str,
        overrides: Types = NO_TYPES,
        root: str | None = None,
        scan: Scan | None = None,
    ) -> None:
        self._paths, self._root = paths, root
        for path in paths:
            _check_format(path)
        self.guessed = any(_FORMATS[_suffix(path)] is csv_batches for path in paths)
        super().__init__(scan or self._scan(overrides))

    def batches(self, names: Sequence[str], numbers: Iterator[int] | None = None) -> Iterator[Rows]:
        """Yields the values of some columns, row by row and file by file; or of some batches."""
        wanted = numbers or count()
        number, following = 0, next(wanted, None)
        for path in self._paths:
            partitions = self._partitions(path)
            stored = [name for name in names if name not in partitions]
            # Where only partitions are requested, another column gives the number of rows.
            stored = stored or [next(name for name in self.types if name not in partitions)]
            place = "row" if self._root is None else f"{os.path.relpath(path, self._root)} row"
            first = 1
            with _as_source_error(path):
                for batch in _FORMATS[_suffix(path)](path, stored, self.scan.block, None):
                    if number == following:
                        columns = {n: self._typed(n, batch, partitions) for n in names}
                        yield Rows(columns, batch.num_rows, place, first)
                        following = next(wanted, None)
                    if following is None:
                        return
                    number, first = number + 1, first + batch.num_rows

    def _typed(self, name: str, batch: Any, partitions: Mapping[str, str]) -> Any:
        import pyarrow as pa

        kind = self.types[name]
        if name in partitions:
            values = pa.repeat(pa.scalar(partitions[name]), batch.num_rows)
        elif name in batch.schema.names:
            values = batch[name]
        else:  # no row of a batch of JSON has it
            values = pa.nulls(batch.num_rows)
        return typed(values, kind, self.scan.forms.get(name))

    def _scan(self, overrides: Types) -> Scan:
        block = _BLOCK
        while True:
            try:
                return self._scan_in_blocks(overrides, block)
            except _RowTooLargeError as error:
                block *= 8
                if block > _LARGEST_ROW:
                    raise error.refusal from None

    def _scan_in_blocks(self, overrides: Types, block: int) -> Scan:
        found, batches, rows = dict[str, ColumnScan](), 0, 0
        quotes = {path: Quotes(path) for path in self._paths if _FORMATS[_suffix(path)] is csv_batches}
        for path in self._paths:
            own = dict[str, None]()
            for columns in self._all_columns(path, block, quotes.get(path)):
                own |= dict.fromkeys(columns)
                batches, rows = (
                    batches + 1,
                    rows + max((len(values) for values, _ in columns.values()), default=0),
                )
                for name, (values, guessed) in columns.items():
                    if name not in found:
                        found[name] = ColumnScan(name, overrides.get(name, ""), guessed=guessed)
                    found[name].add(values, path)
            if not own:
                raise SourceError(f"{path!r} is empty: it has no column")
            for column in sorted(own.keys() ^ found.keys()):
                has, lacks = (self._paths[0], path) if column not in own else (path, self._paths[0])
                raise SourceError(
                    f"{lacks!r} has no column {column!r}, which {has!r} has; make the files' columns the same"
                )
        return replace(_finish_scan(found, quotes.values(), block), batches=batches, rows=rows)

    def _all_columns(
        self, path: str, block: int, quotes: Quotes | None
    ) -> Iterator[Mapping[str, tuple[Any, bool]]]:
        """Yields all columns of a file, batch by batch, and whether they are text that may be numbers."""
        import pyarrow as pa

        partitions = {name: (pa.array([value]), True) for name, value in self._partitions(path).items()}
        with _as_source_error(path):
            for batch in _FORMATS[_suffix(path)](path, None, block, quotes):
                if twice := partitions.keys() & {*batch.schema.names}:
                    raise SourceError(
                        f"{path!r} has a column {min(twice)!r} in it and in its path; rename one"
                    )
                columns = zip(batch.schema.names, batch.columns, strict=True)
                yield {name: (values, self.guessed) for name, values in columns} | partitions

    def _partitions(self, path: str) -> dict[str, str]:
        below = os.path.relpath(os.path.dirname(path), self._root) if self._root is not None else ""
        return {unquote(name): unquote(value) for name, value in _PARTITION.findall(below)}


def _finish_scan(found: Mapping[str, ColumnScan], quotes: Iterable[Quotes], block: int) -> Scan:
    results, faults = dict[str, tuple[str, Form | None]](), list[SourceError]()
    for name, column in found.items():
        try:
            results[name] = column.finish()
        except SourceError as error:
            results[name] = "string", None
            faults.append(error)
    types = {name: kind for name, (kind, _) in results.items()}
    for check in quotes:
        check.finish(types)
    for fault in faults:
        raise fault
    return Scan(
        types=types,
        gaps=tuple(name for name, column in found.items() if column.has_gaps),
        wide=tuple(name for name, column in found.items() if column.is_wide),
        forms={name: form for name, (_, form) in results.items() if form},
        block=block,
    )


def _suffix(path: str) -> str:
    return PurePosixPath(path.removesuffix(detect_codec(path)[1])).suffix.lower()


def _check_format(path: str) -> None:
    suffix = _suffix(path)
    if suffix not in _FORMATS or (detect_codec(path)[0] and suffix == ".parquet"):
        raise SourceError(
            f"table {path!r} is none of {', '.join(_FORMATS)}, nor a text file of these with .gz or "
            f".zst; convert it to one, or name the files of a directory with a pattern, such as "
            f"{path}/**/*.parquet"
        )


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

    Its `delimiter` is inferred from its first lines; its `encoding` is UTF-16 by its byte-order mark, else
    UTF-8.
    """

    def __init__(self, file: Any, columns: int = 0) -> None:
        # Not left to Arrow, which takes quotes after the mark for a part of the first name.
        self._file, block = file, bytes(file.read(_BLOCK)).removeprefix(codecs.BOM_UTF8)
        encoding = _BYTE_ORDER_MARKS.get(bytes(block[:2]), "utf-8")
        text = re.sub('"[^"]*"', "", block.decode(encoding, "replace"))
        self.encoding, self.delimiter = encoding[:6].rstrip("-"), _find_delimiter(text.split("\n")[:20])
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


def _find_delimiter(lines: Sequence[str]) -> str:
    """Returns the delimiter that all of the first lines have as often, else that of the header."""
    header, *rows = lines
    rows = [line for line in rows[:-1] if line.strip()]  # the last may be cut off
    found = [mark for mark in "\t;," if mark in header]
    even = [mark for mark in found if all(line.count(mark) == header.count(mark) for line in rows)]
    return max(even or found or [","], key=header.count)


class Quotes:
    """Finds unclosed quotes that swallow rows of a CSV file, batch by batch of texts.

    `line` is the line in which the next row begins, unless there are empty lines.
    """

    def __init__(self, path: str) -> None:
        self._path, self.line, self._last, self._delimiter = path, 2, 1, ","
        self._suspects: list[tuple[int, str, str]] = []

    def check(self, batch: Any, delimiter: str) -> Any:
        """Notes values of several lines that have as many delimiters as that many rows.

        Returns the batch without the row that was appended by `DecodedText`.
        """
        import numpy as np
        import pyarrow.compute as pc

        if batch.num_rows and all(column[-1].as_py() == _END for column in batch.columns):
            self._last, batch = -self._last, batch.slice(0, batch.num_rows - 1)
        added, suspects = np.zeros(batch.num_rows + 1, np.int64), list[tuple[int, str, str]]()
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if not pc.any(pc.match_substring(column, "\n")).as_py():
                continue
            breaks = pc.count_substring(column, "\n").to_numpy()
            added[1:] += breaks
            wanted = breaks * (batch.num_columns - 1)
            is_suspect = (wanted > 0) & (pc.count_substring(column, delimiter).to_numpy() == wanted)
            suspects += [(row, name, column[row].as_py()) for row in np.flatnonzero(is_suspect).tolist()]
        lines = self.line + np.cumsum(added) + np.arange(len(added))
        self._suspects += [(int(lines[row]), name, value) for row, name, value in suspects]
        self._delimiter, self.line = delimiter, int(lines[-1])
        if self._last > 0:
            self._last = int(lines[-2:][0])
        return batch

    def finish(self, kinds: Types) -> None:
        """Raises SourceError where an unclosed quote swallows rows; `kinds` are the columns' types."""
        if self._last > 0:
            raise SourceError(
                f"{self._path!r} ends within the quotes that open in line {self._last:,}; close them"
            )
        for line, column, value in self._suspects:
            if self._holds_rows(column, value.split("\n"), kinds):
                raise SourceError(
                    f"{self._path!r}, line {line:,}: the quotes that open there contain the next "
                    f"{value.count(chr(10)):,} lines, which are rows of the table; close them"
                )

    def _holds_rows(self, column: str, lines: Sequence[str], kinds: Types) -> bool:
        index = [*kinds].index(column)
        first, *whole, last = (line.split(self._delimiter) for line in lines)
        rows = [[""] * index + first, *whole, last + [""] * (len(kinds) - index - 1)]
        if any(len(row) != len(kinds) for row in rows):
            return False
        others = [i for i, (name, kind) in enumerate(kinds.items()) if name != column and kind != "string"]
        cells = [row[i] for row in rows for i in others if row[i].strip()]
        if cells:
            return len(cells) >= _NUMBERS and sum(map(is_number, cells)) > _SHARE * len(cells)
        return len(lines) >= _LINES


class _RowTooLargeError(Exception):
    """A row is larger than the block that is read; `refusal` is its error."""

    def __init__(self, refusal: SourceError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def csv_batches(
    path: str, names: Sequence[str] | None, block: int, quotes: Quotes | None = None
) -> Iterator[Any]:
    """Yields some columns of a CSV file as text, in batches; or all of them, to check their quotes."""
    import pyarrow as pa

    header = _csv_header(path)
    wanted = [*header] if names is None else names
    with open_decompressed(path) as file:
        stream = DecodedText(file, len(header) if quotes else 0)
        try:
            with _csv_reader(stream, block, [header[name] for name in wanted]) as reader:
                for batch in reader:
                    batch = batch.rename_columns(wanted)
                    yield quotes.check(batch, stream.delimiter) if quotes else batch
        except pa.ArrowInvalid as error:
            message, _, more = str(error).partition("\n")
            if not more and "straddling" not in message:
                raise
            line = quotes.line if quotes else 1
            why = f"quotes contain more than a row ({message}); close them"
            refusal = SourceError(f"cannot read {path!r} from line {line:,} on: {why}")
            raise (_RowTooLargeError(refusal) if "straddling" in message else refusal) from None


def _csv_header(path: str) -> dict[str, str]:
    """Returns the columns of a CSV file as the header spells them, by their names without spaces around."""
    with open_decompressed(path) as file:
        stream = DecodedText(file)
        text = io.TextIOWrapper(io.BufferedReader(stream), stream.encoding, "replace", newline="")
        lines = csv.reader(text, delimiter=stream.delimiter)
        header = next((line for line in lines if line), [])
    names = [name.strip() for name in header]
    for name in names:
        if not name:
            raise SourceError(f"{path!r} has a column without a name (an index of pandas?); name it")
        if names.count(name) > 1:
            raise SourceError(f"{path!r} has a column {name!r} {names.count(name)} times; rename it")
    return dict(zip(names, header, strict=True))


def _csv_reader(stream: DecodedText, block: int, columns: Sequence[str] = ()) -> Any:
    """Opens some columns, or all, below a header line as they are, as text."""
    import pyarrow as pa
    import pyarrow.csv

    return pyarrow.csv.open_csv(
        io.BufferedReader(stream, 1 << 20),
        # Messages name the row only with one thread.
        read_options=pyarrow.csv.ReadOptions(use_threads=False, encoding=stream.encoding, block_size=block),
        parse_options=pyarrow.csv.ParseOptions(delimiter=stream.delimiter, newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(columns, pa.string()), include_columns=columns
        ),
    )


def parquet_batches(
    path: str, names: Sequence[str] | None, block: int, quotes: Quotes | None = None
) -> Iterator[Any]:
    """Yields some columns of a Parquet file, or all of them, in batches."""
    import pyarrow.parquet as pq

    with remote_files.open_read(path) as file:
        opened = pq.ParquetFile(file, buffer_size=_BLOCK, pre_buffer=False)
        facts = opened.metadata
        size = sum(facts.row_group(number).total_byte_size for number in range(facts.num_row_groups))
        rows = max(1, min(1 << 16, BATCH_BYTES * facts.num_rows // max(size, 1)))
        if not facts.num_rows:  # its columns
            yield opened.schema_arrow.empty_table()
        yield from opened.iter_batches(rows, columns=None if names is None else list(names))


# Not by one call of pyarrow.json, which takes a column's type from the first block and refuses the first
# float below whole numbers.
def json_batches(
    path: str, names: Sequence[str] | None, block: int, quotes: Quotes | None = None
) -> Iterator[Any]:
    """Yields some columns of a file of JSON objects, or all; without those that no object of a batch has."""
    import pyarrow as pa
    import pyarrow.json

    texts, first = set[str](), 1
    for data in _line_blocks(path):
        while True:
            parsing = pyarrow.json.ParseOptions(pa.schema([(name, pa.string()) for name in texts]))
            reading = pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1)
            try:
                table = pyarrow.json.read_json(pa.py_buffer(data), reading, parsing)
            except pa.ArrowInvalid as error:
                why = re.sub(r"(?<=in row )\d+", lambda row: f"{first + int(row[0]):,}", str(error))  # noqa: B023
                raise SourceError(f"{path!r}: {why}; write an object of JSON in each line") from None
            times = {item.name for item in table.schema if pa.types.is_timestamp(item.type)}
            if not times:
                break
            texts |= times  # texts that look like times are read as they are
        first += table.num_rows
        for batch in table.combine_chunks().to_batches():
            yield batch if names is None else batch.select([n for n in names if n in batch.schema.names])


def _line_blocks(path: str) -> Iterator[bytes]:
    """Yields the content of a file in blocks of whole lines."""
    with open_decompressed(path) as file:
        rest = file.read(3).removeprefix(b"\xef\xbb\xbf")
        while block := file.read(BATCH_BYTES):
            end = block.rfind(b"\n") + 1
            if end:
                yield rest + block[:end]
                rest = block[end:]
            else:
                rest += block
            if len(rest) > _LARGEST_ROW:
                raise SourceError(
                    f"{path!r} has a line of more than {_LARGEST_ROW >> 20} MiB; a row is one line"
                )
        if rest.strip():
            yield rest


@contextlib.contextmanager
def _as_source_error(path: str) -> Iterator[None]:
    """Turns errors of pyarrow about a file into a SourceError; a damaged one may raise anything."""
    try:
        yield
    except (ShardlineError, _RowTooLargeError):
        raise
    except ImportError:
        raise SourceError("tables need pyarrow: pip install 'shardline[preprocess]'") from None
    except Exception as error:
        why = remote_files.reason(error)
        hint = "; save it as UTF-8 (iconv -f latin1 -t utf-8 FILE > NEW)" if "invalid UTF8" in why else ""
        raise SourceError(f"cannot read {path!r}: {why}{hint}") from None


#: Functions that read a file in batches of Arrow's, by suffix.
_FORMATS: Mapping[str, Callable[[str, Sequence[str] | None, int, Quotes | None], Iterator[Any]]] = {
    ".csv": csv_batches,
    ".tsv": csv_batches,
    ".jsonl": json_batches,
    ".ndjson": json_batches,
    ".parquet": parquet_batches,
}


def open_table(path: str, overrides: Types = NO_TYPES, scan: Scan | None = None) -> tuple[TypedColumns, str]:
    """Returns the columns of a table, a file or a pattern of files, and its directory.

    Arguments and errors are those of `Columns`.
    """
    path = remote_files.resolve(path)
    if not (match := _PATTERN.search(path)):
        return Columns(path, overrides=overrides, scan=scan), os.path.dirname(path)
    root = path[: match.start()].rpartition("/")[0]
    return Columns(*find_files(path), overrides=overrides, root=root, scan=scan), root


def is_pattern(path: str) -> bool:
    """Returns whether a path is a pattern of files."""
    return bool(_PATTERN.search(path))
