"""Tables: CSV, JSONL or Parquet files with a row per example, a column per feature, and images if wanted."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from shardline.components.preprocess.schema import labels
from shardline.components.preprocess.schema.labels import LARGEST_CLASS, LARGEST_FLOAT
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources.columns import FAULT, ROW, SPLIT, TypedColumns, Types, open_table
from shardline.components.preprocess.sources.example import WHOLE_FILE, BadExample, Example, Span
from shardline.components.preprocess.time_split import TimeSplit, parse_time, time_feature
from shardline.components.storage import remote_files
from shardline.trainer.base.errors import SourceError, printable
from shardline.trainer.base.progress import report
from shardline.trainer.data.features import CLASS, COLUMN_TYPES, LABEL, MULTILABEL, REGRESSION, Feature, Label

_ROLES = ("image", "key")
_OWN = (LABEL, *_ROLES)
_SCALARS = ("int64", "float32", "string")

# Values of a column that says whether an example has a label; in CSV they may be words.
_TRUTHS: Mapping[Any, int] = {0: 0, 1: 1, "false": 0, "true": 1}


class TableRows:
    """Rows of columns as examples.

    The key is a column, or the result of `_row_name`.

    Args:
        name: Name of the table in messages.
        columns: Columns of the table.
        settings: Settings, of which `features`, `label`, `columns` and `split_by_time` are used.
        images: Types that a column of images may have: "string", a path or a URL; "bytes", the image.
        overrides: Types of columns, as for `columns.Columns`; those of the settings by default.

    Attributes:
        integer_texts: Features of whole numbers that are stored as text because of gaps.

    Raises:
        SourceError: The columns cannot be read, or are not the expected ones.
    """

    def __init__(
        self,
        name: str,
        columns: TypedColumns,
        settings: PreprocessSettings,
        images: Sequence[str],
        overrides: Types | None = None,
    ) -> None:
        self._name, self._columns, self._settings = name, columns, settings
        self._overrides = settings.columns if overrides is None else overrides
        types, time = columns.types, settings.split_by_time
        for column, kind in self._overrides.items():
            if not kind.endswith("?") and types.get(column) != COLUMN_TYPES[kind]:
                found = f"is {types[column]}" if column in types else "is not there"
                raise SourceError(
                    f"--column {column}={kind} (columns in a pipeline) names a column of {name!r} that "
                    f"{found}; correct its values, or the type"
                )
        self._wanted = _label_settings(name, types, settings.features, settings.label)
        self._targets = [column for setting in self._wanted for column in setting.columns]
        if time and time not in types:
            raise SourceError(
                f"{name!r} has no column {time!r} to split by, it has {printable(', '.join(types))[:300]}"
            )
        self._names = self._feature_columns({o: t for o, t in settings.features.items() if o != LABEL})
        self._check_types(images)
        self.integer_texts = [
            ours for ours, theirs in self._names.items() if types[theirs] != self._type(theirs) == "string"
        ]
        self._time_feature = time_feature(types[time]) if time else ""
        if self._time_feature in self._names:
            raise SourceError(
                f"{name!r} has a feature {self._time_feature!r}, as which the times of {time!r} are stored; "
                "rename it, or name the columns to use with features"
            )
        features = [_feature(ours, self._type(t)) for ours, t in self._names.items() if ours not in _ROLES]
        self.features = (*features, *([Feature(self._time_feature, "int64")] if time else []))

    @functools.cached_property
    def labels(self) -> Sequence[Label]:
        """The labels to predict; the column of a class is read for the names."""
        return labels.find_labels(self._wanted, self._columns.types, self._values)

    def __iter__(self) -> Iterator[Example | BadExample]:
        time, extra, checks = self._settings.split_by_time, self._columns.row_metadata, self._checks()
        shares, gap = self._settings.split, self._settings.split_gap
        splits = TimeSplit(time, shares, gap, self._time_feature, self._values(time)) if time else None
        read = _label_reader(self._wanted, self.labels, self._columns.types)
        self._report_text_columns()
        known = {*self._overrides, *self._columns.codes} if self._columns.guessed else {*self._columns.types}
        # Columns that may be text because of malformed numbers.
        malformed = labels.MalformedValues(
            ours
            for ours, theirs in self._names.items()
            if self._columns.types[theirs] == "string" and theirs not in known and ours not in _ROLES
        )
        floats = [theirs for _, theirs, kind in checks if kind == "float32"]
        theirs = [*self._targets, *self._names.values(), *([time] if time else []), *extra]
        first, last = len(self._targets), len(self._targets) + len(self._names)
        batches = labels.report_rounding(self._columns.batches(theirs), floats)
        rows = chain.from_iterable(zip(*(batch[name] for name in theirs), strict=True) for batch in batches)
        for number, row in enumerate(rows, start=1):
            metadata = dict(zip(extra, row[len(row) - len(extra) :], strict=True))
            values = dict(zip(self._names, row[first:last], strict=True))
            for feature in self.integer_texts:
                values[feature] = None if values[feature] is None else str(values[feature])
            malformed.inspect(number, values)
            name, split = self._row_name(metadata.get(ROW) or f"row {number}", values), metadata.get(SPLIT)
            try:
                for fault in filter(None, (metadata.get(FAULT), *map(_fault, row, checks))):
                    raise ValueError(fault)
                key, image = self._roles(name, values)
                at = parse_time(row[last], self._time_feature) if time else 0
                if at is None:
                    raise ValueError(f"has no time in column {time!r}")
                label = read(row[:first])
            except ValueError as fault:
                yield BadExample(f"{self._name} {name}", str(fault))
                continue
            if splits and (split := splits.split(at)) is None:
                continue
            values |= self._missing(values) | ({self._time_feature: at} if time else {})
            yield Example(key, label, image, split, values)
        if splits and splits.left_out:
            report(
                "preprocess", f"{splits.left_out:,} rows are left out: in the gap before validation or test"
            )
        self.malformed = malformed.columns()

    def _roles(self, name: str, values: dict[str, Any]) -> tuple[str, Span | bytes | None]:
        """Removes key and image from the values of a row; ValueError says what is wrong with them."""
        key = str(values.pop("key")) if "key" in values else name
        if "key" in self._names and not key.isprintable():
            raise ValueError(f"has a key that is not printable text in column {self._names['key']!r}")
        return key, self._image(values.pop("image")) if "image" in values else None

    def _checks(self) -> Sequence[tuple[str, str, str]]:
        """Returns Shardline's name, the column and the type of each value of a row, for `_fault`."""
        targets = []
        for setting, label in zip(self._wanted, self.labels, strict=True):
            lists = label.kind == MULTILABEL and len(setting.columns) == 1
            kind = "strings" if lists else "float32" if label.kind == REGRESSION else ""
            targets += [(LABEL, column, kind or self._type(column)) for column in setting.columns]
        return [*targets, *((ours, theirs, self._type(theirs)) for ours, theirs in self._names.items())]

    def _report_text_columns(self) -> None:
        gaps = "gaps, and whole numbers that are not exact as 32-bit floats"
        why, codes = {self._names[ours]: gaps for ours in self.integer_texts}, self._columns.codes
        for column in codes.keys() & {*self._targets, *self._names.values()}:
            why[column] = f"{printable(repr(codes[column]))[:60]}, which a number would change"
        for column in sorted(why):
            instead = f"--column {column}=number (columns in a pipeline) makes it a number"
            report("preprocess", f"column {column!r} is text, since it has {why[column]}; {instead}")

    def _feature_columns(self, features: Mapping[str, str]) -> dict[str, str]:
        """Returns the columns of features by Shardline's names: the selected ones, or all others."""
        name, types = self._name, self._columns.types
        named = {role: role for role in _ROLES if role in types and role not in self._targets}
        named.update(features)
        for ours, theirs in named.items():
            if theirs not in types:
                raise SourceError(
                    f"{name!r} has no column {theirs!r} for {ours}, it has "
                    f"{printable(', '.join(types))[:300]}; say which is which with features, "
                    "such as image=photo"
                )
            if theirs in self._targets:
                raise SourceError(
                    f"column {theirs!r} of {name!r} is what is to be predicted, and cannot be {ours} as well"
                )
        if not set(features) <= set(_ROLES):
            return named
        taken = {*named.values(), *self._targets, self._settings.split_by_time}
        others = [column for column in types if column not in taken]
        for column in others:
            if column in _OWN:
                instead = ", ".join(self._targets) if column == LABEL else named.get(column)
                raise SourceError(
                    f"{name!r} has both {column!r} and {instead!r} as {column}; rename one, or name the "
                    "columns to use with features"
                )
        return named | {column: column for column in others}

    def _type(self, column: str) -> str:
        """Returns the type in which a column is stored; whole numbers with gaps are floats, or text."""
        kind, whole = self._columns.types[column], (*self._targets, self._names.get("key"))
        if kind != "int64" or column not in self._columns.gaps or column in whole:
            return kind
        return "string" if column in self._columns.wide else "float32"

    def _missing(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the placeholders of features without a value: NaN, or an empty text."""
        found = {}
        for ours in (ours for ours, value in values.items() if value is None):
            feature = _feature(ours, self._type(self._names[ours]))
            placeholder = math.nan if feature.dtype == "float32" else ""
            found[ours] = [placeholder] * (feature.shape[0] or 0) if feature.shape else placeholder
        return found

    def _values(self, column: str) -> Iterator[Any]:
        return chain.from_iterable(batch[column] for batch in self._columns.batches([column]))

    def _row_name(self, position: str, values: Mapping[str, Any]) -> str:
        """Returns the name of a row in messages, also its key without a column key, from its position."""
        return position

    def _image(self, value: Any) -> Any:
        """Returns the image of a value in the column image; ValueError if it has none."""
        return value

    def _check_types(self, images: Sequence[str]) -> None:
        types = self._columns.types
        fitting = {"image": images, "key": ("string", "int64")}
        for ours, theirs in self._names.items():
            what = f"column {theirs!r} of {self._name!r} is {types[theirs]}"
            if types[theirs] not in fitting.get(ours, (types[theirs],)):
                raise SourceError(f"{what}; as {ours}, {' or '.join(fitting[ours])} is needed")
            if ours not in fitting and _feature("", types[theirs]).dtype not in _SCALARS:
                raise SourceError(
                    f"{what}; only whole numbers, floats, booleans and text can be used: convert it, or name "
                    "the columns to use with features"
                )


def _label_settings(
    name: str, types: Mapping[str, str], features: Mapping[str, str], label: str
) -> Sequence[labels.LabelSetting]:
    """Returns the settings of the labels; SourceError if a column does not exist."""
    if label and LABEL in features:
        raise SourceError(
            f"label is set twice, as {label!r} and as label={features[LABEL]} of features; leave one out"
        )
    wanted = labels.parse(label) if label else (labels.LabelSetting("", (features.get(LABEL, LABEL),)),)
    for setting in wanted:
        for column in setting.columns:
            if column not in types:
                raise labels.unknown_column(name, column, types, labelled=bool(label or LABEL in features))
    return wanted


def _label_reader(
    wanted: Sequence[labels.LabelSetting], found: Sequence[Label], types: Mapping[str, str]
) -> Callable[[Sequence[Any]], Any]:
    """Returns a function of a row to the label of an Example; ValueError says what is wrong with it."""
    parts = [
        (label, of.columns, types[of.columns[0]], {name: i for i, name in enumerate(label.class_names)})
        for of, label in zip(wanted, found, strict=True)
    ]

    def read(row: Sequence[Any]) -> Any:
        start, targets = 0, {}
        for label, columns, kind, index in parts:
            width = len(columns)
            values = row[start : start + width]
            start += width
            value = values[0] if width == 1 else values
            if label.kind == CLASS:
                value = index.get(str(value), -1)
                if value < 0:
                    raise ValueError(
                        f"has label {values[0]} in column {columns[0]!r}, out of range 0..{LARGEST_CLASS:,}"
                    )
            elif label.kind == MULTILABEL and width == 1 and kind in ("string", "strings"):
                value = labels.split_names(value)
            elif label.kind == MULTILABEL:
                value = [_TRUTHS.get(flag.lower() if isinstance(flag, str) else flag) for flag in values]
                if None in value:
                    bad = value.index(None)
                    raise ValueError(f"has {values[bad]!r} in column {label.outputs[bad]!r}, not 0 or 1")
            targets[label.name] = value
        return targets[LABEL] if len(targets) == 1 else targets

    return read


class Table(TableRows):
    """Rows of a CSV, JSONL or Parquet file, or of all files that a pattern matches.

    A column image holds paths relative to the table, or to the directory before the pattern. Without a column
    key, a row's number is its key, with the file's name if there are several: it stays the same only if new
    rows are added at the end of a file.

    Raises:
        SourceError: The file cannot be read, is empty, or lacks one of the columns.
    """

    def __init__(self, path: str, settings: PreprocessSettings, overrides: Types) -> None:
        columns, self._root = open_table(path, overrides)
        super().__init__(remote_files.resolve(path), columns, settings, ("string",), overrides)
        self.has_keys = "key" in self._names

    def _image(self, value: str) -> Span:
        return inside(self._root, value, "has an image outside the table's directory")


def inside(root: str, value: str, fault: str) -> Span:
    """Returns the file of a path relative to a directory; ValueError `fault` if it is outside of it."""
    path = os.path.normpath(value)
    if os.path.isabs(path) or path == ".." or path.startswith("../"):
        raise ValueError(fault)
    return Span(os.path.join(root, path), 0, WHOLE_FILE)


def _feature(name: str, kind: str) -> Feature:
    """Returns the feature of a type, possibly of a vector, such as float32[3]."""
    dtype, _, width = kind.partition("[")
    return Feature(name, dtype, (int(width[:-1]),) if width else ())


def _fault(value: Any, check: tuple[str, str, str]) -> str:
    """Returns what is wrong with one value of a row, or ""."""
    ours, theirs, kind = check
    if value is None and ours not in _OWN and kind != "int64":
        return ""
    if value is None or (value in ("", b"") and ours in _OWN and kind != "strings"):
        return f"has no value in column {theirs!r}"
    if kind == "float32" and ours == LABEL and not math.isfinite(value):
        return f"has {value} in column {theirs!r}, which is to be predicted, not a finite number"
    if kind == "float32" and not math.isnan(value) and not -LARGEST_FLOAT <= value <= LARGEST_FLOAT:
        return f"has {value} in column {theirs!r}, not a number that 32 bits can hold"
    return ""
