"""Tables: CSV, JSONL or Parquet files with a row per example, a column per feature, and images if wanted."""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardline.components.preprocess.lazy import np, pa, pc
from shardline.components.preprocess.schema import (
    LARGEST_FLOAT,
    Fault,
    encode_targets,
    find_labels,
    unknown_column,
    unknown_label,
)
from shardline.components.preprocess.sources.columns import (
    ColumnUse,
    Rows,
    Scan,
    TypedColumns,
    open_table,
    typed,
)
from shardline.components.preprocess.sources.example import (
    WHOLE_FILE,
    BadExample,
    Batch,
    Example,
    Span,
    examples,
    without,
)
from shardline.components.preprocess.sources.text_formats import TIME_PARTS, time_parts
from shardline.components.preprocess.time_split import LEFT_OUT, TimeSplit, parse_times, time_feature
from shardline.components.storage import resolve
from shardline.trainer.base.errors import SourceError
from shardline.trainer.base.progress import report
from shardline.trainer.manifest import COLUMN_TYPES, LABEL, Feature, Label

_ROLES = ("image", "key")
_OWN = (LABEL, *_ROLES)
_SCALARS = ("int64", "float32", "string")


class TableRows:
    """Rows of columns as examples.

    The key is a column, or the result of `_row_name`.

    Args:
        name: Name of the table in messages.
        use: What the columns are used for.
        images: Types that a column of images may have: "string", a path or a URL; "bytes", the image.

    Attributes:
        integer_texts: Features of whole numbers that are stored as text because of gaps.
    """

    def __init__(self, name: str, columns: TypedColumns, use: ColumnUse, images: Sequence[str]) -> None:
        self._name, self._columns, self._use = name, columns, use
        columns.keep_text({use.column(own) for own in (*_ROLES, use.group)}, numbers=True)
        self._check_targets()
        self._wanted, self._targets = use.targets, use.target_columns
        columns.keep_text(self._targets, numbers=False)
        types, time = columns.types, use.time
        for column, kind in use.types.items():
            if not kind.endswith("?") and types.get(column) != COLUMN_TYPES[kind]:
                found = f"is {types[column]}" if column in types else "is not there"
                raise SourceError(
                    f"--column {column}={kind} (columns in a pipeline) names a column of {name!r} that "
                    f"{found}; correct its values, or the type"
                )
        if time and time not in types:
            raise unknown_column(name, time, types, "to split by")
        self._names = self._feature_columns({o: t for o, t in use.features.items() if o != LABEL})
        self._check_text_formats()
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
        self.features = tuple(self._declared())
        for feature, count in Counter(feature.name for feature in self.features).items():
            if count > 1:
                raise SourceError(
                    f"{name!r} has a column {feature!r}, as which a part of a time is stored; rename it, or "
                    "name the columns to use with features"
                )

    def _declared(self) -> Iterator[Feature]:
        for ours, theirs in self._names.items():
            if parts := TIME_PARTS.get(self._columns.types[theirs]):
                yield from (Feature(f"{ours} {part}", "float32") for part in parts)
            elif ours not in _ROLES:
                yield _feature(ours, self._type(theirs))
        if self._time_feature:
            yield Feature(self._time_feature, "int64")

    @functools.cached_property
    def labels(self) -> Sequence[Label]:
        """The labels to predict; the column of a class is read for the names."""
        return find_labels(self._wanted, self._columns.types, self._columns.values)

    @functools.cached_property
    def _splits(self) -> TimeSplit | None:
        use = self._use
        if not use.time:
            return None
        times = (self._times(values) for values in self._columns.values(use.time))
        return TimeSplit(use.time, use.split, use.gap, self._time_feature, times)

    def report(self) -> None:
        """Reports how columns are read, and which rows are left out."""
        self._report_text_formats()
        if self._splits and self._splits.left_out:
            count = self._splits.left_out
            report("preprocess", f"{count:,} rows are left out: in the gap before validation or test")

    @property
    def scan(self) -> Scan:
        """Facts about the columns."""
        return self._columns.scan

    @property
    def batch_count(self) -> int:
        """Number of batches that can be read apart from each other; 0 where there are images to locate."""
        return 0 if "image" in self._names else len(self._columns.scan.blocks)

    def batches(self, numbers: Iterator[int] | None = None) -> Iterator[Batch]:
        """Yields the examples batch by batch; only some batches, whose numbers ascend."""
        for rows in self._columns.batches(self._used(), numbers):
            yield self._batch(rows)

    def _used(self) -> list[str]:
        """Returns the columns that are read."""
        times = [self._use.time] if self._use.time else []
        return [*dict.fromkeys((*self._targets, *self._names.values(), *times))]

    def __iter__(self) -> Iterator[Example | BadExample]:
        self.report()
        return examples(self.batches(), self.labels)

    def _batch(self, rows: Rows) -> Batch:
        columns, faults = self._targets_of(rows)
        for ours, theirs in self._names.items():
            values, kind = rows.columns[theirs], self._type(theirs)
            faults += list(_find_faults(ours, theirs, kind, values))
            if ours not in _ROLES:
                columns |= _features_of(ours, kind, values)
        keys, images = self._keys(rows, columns), list[Any]()
        if "key" in self._names:
            column = self._names["key"]
            keys = [str(key) for key in rows.columns[column].to_pylist()]
            unprintable = np.array([not key.isprintable() for key in keys], bool)
            reason = f"has a key that is not printable text in column {column!r}"
            faults.append(Fault(unprintable, lambda _: reason))
        splits: Sequence[str | None] = [rows.split] * rows.size if rows.split else ()
        if self._splits:
            times = self._times(rows.columns[time := self._use.time])
            faults.append(Fault(times.is_null().to_numpy(False), lambda _: f"has no time in column {time!r}"))
            splits = self._splits.assign(times)
            columns[self._time_feature] = times
        bad = faults_by_row(faults, rows)
        if "image" in self._names:
            images = rows.columns[self._names["image"]].to_pylist()
            self._locate(images, bad, rows)
        found = Batch(keys, columns, images, splits, rounded=_rounded(columns))
        left_out = [index for index, split in enumerate(splits) if split == LEFT_OUT] if self._splits else []
        if not bad and not left_out:
            return found
        names = [BadExample(f"{self._name} {self._row_name(rows, i, keys)}", bad[i]) for i in sorted(bad)]
        left_out = [index for index in left_out if index not in bad]
        return without(found, {*bad, *left_out})._replace(bad=names, left_out=len(left_out))

    def _locate(self, images: list[Any], bad: dict[int, str], rows: Rows) -> None:
        """Replaces values of the column image by images, except those of rows that are bad, or become so."""
        for index, value in enumerate(images):
            if index not in bad:
                try:
                    images[index] = self._image(value, rows)
                except ValueError as fault:
                    bad[index] = str(fault)

    def _targets_of(self, rows: Rows) -> tuple[dict[str, Any], list[Fault]]:
        columns, faults = dict[str, Any](), list[Fault]()
        for setting, label in zip(self._wanted, self.labels, strict=True):
            values = [rows.columns[column] for column in setting.columns]
            columns[label.name], found = encode_targets(label, setting, values)
            faults += found
        return columns, faults

    def _times(self, values: Any) -> Any:
        return parse_times(values, self._time_feature)

    def _keys(self, rows: Rows, columns: Mapping[str, Any]) -> Sequence[str]:
        """Returns the keys of rows without a column key."""
        return rows.keys or list(map(rows.name, range(rows.size)))

    def _row_name(self, rows: Rows, index: int, keys: Sequence[str]) -> str:
        """Returns the name of a row in messages."""
        return rows.name(index)

    def _image(self, value: Any, rows: Rows) -> Any:
        """Returns the image of a value in the column image; ValueError if it has none."""
        return value

    def _check_targets(self) -> None:
        """Raises SourceError if a column of a label does not exist, or the label is set twice."""
        use, named = self._use, self._use.features.get(LABEL)
        if use.label and named is not None:
            raise SourceError(
                f"label is set twice, as {use.label!r} and as label={named} of features; leave one out"
            )
        for column in use.target_columns:
            if column not in self._columns.types:
                labelled = bool(use.label or named is not None)
                raise unknown_label(self._name, column, self._columns.types, labelled=labelled)

    def _check_text_formats(self) -> None:
        """Raises SourceError where texts of a column in use are neither numbers nor words."""
        used = {*self._targets, *self._names.values()}
        for column, form in self._columns.scan.text_formats.items():
            if form.fault and column in used and self._use.types.get(column) != "text":
                raise SourceError(form.fault)

    def _report_text_formats(self) -> None:
        for column in dict.fromkeys([*self._targets, *self._names.values()]):
            form = self._columns.scan.text_formats.get(column)
            if form and form.note:
                report("preprocess", form.note)
        for column in sorted(self._names[ours] for ours in self.integer_texts):
            report(
                "preprocess",
                f"column {column!r} is text, since it has gaps, and whole numbers that are not exact as "
                f"32-bit floats; --column {column}=number (columns in a pipeline) makes it a number",
            )

    def _feature_columns(self, features: Mapping[str, str]) -> dict[str, str]:
        """Returns the columns of features by Shardline's names: the selected ones, or all others."""
        name, types = self._name, self._columns.types
        named = {role: role for role in _ROLES if role in types and role not in self._targets}
        named.update(features)
        for ours, theirs in named.items():
            if theirs not in types:
                remedy = "say which is which with features, such as image=photo"
                raise unknown_column(name, theirs, types, f"for {ours}", remedy)
            if theirs in self._targets:
                raise SourceError(
                    f"column {theirs!r} of {name!r} is what is to be predicted, and cannot be {ours} as well"
                )
        if not set(features) <= set(_ROLES):
            return named
        taken = {*named.values(), *self._targets, self._use.time}
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
        if kind != "int64" or column not in self._columns.scan.gaps or column in whole:
            return kind
        return "string" if column in self._columns.scan.wide else "float32"

    def _check_types(self, images: Sequence[str]) -> None:
        types = self._columns.types
        fitting = {"image": images, "key": ("string", "int64")}
        for ours, theirs in self._names.items():
            what = f"column {theirs!r} of {self._name!r} is {types[theirs]}"
            if types[theirs] not in fitting.get(ours, (types[theirs],)):
                raise SourceError(f"{what}; as {ours}, {' or '.join(fitting[ours])} is needed")
            if ours not in fitting and _feature("", types[theirs]).dtype not in (*_SCALARS, *TIME_PARTS):
                raise SourceError(
                    f"{what}; only whole numbers, floats, booleans, times and text can be used: convert it, "
                    "or name the columns to use with features"
                )


def faults_by_row(faults: Sequence[Fault], rows: Rows) -> dict[int, str]:
    """Returns why rows cannot be used, the first reason of each, by their index."""
    found = dict(rows.faults)
    for fault in faults:
        for index in np.flatnonzero(fault.mask).tolist() if fault.mask.any() else ():
            found.setdefault(index, fault.reason(index))
    return found


def _find_faults(ours: str, theirs: str, kind: str, values: Any) -> Iterator[Fault]:
    """Yields what is wrong with some values of a column."""
    items, rows = values, np.arange(len(values))
    if "[" in kind:
        items, rows = values.flatten(), pc.list_parent_indices(values).to_numpy()
    if ours in _OWN or kind.startswith("int64"):
        absent = values.is_null()
        if str(values.type) in ("string", "binary"):
            absent = pc.or_kleene(absent, pc.equal(pc.binary_length(values), 0))
        mask = np.array(pc.fill_null(absent, True))
        mask[rows[items.is_null().to_numpy(False)]] = True
        yield Fault(mask, lambda _: f"has no value in column {theirs!r}")
    if kind.startswith("float32"):
        numbers = typed(items, "float32").to_numpy(False)
        with np.errstate(invalid="ignore"):
            large = np.abs(numbers) > LARGEST_FLOAT
        found = dict(zip(rows[large].tolist(), numbers[large].tolist(), strict=True))
        what = f"in column {theirs!r}, not a number that 32 bits can hold"
        if found:
            yield Fault(np.isin(np.arange(len(values)), [*found]), lambda row: f"has {found[row]} {what}")


def _features_of(name: str, kind: str, values: Any) -> Mapping[str, Any]:
    """Returns the values of a column as those of its features, with NaN or "" where there is none."""
    if kind in TIME_PARTS:
        return time_parts(name, kind, values)
    values = typed(values, kind)
    if values.null_count and not kind.startswith("int64"):
        feature = _feature(name, kind)
        placeholder = math.nan if feature.dtype == "float32" else ""
        filling = [placeholder] * (feature.shape[0] or 0) if feature.shape else placeholder
        values = pc.if_else(values.is_valid(), values, pa.scalar(filling, values.type))
    return {name: values}


def _rounded(columns: Mapping[str, Any]) -> list[str]:
    """Returns the columns of numbers in which different ones are equal in 32 bits."""
    found = []
    for name, values in columns.items():
        if str(values.type) == "double":
            ordered = np.sort(values.to_numpy(False))
            with np.errstate(over="ignore"):
                stored = ordered.astype(np.float32)
            if ((stored[1:] == stored[:-1]) & (ordered[1:] != ordered[:-1])).any():
                found.append(name)
    return found


class Table(TableRows):
    """Rows of a CSV, JSONL or Parquet file, or of all files that a pattern matches.

    A column image holds paths relative to the table, or to the directory before the pattern. Without a column
    key, a row's number is its key, with the file's name if there are several: it stays the same only if new
    rows are added at the end of a file.
    """

    def __init__(self, path: str, use: ColumnUse, scan: Scan | None = None) -> None:
        columns, self._root = open_table(path, use.types, scan)
        super().__init__(resolve(path), columns, use, ("string",))
        self.has_keys = "key" in self._names

    def _image(self, value: str, rows: Rows) -> Span:
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
