"""Tables: CSV, JSONL or Parquet files with a row per example, a column per feature, and images if wanted.

The types of columns are those that an Example can hold: int64 (booleans too), float32 and string.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import PurePosixPath
from typing import Any, Protocol

from shardline.components.preprocess import storage
from shardline.components.preprocess.sources import LARGEST_LABEL, WHOLE_FILE, BadExample, Example, Span
from shardline.components.preprocess.sources.images import is_outside
from shardline.trainer.data.features import Feature
from shardline.trainer.errors import ShardlineError, SourceError, printable

#: Values of one batch, a list by column; None where there is none.
Batch = Mapping[str, Sequence[Any]]

#: Types of columns by name, in the words of `Columns.types`.
Types = Mapping[str, str]

_JSON_ROWS = 4096
_PARQUET_ROWS = 16_384
_INT64_LIMIT = 1 << 63
_CONVERSIONS: Mapping[str, type] = {"int64": int, "float32": float, "string": str}
_ROLES = ("label", "image", "key")
_LARGEST_FLOAT32 = 3.4028235677973366e38


class Columns:
    """Columns of a file whose name says its format.

    Attributes:
        types: "int64", "float32", "string", or the file's own word for any other type, by column in the order
            of the file. Those of CSV and JSONL are found by reading it once: the narrowest that fits all.

    Raises:
        SourceError: The file cannot be read, has no rows, or a column is of another type.
    """

    def __init__(self, path: str) -> None:
        suffix = PurePosixPath(path).suffix.lower()
        if suffix not in _FORMATS:
            raise SourceError(f"table {path!r} is none of {', '.join(_FORMATS)}; convert it to one")
        self._path = path
        find_types, self._read = _FORMATS[suffix]
        with _one_line(path):
            self.types = find_types(path)
        if not self.types:
            raise SourceError(f"{path!r} is empty: it has no column")

    def batches(self, names: Sequence[str]) -> Iterator[Batch]:
        """Yields the values of some columns, row by row of the file."""
        with _one_line(self._path):
            yield from self._read(self._path, self.types, names)


def _csv_types(path: str) -> Types:
    import pyarrow as pa
    import pyarrow.compute as pc

    with storage.open_read(path) as file, _csv_reader(file) as reader:
        names = reader.schema.names
    for name in names:
        if names.count(name) > 1 or not name:
            raise SourceError(f"{path!r} has a column {name!r} {names.count(name)} times; rename it")
    types = dict.fromkeys(names, "int64")
    as_text = dict.fromkeys(names, pa.string())
    with storage.open_read(path) as file, _csv_reader(file, as_text, empty_is_none=True) as reader:
        for batch in reader:
            for name, column in zip(names, batch.columns, strict=True):
                while types[name] != "string":
                    try:
                        pc.cast(pc.utf8_trim_whitespace(column), _arrow_type(types[name]))
                        break
                    except pa.ArrowInvalid:
                        types[name] = {"int64": "float32", "float32": "string"}[types[name]]
    return types


def _csv_batches(path: str, types: Types, names: Sequence[str]) -> Iterator[Batch]:
    all_types = {name: _arrow_type(kind) for name, kind in types.items()}
    with storage.open_read(path) as file, _csv_reader(file, all_types) as reader:
        for batch in reader:
            yield {name: batch[name].to_pylist() for name in names}


def _csv_reader(file: Any, types: Mapping[str, Any] | None = None, *, empty_is_none: bool = False) -> Any:
    """Opens values below a line with the names. Empty fields and NA, null, NaN are no value."""
    import pyarrow.csv

    return pyarrow.csv.open_csv(
        file,
        # Only with one thread do messages name the row.
        read_options=pyarrow.csv.ReadOptions(use_threads=False),
        convert_options=pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=empty_is_none),
    )


def _parquet_types(path: str) -> Types:
    import pyarrow.parquet as pq
    import pyarrow.types as kinds

    def word(kind: Any) -> str:
        if kinds.is_dictionary(kind):
            kind = kind.value_type
        if kinds.is_integer(kind) or kinds.is_boolean(kind):
            return "int64"
        if kinds.is_floating(kind):
            return "float32"
        return "string" if kinds.is_string(kind) or kinds.is_large_string(kind) else str(kind)

    with storage.open_read(path) as file:
        return {field.name: word(field.type) for field in pq.ParquetFile(file).schema_arrow}


def _parquet_batches(path: str, types: Types, names: Sequence[str]) -> Iterator[Batch]:
    import pyarrow.parquet as pq

    with storage.open_read(path) as file:
        for batch in pq.ParquetFile(file).iter_batches(_PARQUET_ROWS, columns=list(names)):
            yield as_lists(batch, types, names)


def as_lists(batch: Any, types: Types, names: Sequence[str]) -> Batch:
    """Returns some columns of a pyarrow.RecordBatch, as their types say."""
    return {
        name: (column if types[name] == "bytes" else column.cast(_arrow_type(types[name]))).to_pylist()
        for name, column in zip(names, batch.select(list(names)).columns, strict=True)
    }


# Not through pyarrow.json, which takes a column's type from the first block and refuses the first float
# below whole numbers.
def _json_types(path: str) -> Types:
    types: dict[str, str] = {}
    for number, row in enumerate(_json_rows(path), start=1):
        for name, value in row.items():
            if value is None:
                continue
            kind, known = _json_type(value), types.setdefault(name, "")
            if not known:
                types[name] = kind
            elif {kind, known} == {"int64", "float32"}:
                types[name] = "float32"
            elif kind != known:
                raise SourceError(
                    f"{path!r}, row {number}: {reprlib.repr(value)} in column {name!r} is {kind}, in the "
                    f"rows before it is {known}; make them the same"
                )
    return types


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
    with storage.open_text(path) as text:
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
    return {float: "float32", str: "string"}.get(type(value), f"a {type(value).__name__}")


def _arrow_type(kind: str) -> Any:
    import pyarrow as pa

    # Floats are read as they are and rounded to 32 bits when they are stored.
    return {"int64": pa.int64(), "float32": pa.float64(), "string": pa.string()}[kind]


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


_FindTypes = Callable[[str], Types]
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
        types: "int64", "float32", "string", "bytes", or the place's own word for any other type, by column.
    """

    types: Types

    def batches(self, names: Sequence[str]) -> Iterator[Batch]:
        """Yields the values of some columns, row by row."""


class Rows:
    """Rows of columns as examples.

    The label is a class name (sorted) or a class index (the classes are then named "0", "1", ...). The key is
    a column, or what `_default_key` makes of a row. `features` gives columns by our names: label, image, key;
    and others, where not all of the rest are wanted.

    Args:
        name: Name of the table in messages.
        columns: Columns that it has.
        features: Names of columns by ours.
        images: Types that a column with images may have: "string", a path or a URL; "bytes", the image.

    Raises:
        SourceError: The columns cannot be read, or are not these.
    """

    def __init__(
        self, name: str, columns: TypedColumns, features: Mapping[str, str], images: Sequence[str]
    ) -> None:
        self._name = name
        self._columns = columns
        types = columns.types
        self._names = {role: role for role in _ROLES if role in types or role == "label"} | dict(features)
        for ours, theirs in self._names.items():
            if theirs not in types:
                raise SourceError(
                    f"{name!r} has no column {theirs!r} for {ours}, it has "
                    f"{printable(', '.join(types))[:300]}; say which is which with features, "
                    "such as label=species"
                )
        if set(features) <= set(_ROLES):
            others = [column for column in types if column not in self._names.values()]
            for column in others:
                if column in _ROLES:
                    raise SourceError(
                        f"{name!r} has a column {column!r} beside {self._names.get(column)!r} for it; rename "
                        "it, or name the columns to use with features"
                    )
            self._names |= {column: column for column in others}
        self._check_types(images)
        self.features = tuple(
            Feature(ours, types[theirs]) for ours, theirs in self._names.items() if ours not in _ROLES
        )

    def __iter__(self) -> Iterator[Example | BadExample]:
        index = {name: label for label, name in enumerate(self.class_names)}
        ours, types = tuple(self._names), self._columns.types
        checks = [(name, column, types[column]) for name, column in self._names.items()]
        theirs = list(self._names.values())
        batches = self._columns.batches(theirs)
        rows = chain.from_iterable(zip(*(batch[name] for name in theirs), strict=True) for batch in batches)
        for number, row in enumerate(rows, start=1):
            values = dict(zip(ours, row, strict=True))
            fault = next(filter(None, map(_fault, row, checks)), "")
            if not fault and "image" in values:
                fault = self._image_fault(values["image"])
            if fault:
                yield BadExample(f"{self._name} {self._row_name(number, values)}", fault)
                continue
            key = str(values.pop("key")) if "key" in values else self._row_name(number, values)
            yield Example(
                key=key,
                label=index[str(values.pop("label"))],
                image=self._image(values.pop("image")) if "image" in values else None,
                features=values,
            )

    def _row_name(self, number: int, values: Mapping[str, Any]) -> str:
        """Returns the name of a row in messages, which is its key where no column is."""
        return f"row {number}"

    def _image_fault(self, value: Any) -> str:
        """Returns what is wrong with a value of the column image; "" if nothing is."""
        raise NotImplementedError

    def _image(self, value: Any) -> Span | bytes:
        """Returns the image that a value of the column image gives."""
        raise NotImplementedError

    def _check_types(self, images: Sequence[str]) -> None:
        types = self._columns.types
        label = ("string", "int64")
        for role, allowed in (("label", label), ("image", images), ("key", label)):
            theirs = self._names.get(role)
            if theirs and types[theirs] not in allowed:
                raise SourceError(
                    f"column {theirs!r} of {self._name!r} is {types[theirs]}; as {role}, "
                    f"{' or '.join(allowed)} is needed"
                )
        for ours, theirs in self._names.items():
            if ours not in _ROLES and types[theirs] not in _CONVERSIONS:
                raise SourceError(
                    f"column {theirs!r} of {self._name!r} is {types[theirs]}; only whole numbers, floats, "
                    "booleans and text can be used: convert it, or name the columns to use with features"
                )

    @functools.cached_property
    def class_names(self) -> Sequence[str]:
        """Names of the classes, for which the column of the labels is read."""
        theirs = self._names["label"]
        found = {value for batch in self._columns.batches([theirs]) for value in batch[theirs]}
        if self._columns.types[theirs] == "string":
            return tuple(sorted(name for name in found if name))
        indices = [value for value in found if value is not None and 0 <= value <= LARGEST_LABEL]
        return tuple(str(number) for number in range(max(indices, default=-1) + 1))


class Table(Rows):
    """Rows of a CSV, JSONL or Parquet file.

    A column image holds paths relative to the table. Without a column key, a row's number is its key, which
    only stays the same where new rows are added at the end.

    Raises:
        SourceError: The file cannot be read, is empty, or has not these columns.
    """

    def __init__(self, path: str, features: Mapping[str, str]) -> None:
        path = storage.resolve(path)
        self._root = os.path.dirname(path)
        super().__init__(path, Columns(path), features, images=("string",))
        self.has_keys = "key" in self._names

    def _image_fault(self, value: str) -> str:
        if is_outside(os.path.normpath(value)):
            return f"has an image outside the table's directory in column {self._names['image']!r}"
        return ""

    def _image(self, value: str) -> Span:
        return Span(os.path.join(self._root, os.path.normpath(value)), 0, WHOLE_FILE)


def _fault(value: Any, check: tuple[str, str, str]) -> str:
    """Returns what is wrong with one value of a row; "" if nothing is."""
    ours, theirs, kind = check
    if value is None or (value in ("", b"") and ours in _ROLES):
        return f"has no value in column {theirs!r}"
    if kind == "float32" and not -_LARGEST_FLOAT32 <= value <= _LARGEST_FLOAT32:
        return f"has {value} in column {theirs!r}, not a number that 32 bits can hold"
    if ours == "label" and kind == "int64" and not 0 <= value <= LARGEST_LABEL:
        return f"has label {value} in column {theirs!r}, out of range 0..{LARGEST_LABEL:,}"
    return ""
