"""Tables: CSV, JSONL or Parquet files with a row per example, a column per feature, and images if wanted.

The types of columns are those that an Example can hold: int64 (booleans too), float32 and string.
"""

from __future__ import annotations

import contextlib
import json
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import PurePosixPath
from typing import Any

from shardline.components.preprocess import storage
from shardline.components.preprocess.sources import LARGEST_LABEL, WHOLE_FILE, BadExample, Example, Span
from shardline.components.preprocess.sources.images import is_outside
from shardline.trainer.data.manifest import Feature
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
            yield {name: batch[name].cast(_arrow_type(types[name])).to_pylist() for name in names}


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


class Table:
    """Rows of a CSV, JSONL or Parquet file.

    The label is a class name (sorted) or a class index (the classes are then named "0", "1", ...). A column
    image holds paths relative to the table. The key is a column, or the number of the row, which only stays
    the same where new rows are added at the end. `features` gives columns by our names: label, image, key;
    and others, where not all of the rest are wanted.

    Raises:
        SourceError: The file cannot be read, is empty, or has not these columns.
    """

    def __init__(self, path: str, features: Mapping[str, str]) -> None:
        self._path = storage.resolve(path)
        self._columns = Columns(self._path)
        types = self._columns.types
        self._names = {role: role for role in _ROLES if role in types or role == "label"} | dict(features)
        for ours, theirs in self._names.items():
            if theirs not in types:
                raise SourceError(
                    f"{path!r} has no column {theirs!r} for {ours}, it has "
                    f"{printable(', '.join(types))[:300]}; say which is which with features, "
                    "such as label=species"
                )
        if set(features) <= set(_ROLES):
            others = [name for name in types if name not in self._names.values()]
            for name in others:
                if name in _ROLES:
                    raise SourceError(
                        f"{path!r} has a column {name!r} beside {self._names.get(name)!r} for it; rename it, "
                        "or name the columns to use with features"
                    )
            self._names |= {name: name for name in others}
        self.has_keys = "key" in self._names
        self._check_types()
        self.features = tuple(
            Feature(ours, types[theirs]) for ours, theirs in self._names.items() if ours not in _ROLES
        )
        self.class_names = self._find_class_names()

    def __iter__(self) -> Iterator[Example | BadExample]:
        root = os.path.dirname(self._path)
        index = {name: label for label, name in enumerate(self.class_names)}
        ours, types = tuple(self._names), self._columns.types
        checks = [(name, column, types[column]) for name, column in self._names.items()]
        theirs = list(self._names.values())
        batches = self._columns.batches(theirs)
        rows = chain.from_iterable(zip(*(batch[name] for name in theirs), strict=True) for batch in batches)
        for number, row in enumerate(rows, start=1):
            fault = next(filter(None, map(_fault, row, checks)), "")
            if fault:
                yield BadExample(f"{self._path} row {number}", fault)
                continue
            values = dict(zip(ours, row, strict=True))
            image = os.path.join(root, os.path.normpath(values.pop("image"))) if "image" in values else ""
            yield Example(
                key=str(values.pop("key", f"row {number}")),
                label=index[str(values.pop("label"))],
                image=Span(image, 0, WHOLE_FILE) if image else None,
                features=values,
            )

    def _check_types(self) -> None:
        types = self._columns.types
        for role, allowed in (("label", "string int64"), ("image", "string"), ("key", "string int64")):
            theirs = self._names.get(role)
            if theirs and types[theirs] not in allowed:
                raise SourceError(
                    f"column {theirs!r} of {self._path!r} is {types[theirs]}; as {role}, "
                    f"{allowed.replace(' ', ' or ')} is needed"
                )
        for theirs in self._names.values():
            if types[theirs] not in ("int64", "float32", "string"):
                raise SourceError(
                    f"column {theirs!r} of {self._path!r} is {types[theirs]}; only whole numbers, floats, "
                    "booleans and text can be used: convert it, or name the columns to use with features"
                )

    def _find_class_names(self) -> Sequence[str]:
        theirs = self._names["label"]
        found = {value for batch in self._columns.batches([theirs]) for value in batch[theirs]}
        if self._columns.types[theirs] == "string":
            return tuple(sorted(name for name in found if name))
        indices = [value for value in found if value is not None and 0 <= value <= LARGEST_LABEL]
        return tuple(str(number) for number in range(max(indices, default=-1) + 1))


def _fault(value: Any, check: tuple[str, str, str]) -> str:
    """Returns what is wrong with one value of a row; "" if nothing is."""
    ours, theirs, kind = check
    if value is None or (value == "" and ours in _ROLES):
        return f"has no value in column {theirs!r}"
    if kind == "float32" and not -_LARGEST_FLOAT32 <= value <= _LARGEST_FLOAT32:
        return f"has {value} in column {theirs!r}, not a number that 32 bits can hold"
    if ours == "label" and kind == "int64" and not 0 <= value <= LARGEST_LABEL:
        return f"has label {value} in column {theirs!r}, out of range 0..{LARGEST_LABEL:,}"
    if ours == "image" and is_outside(os.path.normpath(value)):
        return f"has an image outside the table's directory in column {theirs!r}"
    return ""
