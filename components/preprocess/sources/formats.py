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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

from shardline.components.preprocess.lazy import np, pa, pc
from shardline.components.preprocess.schema import is_number
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

# A value whose lines have as many cells as rows is taken for rows if this share of at least so many cells are
# numbers in columns of numbers; in a table of texts, if it has so many lines.
_SHARE, _NUMBERS, _LINES = 0.9, 2, 20

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of a file that are read together, and without the others.

    Attributes:
        offset, size: Where they are in the file's text, in bytes; of a Parquet file, the number of the batch.
        first: Number of the first row, from 1.
        file: Number of the file.
    """

    offset: int
    size: int
    first: int
    file: int = 0


#: Yields some columns of a file, or all of them (None), of some blocks, which ascend, or of all (None), as
#: Arrow's batches; of a CSV file as text, whose quotes are checked.
Format = Callable[
    [str, Sequence[str] | None, Iterator[Block] | None, "Quotes | None"], Iterator[tuple[Block, Any]]
]


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


def chosen(items: Iterable[_Item], numbers: Iterator[int] | None) -> Iterator[_Item]:
    """Yields the items whose numbers, from 0, are some that ascend; all for None."""
    wanted = count() if numbers is None else numbers
    following = next(wanted, None)
    for number, item in enumerate(items):
        if number == following:
            yield item
            following = next(wanted, None)
        if following is None:
            return


class _Text(contextlib.AbstractContextManager["_Text"]):
    """Text of a file, decompressed, as UTF-8 without a byte-order mark; UTF-16 is known by its mark."""

    def __init__(self, path: str) -> None:
        self._path, compression = path, _suffixes(path)[1]
        self._file: Any = open_read(path)
        if compression:
            self._file = pa.CompressedInputStream(pa.PythonFile(self._file, "r"), _CODECS[compression])
        mark = bytes(self._file.read(3))
        encoding = _BYTE_ORDER_MARKS.get(mark[:2])
        self._decoder = codecs.getincrementaldecoder(encoding)() if encoding else None
        self._ahead = self._decode(mark[2:]) if encoding else mark.removeprefix(codecs.BOM_UTF8)
        self._offset = 0  # of what is read ahead
        self._can_seek, self._start = not (compression or encoding), len(mark) - len(self._ahead)

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _decode(self, data: bytes) -> bytes:
        return self._decoder.decode(data, final=not data).encode() if self._decoder else data

    def peek(self, size: int) -> bytes:
        """Returns the next bytes, so many or more, or what is left."""
        while len(self._ahead) < size:
            more = bytes(self._file.read(size - len(self._ahead)))
            self._ahead += self._decode(more)
            if not more:
                break
        return self._ahead

    def read_bytes(self, size: int) -> bytes:
        """Reads so many bytes, or what is left."""
        data = self.peek(size)[:size]
        self._ahead, self._offset = self._ahead[size:], self._offset + len(data)
        return data

    def _read_block(self, block: Block) -> bytes:
        if self._can_seek and block.offset > self._offset + len(self._ahead):
            self._file.seek(self._start + block.offset)
            self._ahead, self._offset = b"", block.offset
        while self._offset < block.offset and self.read_bytes(min(BLOCK, block.offset - self._offset)):
            pass
        return self.read_bytes(block.size)

    def blocks(
        self, wanted: Iterator[Block] | None, size: int, rows: Callable[[bytes], tuple[int, int]]
    ) -> Iterator[tuple[Block, bytes]]:
        """Yields the text of some blocks; or of all, which are found here, of whole rows and a size in bytes.

        `rows` returns where the last row of a text ends, 0 if none does, and where quotes open that it does
        not close, -1 if there are none.
        """
        if wanted is not None:
            yield from ((block, self._read_block(block)) for block in wanted)
            return
        data, more, line = b"", b"-", 1
        while more:
            more = self.read_bytes(max(size, len(data)))
            data += more
            end, opening = rows(data)
            if not more and opening >= 0:
                line += data.count(b"\n", 0, opening)
                raise SourceError(
                    f"{self._path!r} ends within the quotes that open in line {line:,}; close them"
                )
            if block := data[:end] if more else data:
                yield Block(self._offset - len(data), len(block), 0), block
            data, line = data[len(block) :], line + block.count(b"\n")
            if len(data) > LARGEST_ROW:
                large = f"has a row of more than {LARGEST_ROW >> 20} MiB from line {line:,} on"
                raise SourceError(
                    f"{self._path!r} {large}; in JSON it is one line, and in CSV quotes are closed"
                )


def _find_delimiter(text: str) -> str:
    """Returns the delimiter that all of the first lines have as often, else that of the header."""
    header, *rows = re.sub('"[^"]*"', "", text).split("\n")[:20]
    rows = [line for line in rows[:-1] if line.strip()]  # the last may be cut off
    found = [mark for mark in "\t;," if mark in header]
    even = [mark for mark in found if all(line.count(mark) == header.count(mark) for line in rows)]
    return max(even or found or [","], key=header.count)


def _row_ends(data: bytes, delimiter: bytes) -> tuple[int, int]:
    """Returns where the last row of a CSV file's text ends, and where quotes open, as for `_Text.blocks`."""
    content = np.frombuffer(b"\n" + data, np.uint8)
    at = np.flatnonzero(content == ord('"'))
    before, quotes = content[at[::2] - 1].tobytes(), at - 1
    # Those that open and close values take turns, unless one is in a value that has no quotes around it.
    if before.translate(None, b'"\r\n' + delimiter):
        value = re.compile(rb'(?<![^%b\r\n])"(?:[^"]++|"")*+(?P<end>"?)' % re.escape(delimiter))
        ends = ((found.start(), found.end() - 1, found["end"]) for found in value.finditer(data))
        quotes = np.array([at for start, end, closed in ends for at in (start, end)[: 1 + len(closed)]], int)
    number = len(quotes) - 1
    while number > 1 and quotes[number] == quotes[number - 1] + 1:  # two are one in a value
        number -= 2
    opening, end = (int(quotes[number]),) * 2 if len(quotes) % 2 else (-1, len(data))
    for start, last in quotes[: len(quotes) // 2 * 2].reshape(-1, 2)[::-1]:
        if found := max(data.rfind(mark, last, end) for mark in (b"\n", b"\r")) + 1:
            return found, opening
        end = start
    return max(data.rfind(mark, 0, end) for mark in (b"\n", b"\r")) + 1, opening


class Quotes:
    """Finds unclosed quotes that swallow rows of a CSV file, batch by batch of texts.

    `line` is the line in which the next row begins, unless there are empty lines.
    """

    def __init__(self, path: str) -> None:
        self._path, self.line, self._delimiter = path, 2, ","
        self._suspects: list[tuple[int, str, str]] = []

    def check_batch(self, batch: Any, delimiter: str, *, quoted: bool) -> None:
        """Notes values of several lines, which are `quoted`, that have delimiters as that many rows have."""
        added, suspects = np.zeros(batch.num_rows + 1, np.int64), list[tuple[int, str, str]]()
        for name, column in zip(batch.schema.names, batch.columns, strict=True) if quoted else ():
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

    def finish(self, kinds: Mapping[str, str]) -> None:
        """Raises SourceError where an unclosed quote swallows rows; `kinds` are the columns' types."""
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


def csv_batches(
    path: str, names: Sequence[str] | None, blocks: Iterator[Block] | None, quotes: Quotes | None
) -> Iterator[tuple[Block, Any]]:
    """Yields some columns of a CSV file as text, in batches; or all of them, to check their quotes."""
    import pyarrow.csv

    with _Text(path) as text:
        delimiter = _find_delimiter(text.peek(BLOCK)[:BLOCK].decode(errors="replace"))
        header = _csv_header(path, text.peek(BATCH_BYTES), delimiter)
        wanted = [*header] if names is None else names
        types = {header[name]: pa.string() for name in wanted}
        parsing = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
        converting = pyarrow.csv.ConvertOptions(column_types=types, include_columns=[*types])
        size, first = max(BLOCK, _COLUMN * len(header)), 1
        for block, data in text.blocks(blocks, size, lambda data: _row_ends(data, delimiter.encode())):
            if not data.strip(b"\r\n"):
                continue
            if not data.endswith((b"\r", b"\n")):
                data += b"\n"  # a header alone needs one
            first = block.first or first
            # The first block has the header; messages name the row only with one thread.
            known = [*header.values()] if block.offset else None
            reading = pyarrow.csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=known)
            try:
                table = pyarrow.csv.read_csv(pa.py_buffer(data), reading, parsing, converting)
            except pa.ArrowInvalid as error:
                message, _, more = str(error).partition("\n")
                message = _renumber(message, "Row #", first if known else 0)
                why = f"quotes contain more than a row ({message}); close them"
                raise pa.ArrowInvalid(why if more else message) from None
            batch = _one_batch(table.rename_columns(wanted))
            if quotes:
                quotes.check_batch(batch, delimiter, quoted=b'"' in data)
            yield replace(block, first=first), batch
            first += batch.num_rows


def _renumber(message: str, before: str, rows: int) -> str:
    """Returns a message in which the number of a row counts so many rows more."""
    return re.sub(rf"(?<={before})\d+", lambda row: f"{rows + int(row[0]):,}", message)


def _one_batch(table: Any) -> Any:
    """Returns all rows of a table."""
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)


def _csv_header(path: str, start: bytes, delimiter: str) -> dict[str, str]:
    """Returns the columns of a CSV file as the header spells them, by their names without spaces around."""
    text = io.TextIOWrapper(io.BytesIO(start), "utf-8", newline="")
    header = next((line for line in csv.reader(text, delimiter=delimiter) if line), [])
    names = [name.strip() for name in header]
    for name, times in Counter(names).items():
        if not name:
            raise SourceError(f"{path!r} has a column without a name (an index of pandas?); name it")
        if times > 1:
            raise SourceError(f"{path!r} has a column {name!r} {times} times; rename it")
    return dict(zip(names, header, strict=True))


def _parquet_batches(
    path: str, names: Sequence[str] | None, blocks: Iterator[Block] | None, _: object
) -> Iterator[tuple[Block, Any]]:
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
            yield Block(0, 0, 1), opened.schema_arrow.empty_table()
        batches = opened.iter_batches(rows, columns=None if names is None else list(names))
        numbers = None if blocks is None else (block.offset for block in blocks)
        yield from chosen(_numbered(batches), numbers)


def _numbered(batches: Iterable[Any]) -> Iterator[tuple[Block, Any]]:
    first = 1
    for number, batch in enumerate(batches):
        yield Block(number, 1, first), batch
        first += batch.num_rows


# Not by one call of pyarrow.json, which takes a column's type from the first block and refuses the first
# float below whole numbers.
def _json_batches(
    path: str, names: Sequence[str] | None, blocks: Iterator[Block] | None, _: object
) -> Iterator[tuple[Block, Any]]:
    """Yields some columns of a file of JSON objects, or all; without those that no object of a batch has."""
    with _Text(path) as text:
        texts, first = set[str](), 1
        for block, data in text.blocks(blocks, BATCH_BYTES, lambda data: (data.rfind(b"\n") + 1, -1)):
            if data.isspace():
                continue
            first = block.first or first
            batch = _parse_json(path, data, texts, first)
            found = [name for name in names or batch.schema.names if name in batch.schema.names]
            yield replace(block, first=first), batch.select(found)
            first += batch.num_rows


def _parse_json(path: str, data: bytes, texts: set[str], first: int) -> Any:
    """Parses objects; columns with times are added to `texts`, the columns that are read as they are."""
    import pyarrow.json

    reading = pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1)
    while True:
        parsing = pyarrow.json.ParseOptions(pa.schema([(name, pa.string()) for name in texts]))
        try:
            table = pyarrow.json.read_json(pa.py_buffer(data), reading, parsing)
        except pa.ArrowInvalid as error:
            why = _renumber(str(error), "in row ", first)
            raise SourceError(f"{path!r}: {why}; write an object of JSON in each line") from None
        times = {item.name for item in table.schema if pa.types.is_timestamp(item.type)}
        if not times:
            return _one_batch(table)
        texts |= times


@contextlib.contextmanager
def as_source_error(path: str) -> Iterator[None]:
    """Turns errors of pyarrow about a file into a SourceError; a damaged one may raise anything."""
    try:
        yield
    except ShardlineError:
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
