"""Formats of a table's files, CSV, JSONL and Parquet, read as Arrow's record batches.

Of a CSV file the delimiter and the encoding are found, and unclosed quotes that swallow rows.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardline.components.preprocess.schema.targets import is_number
from shardline.components.storage import open_read
from shardline.components.text import reason
from shardline.trainer.base.errors import ShardlineError, SourceError

#: Bytes that are read at a time, about, and the most of one row.
BATCH_BYTES, LARGEST_ROW = 1 << 22, 1 << 26
#: Bytes of a CSV file that are read at a time, unless a row is larger.
BLOCK = 1 << 20
# Bytes for each column at least: a column of a batch costs as much as some hundred values.
_COLUMN = 2048

_BYTE_ORDER_MARKS = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}

# A row appended to a file: where it becomes a part of a value, a quote is not closed.
_END = "\x1e\x04"

# A value whose lines have as many cells as rows is taken for rows if this share of at least so many cells are
# numbers in columns of numbers; in a table of texts, if it has so many lines.
_SHARE, _NUMBERS, _LINES = 0.9, 2, 20

#: Yields some columns of a file, or all of them (None), in Arrow's batches of about so many bytes; of a CSV
#: file as text, whose quotes are checked.
Format = Callable[[str, Sequence[str] | None, int, "Quotes | None"], Iterator[Any]]


#: Formats of compression by their suffix, in pyarrow's terms.
_CODECS = {".gz": "gzip", ".zst": "zstd"}


def _suffixes(path: str) -> tuple[str, str]:
    """Returns the suffix of a file's format, and that of its compression or ""."""
    base, end = os.path.splitext(path.lower())
    return (os.path.splitext(base)[1], end) if end in _CODECS else (end, "")


def find_format(path: str) -> Format:
    """Returns the function that reads a file; SourceError if there is none for its suffix."""
    suffix, compression = _suffixes(path)
    if suffix not in _FORMATS or (compression and suffix == ".parquet"):
        raise SourceError(
            f"table {path!r} is none of {', '.join(_FORMATS)}, nor a text file of these with .gz or "
            f".zst; convert it to one, or name the files of a directory with a pattern, such as "
            f"{path}/**/*.parquet"
        )
    return _FORMATS[suffix]


@contextlib.contextmanager
def _open_decompressed(path: str) -> Iterator[Any]:
    compression = _suffixes(path)[1]
    with open_read(path) as file:
        if not compression:
            yield file
            return
        import pyarrow as pa

        with pa.CompressedInputStream(pa.PythonFile(file, "r"), _CODECS[compression]) as plain:
            yield plain


class _DecodedText(io.RawIOBase):
    """A CSV file, followed by a row `_END` of `columns` columns.

    Its `delimiter` is inferred from its first lines; its `encoding` is UTF-16 by its byte-order mark, else
    UTF-8.
    """

    def __init__(self, file: Any, columns: int = 0) -> None:
        # Not left to Arrow, which takes quotes after the mark for a part of the first name.
        self._file, block = file, bytes(file.read(BLOCK)).removeprefix(codecs.BOM_UTF8)
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

        Returns the batch without the row that was appended by `_DecodedText`.
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

    def finish(self, kinds: Mapping[str, str]) -> None:
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

    def _holds_rows(self, column: str, lines: Sequence[str], kinds: Mapping[str, str]) -> bool:
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


class RowTooLargeError(Exception):
    """A row is larger than the block that is read; `refusal` is its error."""

    def __init__(self, refusal: SourceError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def csv_batches(path: str, names: Sequence[str] | None, block: int, quotes: Quotes | None) -> Iterator[Any]:
    """Yields some columns of a CSV file as text, in batches; or all of them, to check their quotes."""
    import pyarrow as pa
    import pyarrow.csv

    header = _csv_header(path)
    wanted = [*header] if names is None else names
    types = {header[name]: pa.string() for name in wanted}
    with _open_decompressed(path) as file:
        stream = _DecodedText(file, len(header) if quotes else 0)
        try:
            with pyarrow.csv.open_csv(
                io.BufferedReader(stream, 1 << 20),
                # Messages name the row only with one thread.
                pyarrow.csv.ReadOptions(
                    use_threads=False,
                    encoding=stream.encoding,
                    block_size=max(block, _COLUMN * len(header)),
                ),
                pyarrow.csv.ParseOptions(delimiter=stream.delimiter, newlines_in_values=True),
                pyarrow.csv.ConvertOptions(column_types=types, include_columns=[*types]),
            ) as reader:
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
            raise (RowTooLargeError(refusal) if "straddling" in message else refusal) from None


def _csv_header(path: str) -> dict[str, str]:
    """Returns the columns of a CSV file as the header spells them, by their names without spaces around."""
    with _open_decompressed(path) as file:
        stream = _DecodedText(file)
        text = io.TextIOWrapper(io.BufferedReader(stream), stream.encoding, newline="")
        lines = csv.reader(iter(lambda: text.readline(LARGEST_ROW >> 2), ""), delimiter=stream.delimiter)
        header = next((line for line in lines if line), [])
    names = [name.strip() for name in header]
    for name, count in Counter(names).items():
        if not name:
            raise SourceError(f"{path!r} has a column without a name (an index of pandas?); name it")
        if count > 1:
            raise SourceError(f"{path!r} has a column {name!r} {count} times; rename it")
    return dict(zip(names, header, strict=True))


def _parquet_batches(path: str, names: Sequence[str] | None, *_: object) -> Iterator[Any]:
    """Yields some columns of a Parquet file, or all of them, in batches."""
    import pyarrow.parquet as pq

    with open_read(path) as file:
        opened = pq.ParquetFile(file, buffer_size=BLOCK, pre_buffer=False)
        facts = opened.metadata
        size = sum(facts.row_group(number).total_byte_size for number in range(facts.num_row_groups))
        rows = max(
            1, min(1 << 16, max(BATCH_BYTES, _COLUMN * facts.num_columns) * facts.num_rows // max(size, 1))
        )
        if not facts.num_rows:  # its columns
            yield opened.schema_arrow.empty_table()
        yield from opened.iter_batches(rows, columns=None if names is None else list(names))


# Not by one call of pyarrow.json, which takes a column's type from the first block and refuses the first
# float below whole numbers.
def _json_batches(path: str, names: Sequence[str] | None, *_: object) -> Iterator[Any]:
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
    with _open_decompressed(path) as file:
        rest = file.read(3).removeprefix(b"\xef\xbb\xbf")
        while block := file.read(BATCH_BYTES):
            end = block.rfind(b"\n") + 1
            if end:
                yield rest + block[:end]
                rest = block[end:]
            else:
                rest += block
            if len(rest) > LARGEST_ROW:
                raise SourceError(
                    f"{path!r} has a line of more than {LARGEST_ROW >> 20} MiB; a row is one line"
                )
        if rest.strip():
            yield rest


@contextlib.contextmanager
def as_source_error(path: str) -> Iterator[None]:
    """Turns errors of pyarrow about a file into a SourceError; a damaged one may raise anything."""
    try:
        yield
    except (ShardlineError, RowTooLargeError):
        raise
    except ImportError:
        raise SourceError("tables need pyarrow: pip install 'shardline[preprocess]'") from None
    except Exception as error:
        why = reason(error)
        hint = (
            "; save it as UTF-8 (iconv -f latin1 -t utf-8 FILE > NEW)"
            if "UTF8" in why or isinstance(error, UnicodeError)
            else ""
        )
        raise SourceError(f"cannot read {path!r}: {why}{hint}") from None


_FORMATS: Mapping[str, Format] = {
    ".csv": csv_batches,
    ".tsv": csv_batches,
    ".jsonl": _json_batches,
    ".ndjson": _json_batches,
    ".parquet": _parquet_batches,
}
