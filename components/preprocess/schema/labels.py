"""Labels of a source: the setting that names their columns, and the kind inferred from a column's values.

Also checks of values: malformed numbers in a column of numbers, and numbers that 32 bits do not tell apart.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardline.trainer.base.deserialize import did_you_mean
from shardline.trainer.base.errors import SettingsError, SourceError, printable
from shardline.trainer.base.progress import report
from shardline.trainer.data.features import CLASS, LABEL, LABEL_KINDS, MULTILABEL, REGRESSION, Label

#: Form of the setting `label`, for messages.
FORM = "KIND:COLUMN, such as regression:fare, class:species or multilabel:tags"

#: Whole numbers with more distinct values than these, or than this share of the records, are not taken for
#: classes, unless there are only a few.
MOST_CLASSES, SHARE, FEW = 50, 0.1, 10

#: A label above this is not an index of a class, but a damaged or wrong value.
LARGEST_CLASS = 99_999

#: Largest number that 32 bits can hold.
LARGEST_FLOAT = 3.4028235677973366e38

#: Texts of a CSV file for a missing number, where another value made the column text.
NO_VALUES = frozenset({"", "NA", "N/A", "#N/A", "n/a", "NULL", "null", "NaN", "nan"})

#: A text column with this share of numbers is reported; without it, it is no longer checked after so many
#: rows.
_MOSTLY, _ENOUGH = 0.9, 1000

#: Up to this share of other values, or one, they are malformed; more may be valid text (12a).
_RARE = 0.01

_COLUMN = re.compile(r"(?P<name>.*?)\s*(?:\[(?P<unit>[^\[\]]*)\])?")


@dataclass(frozen=True)
class LabelSetting:
    """One label of the setting: its kind, "" to infer it, and its columns with units."""

    kind: str
    columns: tuple[str, ...]
    units: tuple[str, ...] = ()


def parse(text: str) -> tuple[LabelSetting, ...]:
    """Parses KIND:COLUMN[,COLUMN], each with an optional [UNIT], with ; between labels; or SettingsError."""
    parsed = tuple(_parse_label(part.strip()) for part in text.split(";") if part.strip())
    columns = [column for setting in parsed for column in setting.columns]
    for column in columns:
        if columns.count(column) > 1:
            raise SettingsError(f"label {text!r} names column {column!r} twice")
    if text and not parsed:
        raise SettingsError(f"label {text!r} names no column; give {FORM}")
    return parsed


def _parse_label(text: str) -> LabelSetting:
    kind, colon, rest = text.partition(":")
    if not colon:
        kind, rest = "", text
    if colon and kind not in LABEL_KINDS:
        hint = did_you_mean(kind, LABEL_KINDS, after="; ")
        raise SettingsError(
            f"label {text!r} is of the unknown kind {kind!r}; there are {', '.join(LABEL_KINDS)}{hint}"
        )
    found = [_COLUMN.fullmatch(part.strip()) for part in rest.split(",")]
    columns = tuple(match["name"] for match in found if match and match["name"])
    units = tuple(match["unit"] or "" for match in found if match and match["name"])
    if not columns or len(columns) < len(found):
        raise SettingsError(f"label {text!r} has a column without a name; give {FORM}")
    if kind not in (MULTILABEL, REGRESSION) and len(columns) > 1:
        raise SettingsError(
            f"label {text!r} has {len(columns)} columns; several are multilabel:{rest} (0 or 1 in each) or "
            f"regression:{rest} (a number in each), and several labels have ; between them"
        )
    if any(units) and kind not in ("", REGRESSION):
        raise SettingsError(f"label {text!r} has a unit; only numbers have one, regression:{rest}")
    return LabelSetting(kind or (REGRESSION if any(units) else ""), columns, units if any(units) else ())


def find_labels(
    wanted: Sequence[LabelSetting], types: Mapping[str, str], values: Callable[[str], Iterable[Any]]
) -> list[Label]:
    """Returns the labels in some columns of a table; `values` reads a column from its first row to its last.

    Raises SourceError if a type does not fit the kind, or it is unclear whether whole numbers are classes.
    """
    names = [setting.columns[0] for setting in wanted] if len(wanted) > 1 else [LABEL]
    return [_find_label(name, setting, types, values) for name, setting in zip(names, wanted, strict=True)]


def _find_label(
    name: str, wanted: LabelSetting, types: Mapping[str, str], values: Callable[[str], Iterable[Any]]
) -> Label:
    for column in wanted.columns:
        if wanted.kind == REGRESSION and types[column] == "string":
            _refuse_text(column, values(column))
        kind, found = wanted.kind, types[column]
        if found not in _FITTING[kind] or (found == "strings" and len(wanted.columns) > 1):
            of_kind = f" of kind {kind}" if kind else ""
            fitting = ", ".join(_TYPE_NAMES[each] for each in _FITTING[kind])
            raise SourceError(
                f"column {column!r} is {_TYPE_NAMES.get(found, found)}; as a label{of_kind}, {fitting} "
                "can be used"
            )
    first = wanted.columns[0]
    kind = wanted.kind or {"float32": REGRESSION, "strings": MULTILABEL}.get(types[first], CLASS)
    if kind == REGRESSION:
        return Label(name, kind, wanted.columns, wanted.units)
    if kind == MULTILABEL and (len(wanted.columns) > 1 or types[first] not in ("string", "strings")):
        return Label(name, kind, wanted.columns)
    distinct = set[Any]()
    records = 0
    for value in values(first):
        records += 1
        if kind == MULTILABEL:
            distinct.update(split_names(value) or ())
        else:
            distinct.add(value)
    distinct -= {None, ""}
    if types[first] != "int64":
        if kind == CLASS and not wanted.kind:
            _check_names(first, distinct, records, values)
        return Label(name, kind, tuple(sorted(distinct)))
    are_few = len(distinct) <= FEW or (len(distinct) <= MOST_CLASSES and len(distinct) <= SHARE * records)
    if not wanted.kind and not are_few:
        raise SourceError(
            f"column {first!r} has {len(distinct):,} different whole numbers in {records:,} rows: say "
            f"whether they are numbers, label=regression:{first}, or classes, label=class:{first}"
        )
    return Label(name, kind, tuple(str(number) for number in _integer_classes(distinct)))


def _integer_classes(distinct: set[int]) -> Sequence[int]:
    """Returns the classes: all up to the largest, or only those with examples where nine of ten have none."""
    if sum(value >= 0 for value in distinct) < 2:
        return sorted(distinct)  # such as -1 and 1
    indices = sorted(value for value in distinct if 0 <= value <= LARGEST_CLASS)
    if 2 * len(indices) <= len(distinct):
        return sorted(value for value in distinct if value >= 0)
    return indices if 10 * len(indices) <= indices[-1] + 1 else range(indices[-1] + 1)


_TYPE_NAMES = {"string": "text", "strings": "lists of text", "int64": "whole numbers", "float32": "floats"}
_FITTING = {
    "": ("int64", "float32", "string", "strings"),
    CLASS: ("int64", "string"),
    MULTILABEL: ("int64", "string", "strings"),
    REGRESSION: ("int64", "float32"),
}


def _check_names(
    column: str, distinct: set[str], records: int, values: Callable[[str], Iterable[Any]]
) -> None:
    """Refuses text that is hardly the name of a class: mostly numbers, or another text in most rows."""
    if sum(map(is_number, distinct)) > len(distinct) / 2:
        _refuse_text(column, values(column))
    multiple = next((name for name in sorted(distinct) if len(split_names(name) or ()) > 1), None)
    parts = {part for name in distinct for part in split_names(name) or ()}
    if multiple is not None and len(parts) < len(distinct):
        raise SourceError(
            f"column {column!r} has {printable(repr(multiple))[:60]}: say whether that is several names, "
            f"label=multilabel:{column}, or one, label=class:{column}"
        )
    # So many texts that nearly every row would be a class of its own.
    if len(distinct) > FEW and len(distinct) > records / 2:
        comma = all(is_number(name.replace(",", ".")) for name in distinct)
        raise SourceError(
            f"column {column!r} has {len(distinct):,} different texts in {records:,} rows, such as "
            f"{printable(repr(min(distinct)))[:60]}, which are hardly names of classes; "
            + ("write numbers with a point, not a comma" if comma else "name another column")
            + f", or say that they are with label=class:{column}"
        )


def _refuse_text(column: str, values: Iterable[Any]) -> None:
    for row, value in enumerate(values, start=1):
        if value not in (None, "") and not is_number(value):
            raise SourceError(
                f"column {column!r} has {printable(repr(value))[:60]} in row {row:,}, which is no number; "
                f"correct it, or say that the column is of classes, label=class:{column}"
            )


def is_number(value: str) -> bool:
    """Returns whether a text is a number."""
    try:
        float(value)
    except ValueError:
        return False
    return True


def split_names(value: Any) -> Sequence[str] | None:
    """Returns the names in a list or a text of them, with | between; None where there is no value."""
    if isinstance(value, str):
        return [name.strip() for name in value.split("|") if name.strip()]
    return value if value is None or isinstance(value, Sequence) else None


def unknown_column(table: str, column: str, types: Iterable[str], labelled: bool) -> SourceError:
    """Returns the error of a label in a column that a table does not have."""
    named = printable(", ".join(types))[:300]
    if labelled:
        hint = did_you_mean(column, types) or "name one of these"
        return SourceError(f"{table!r} has no column {column!r} for the label, it has {named}; {hint}")
    last = [*types][-1] if [*types] else "fare"
    options = [f"--label {shlex.quote(value)}" for value in (last, f"{REGRESSION}:{last}")]
    return SourceError(
        f"{table!r} has no column 'label', it has {named}; say which one is to be predicted with "
        f"{', or with its kind, '.join(options)} (label in a pipeline)"
    )


@dataclass
class MalformedValue:
    """A column of text, its first value that is not a number, and its numbers of texts and of numbers."""

    column: str
    row: int = 0
    value: str = ""
    texts: int = 0
    numbers: int = 0


class MalformedValues:
    """Finds malformed numbers in columns of text, row by row."""

    def __init__(self, columns: Iterable[str]) -> None:
        self._seen = list(map(MalformedValue, columns))

    def inspect(self, number: int, values: Mapping[str, Any]) -> None:
        """Counts the numbers in a row's columns of text."""
        for seen in tuple(self._seen):
            value = values[seen.column]
            if value is None or value.strip() in NO_VALUES:
                continue
            if is_number(value):
                seen.numbers += 1
            elif not seen.row:
                seen.row, seen.value = number, value
            seen.texts += 1
            if seen.texts == _ENOUGH and seen.numbers < _MOSTLY * seen.texts:
                self._seen.remove(seen)

    def columns(self) -> list[MalformedValue]:
        """Returns the columns that are nearly all numbers."""
        return [seen for seen in self._seen if seen.row and seen.numbers >= max(1, _MOSTLY * seen.texts)]


def check_malformed_values(found: Sequence[MalformedValue], group: str) -> None:
    """Reports columns that are nearly all numbers, except the group; few other values are a SourceError."""
    for malformed in found:
        if malformed.column == group:
            continue
        column, value = printable(repr(malformed.column)), printable(repr(malformed.value))[:60]
        message = (
            f"column {column} has {value} in row {malformed.row:,}, and numbers in {malformed.numbers:,} of "
            f"{malformed.texts:,} rows"
        )
        if malformed.texts - malformed.numbers <= max(1, _RARE * malformed.texts):
            raise SourceError(
                f"{message}; correct it, or leave it empty, or if the column is text, say so: --column "
                f"{printable(malformed.column)}=text (columns in a pipeline)"
            )
        report("preprocess", f"warning: {message}: it is text")


def report_rounding(
    batches: Iterable[Mapping[str, Sequence[Any]]], columns: Sequence[str]
) -> Iterator[Mapping[str, Sequence[Any]]]:
    """Yields batches of columns; reports those in which 32-bit floats make different values equal."""
    import numpy as np

    rounded = list[str]()
    for batch in batches:
        for column in columns if len(rounded) < len(columns) else ():
            values = np.unique([value for value in batch[column] if value is not None])
            values = values[np.isfinite(values)]
            with np.errstate(over="ignore"):
                if column not in rounded and len(np.unique(values.astype(np.float32))) < len(values):
                    rounded.append(column)
        yield batch
    if rounded:
        named = ", ".join(printable(repr(column)) for column in rounded[:5])
        more = f" and {len(rounded) - 5} more columns" if rounded[5:] else ""
        report(
            "preprocess",
            f"numbers are stored in 32 bits, in which different values become equal: {named}{more}; "
            "--column NAME=text (columns in a pipeline) keeps them",
        )
