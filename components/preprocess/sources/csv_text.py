"""CSV text: its delimiter and encoding, the types of its values, and unclosed quotes that swallow rows."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple

from shardline.components.preprocess.schema.labels import is_number
from shardline.components.storage import remote_files
from shardline.trainer.base.errors import SourceError

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
            if names.count(name) > 1 or not name:
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
