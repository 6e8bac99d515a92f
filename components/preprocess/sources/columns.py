"""Columns of a table in a file, CSV, JSONL or Parquet, or in many of them, read as Arrow's record batches.

Batches are bounded by bytes. The types of columns are found by reading the files once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from shardline.components.preprocess.lazy import pa, pc
from shardline.components.preprocess.schema import LARGEST_FLOAT, LabelSetting, Schema, parse_labels
from shardline.components.preprocess.sources.formats import (
    Block,
    Quotes,
    as_source_error,
    csv_batches,
    find_format,
)
from shardline.components.preprocess.sources.text_formats import TextFormat, TextScan, is_wide
from shardline.components.storage import match_files, resolve
from shardline.trainer.base.errors import SourceError, printable
from shardline.trainer.manifest import COLUMN_TYPES, LABEL, REGRESSION

if TYPE_CHECKING:
    from shardline.components.preprocess.settings import PreprocessSettings


#: Types of columns by name, as in `Scan.types`.
Types = Mapping[str, str]

#: No types are overrides of any column.
NO_TYPES: Types = MappingProxyType({})

_PATTERN = re.compile(r"[*?\[]|\{[^{}]*,")
# Part of a path such as year=2026/month=11/part-0.parquet.
_PARTITION = re.compile(r"([^/=]+)=([^/]*)")


@dataclass(frozen=True)
class ColumnUse:
    """What the columns of a table are used for.

    Attributes:
        features: Columns of features by Shardline's names, image and key among them; {} for all others.
        label: Columns to predict, as in the setting.
        types: Types of columns as in `COLUMN_TYPES`; one with a ? at its end applies where the types are
            inferred from the values, and these do not contradict it.
        group: Feature whose equal values stay in one split.
        time, split, gap: Column of times that decides the split, the shares, and the time left out between.
    """

    features: Mapping[str, str]
    label: str
    types: Types
    group: str
    time: str
    split: Mapping[str, float]
    gap: str

    @classmethod
    def of(cls, settings: PreprocessSettings) -> ColumnUse:
        """Returns what settings say of columns."""
        features, types, time = settings.features, settings.columns, settings.split_by_time
        return cls(features, settings.label, types, settings.group, time, settings.split, settings.split_gap)

    @property
    def targets(self) -> Sequence[LabelSetting]:
        """The labels to predict; without the setting, the column that `features` or its own name says."""
        return parse_labels(self.label) or (LabelSetting("", (self.features.get(LABEL, LABEL),)),)

    @property
    def target_columns(self) -> list[str]:
        """The columns to predict."""
        return [column for target in self.targets for column in target.columns]

    def column(self, name: str) -> str:
        """Returns the column of a feature."""
        return self.features.get(name, name)

    def expecting(self, schema: Schema) -> ColumnUse:
        """Returns the use with the types of a schema, where it says none itself and the values fit."""
        expected = {
            self.column(name): f"{kind}?"
            for name, kind in schema.column_types.items()
            if name not in ("key", LABEL)
        }
        for column in self.target_columns:
            expected.pop(column, None)
        for label in self.targets:
            expected |= {column: "number?" for column in label.columns if label.kind == REGRESSION}
        return replace(self, types={**expected, **self.types})


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
        text_formats: How values of text become those of the type, by column.
        blocks: Rows that can be read apart from the others; none where that is not known.
        rows: Number of rows; 0 where that is not known.
        stored: Kinds of the features of a tf.train.Example that have a value, as `tfrecord.Kind`.
    """

    types: dict[str, str]
    gaps: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()
    text_formats: dict[str, TextFormat] = field(default_factory=dict)
    blocks: tuple[Block, ...] = ()
    rows: int = 0
    stored: dict[str, Any] = field(default_factory=dict)


def kind_of(kind: Any) -> str:
    """Returns the type of a column, as in `Scan.types`, of a type of Arrow's; "" for one without values."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_null(kind):
        return ""
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return "int64"
    if (
        pa.types.is_floating(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_time(kind)
        or pa.types.is_duration(kind)
    ):
        return "float32"
    if pa.types.is_timestamp(kind):
        return "time"
    if pa.types.is_date(kind):
        return "date"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        of = kind_of(kind.value_type)
        return {"string": "strings", "": "lists"}.get(of, f"lists of {of}")
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "string"
    is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    return "bytes" if is_bytes else " ".join(str(kind).split())[:60]


def typed(values: Any, kind: str, form: TextFormat | None = None) -> Any:
    """Returns an array of Arrow's as one of a type of `Scan.types`, as in `Rows.columns`."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if form and form.kind != "string" and kind_of(values.type) == "string":
        return typed(form.parse(values.cast(pa.string())), kind)
    base, _, width = kind.partition("[")
    if width:
        size, found = int(width[:-1]), values.cast(pa.list_(arrow_type(base)))
        fitting = pc.equal(pc.list_value_length(found), size)
        found = pc.if_else(fitting, found, pa.scalar(None, found.type))
        return found.cast(pa.list_(arrow_type(base), size))
    if pa.types.is_time(values.type):
        return pc.divide(values.cast(pa.time64("us")).cast(pa.int64()).cast(pa.float64()), 3.6e9)
    if pa.types.is_duration(values.type):
        seconds = values.cast(pa.duration("us"), safe=False).cast(pa.int64()).cast(pa.float64())
        return pc.divide(seconds, 1e6)
    wanted = arrow_type(kind)
    if wanted is None or values.type == wanted:
        return values
    return values.cast(wanted, safe=not pa.types.is_temporal(values.type))


def arrow_type(kind: str) -> Any:
    """Returns Arrow's type of a column in `Rows.columns`; None for one that is not used."""
    # Floats are read with 64 bits and rounded to 32 when they are stored.
    text, time = pa.string(), pa.timestamp("us")
    known = {"int64": pa.int64(), "float32": pa.float64(), "string": text, "strings": pa.list_(text)}
    return {**known, "bytes": pa.binary(), "time": time, "date": time}.get(kind)


class ColumnScan:
    """Finds the type of a column, batch by batch.

    Args:
        name: The column.
        override: Its type as in `COLUMN_TYPES`, with a ? at its end if it applies only where the values do
            not contradict it; "" to infer it.
        guessed: Whether all values are text that may be numbers, as in CSV.
    """

    def __init__(self, name: str, override: str, *, guessed: bool) -> None:
        self._name, self._override, self._guessed = name, override, guessed
        self._text = TextScan(name, override)
        self._kind, self._first, self._sizes = "", "", set[int]()
        self.has_gaps = self.is_wide = False

    def add(self, values: Any, path: str) -> None:
        """Adds the values of a batch; SourceError if their type is another than in the batches before."""
        kind = kind_of(values.type)
        self.has_gaps = self.has_gaps or bool(values.null_count)
        if pa.types.is_uint64(values.type):
            self._check_whole(values.cast(pa.float64(), safe=False), path)
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
        largest = pc.max(pc.abs(numbers)).as_py() or 0.0
        if 2.0**63 <= largest <= LARGEST_FLOAT and pc.all(pc.equal(numbers, pc.floor(numbers))).as_py():
            raise SourceError(
                f"{path!r} has a number of more than 64 bits in column {self._name!r}, {largest:.17g}, which "
                "a float changes; write it as text"
            )

    def finish(self) -> tuple[str, TextFormat | None]:
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

    def _text_type(self) -> tuple[str, TextFormat | None]:
        form = self._text.finish()
        self.has_gaps = self.has_gaps or form.has_gaps
        self.is_wide = form.is_wide
        if form.kind in ("int64", "float32") and not self._guessed and not self._override:
            note = (
                f"column {self._name!r} is text that holds numbers; --column {self._name}=number reads them"
            )
            return "string", TextFormat("string", note=note)
        return form.kind, form


def override_type(kind: str, override: str) -> str:
    """Returns the type of a column that a file or a database declares, with an override of `COLUMN_TYPES`."""
    fits = kind in ("string", "int64", "float32") or override == "text"
    return COLUMN_TYPES.get(override, kind) if fits else kind


class TypedColumns:
    """Columns that can be read as batches of rows: of files, or of a database.

    Attributes:
        scan: Facts about them.
    """

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
            for name, form in self.scan.text_formats.items()
            if name in names and (form.kind == "time" or (numbers and (form.decimal or form.fault)))
        }
        types = {name: "string" if name in changed else kind for name, kind in self.types.items()}
        kept = {name: form for name, form in self.scan.text_formats.items() if name not in changed}
        self.scan = replace(self.scan, types=types, text_formats=kept)

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
        overrides: Types of columns, as `ColumnUse.types`.
        root: Directory to which names of rows of several files are relative, and below which partitions are
            columns; else None.
        scan: What an earlier scan of the same files has found; None to scan them.
    """

    def __init__(
        self, *paths: str, overrides: Types = NO_TYPES, root: str | None = None, scan: Scan | None = None
    ) -> None:
        self._paths, self._root = paths, root
        self._is_csv = csv_batches in map(find_format, paths)
        super().__init__(scan or self._scan(overrides))

    def batches(self, names: Sequence[str], numbers: Iterator[int] | None = None) -> Iterator[Rows]:
        """Yields the values of some columns, row by row and file by file; or of some batches."""
        for path, partitions, batch, first in self._read(names, numbers):
            place = "row" if self._root is None else f"{os.path.relpath(path, self._root)} row"
            with as_source_error(path):
                own = dict(zip(batch.schema.names, batch.columns, strict=True))
                columns = {name: self._typed(name, own, partitions, batch.num_rows) for name in names}
            yield Rows(columns, batch.num_rows, place, first)

    def _read(
        self, names: Sequence[str], numbers: Iterator[int] | None
    ) -> Iterator[tuple[str, Mapping[str, str], Any, int]]:
        """Yields some batches: path and partitions of the file, what it holds, and the number of a row."""
        wanted = self.scan.blocks if numbers is None else map(self.scan.blocks.__getitem__, numbers)
        for file, blocks in groupby(wanted, lambda block: block.file):
            path = self._paths[file]
            partitions = self._partitions(path)
            stored = [name for name in names if name not in partitions]
            # Where only partitions are requested, another column gives the number of rows.
            stored = stored or [next(name for name in self.types if name not in partitions)]
            with as_source_error(path):
                for block, batch in find_format(path)(path, stored, blocks, None):
                    yield path, partitions, batch, block.first

    def _typed(self, name: str, own: Mapping[str, Any], partitions: Mapping[str, str], rows: int) -> Any:
        kind = self.types[name]
        if name in partitions:
            values = pa.repeat(pa.scalar(partitions[name]), rows)
        else:  # no row of a batch of JSON may have it
            values = own[name] if name in own else pa.nulls(rows)
        return typed(values, kind, self.scan.text_formats.get(name))

    def _scan(self, overrides: Types) -> Scan:
        found, read, rows = dict[str, ColumnScan](), list[Block](), 0
        quotes = {path: Quotes(path) for path in self._paths if find_format(path) is csv_batches}
        for file, path in enumerate(self._paths):
            own = dict[str, None]()
            with as_source_error(path):
                for block, columns in self._all_columns(path, quotes.get(path)):
                    own |= dict.fromkeys(columns)
                    for name, values in columns.items():
                        if name not in found:
                            guessed = self._is_csv or name in self._partitions(path)
                            found[name] = ColumnScan(name, overrides.get(name, ""), guessed=guessed)
                            found[name].has_gaps = rows > 0
                        found[name].add(values, path)
                    for name in found.keys() - columns.keys():  # no row of a batch of JSON has it
                        found[name].has_gaps = True
                    read.append(replace(block, file=file))
                    rows += max(map(len, columns.values()), default=0)
            if not own:
                raise SourceError(f"{path!r} is empty: it has no column")
            for column in sorted(own.keys() ^ found.keys()):
                has, lacks = (self._paths[0], path) if column not in own else (path, self._paths[0])
                raise SourceError(
                    f"{lacks!r} has no column {column!r}, which {has!r} has; make the files' columns the same"
                )
        return replace(_finish_scan(found, quotes.values()), blocks=tuple(read), rows=rows)

    def _all_columns(self, path: str, quotes: Quotes | None) -> Iterator[tuple[Block, Mapping[str, Any]]]:
        """Yields all columns of a file, batch by batch."""
        partitions = {name: pa.array([value]) for name, value in self._partitions(path).items()}
        for block, batch in find_format(path)(path, None, None, quotes):
            if twice := partitions.keys() & {*batch.schema.names}:
                raise SourceError(f"{path!r} has a column {min(twice)!r} in it and in its path; rename one")
            yield block, dict(zip(batch.schema.names, batch.columns, strict=True)) | partitions

    def _partitions(self, path: str) -> dict[str, str]:
        below = os.path.relpath(os.path.dirname(path), self._root) if self._root is not None else ""
        return {unquote(name): unquote(value) for name, value in _PARTITION.findall(below)}


def _finish_scan(found: Mapping[str, ColumnScan], quotes: Iterable[Quotes]) -> Scan:
    results, faults = dict[str, tuple[str, TextFormat | None]](), list[SourceError]()
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
        text_formats={name: form for name, (_, form) in results.items() if form},
    )


def open_table(path: str, overrides: Types = NO_TYPES, scan: Scan | None = None) -> tuple[TypedColumns, str]:
    """Returns the columns of a table, a file or a pattern of files, and its directory.

    Arguments are those of `Columns`.
    """
    path = resolve(path)
    if not (match := _PATTERN.search(path)):
        return Columns(path, overrides=overrides, scan=scan), os.path.dirname(path)
    root = path[: match.start()].rpartition("/")[0]
    found = (file.path for file in match_files(path))
    return Columns(*found, overrides=overrides, root=root, scan=scan), root


def is_pattern(path: str) -> bool:
    """Returns whether a path is a pattern of files."""
    return bool(_PATTERN.search(path))
