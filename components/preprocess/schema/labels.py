"""Labels of a table: the setting `label`, kinds and classes of its columns, and the targets of a batch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from shardline.components.preprocess.lazy import np, pa, pc
from shardline.trainer.base.deserialize import did_you_mean
from shardline.trainer.base.errors import SettingsError, SourceError, printable, short
from shardline.trainer.manifest import CLASS, LABEL, LABEL_KINDS, MULTILABEL, REGRESSION, Label, Spread, Tally

if TYPE_CHECKING:
    import numpy.typing as npt

    _Mask = npt.NDArray[np.bool_]


# Form of the setting, for messages.
_FORM = "KIND:COLUMN, such as regression:fare, class:species or multilabel:tags"
_COLUMN = re.compile(r"(?P<name>.*?)\s*(?:\[(?P<unit>[^\[\]]*)\])?")

# Whole numbers with more distinct values than these, or than this share of the records, are not taken for
# classes, unless there are only a few.
_MOST_CLASSES, _SHARE, _FEW = 50, 0.1, 10

#: Largest number that 32 bits can hold.
LARGEST_FLOAT = 3.4028235677973366e38

# More classes than these are no classes.
_LARGEST_COUNT = 100_000

# Whole numbers below this one are exact as floats of 64 bits.
_EXACT = float(1 << 53)

_TYPE_NAMES = {"string": "text", "strings": "lists of text", "int64": "whole numbers", "float32": "floats"}
_FITTING = {
    "": ("int64", "float32", "string", "strings"),
    CLASS: ("int64", "float32", "string"),
    MULTILABEL: ("int64", "float32", "string", "strings"),
    REGRESSION: ("int64", "float32"),
}

# Returns the arrays of a column, from its first row to its last.
_Values = Callable[[str], Iterable[Any]]


@dataclass(frozen=True)
class LabelSetting:
    """One label of the setting: its kind, "" to infer it, and its columns with units."""

    kind: str
    columns: tuple[str, ...]
    units: tuple[str, ...] = ()


def parse_labels(text: str) -> tuple[LabelSetting, ...]:
    """Parses KIND:COLUMN[,COLUMN], each with an optional [UNIT], with ; between labels; or SettingsError."""
    parsed = tuple(_parse_label(part.strip()) for part in text.split(";") if part.strip())
    columns = [column for setting in parsed for column in setting.columns]
    for column in columns:
        if columns.count(column) > 1:
            raise SettingsError(f"label {text!r} names column {column!r} twice")
    if text and not parsed:
        raise SettingsError(f"label {text!r} names no column; give {_FORM}")
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
        raise SettingsError(f"label {text!r} has a column without a name; give {_FORM}")
    if kind not in (MULTILABEL, REGRESSION) and len(columns) > 1:
        raise SettingsError(
            f"label {text!r} has {len(columns)} columns; several are multilabel:{rest} (0 or 1 in each) or "
            f"regression:{rest} (a number in each), and several labels have ; between them"
        )
    if any(units) and kind not in ("", REGRESSION):
        raise SettingsError(f"label {text!r} has a unit; only numbers have one, regression:{rest}")
    return LabelSetting(kind or (REGRESSION if any(units) else ""), columns, units if any(units) else ())


def unknown_column(
    table: str, column: str, types: Iterable[str], purpose: str, remedy: str = "name one of these"
) -> SourceError:
    """Returns the error of a column that a table does not have; `purpose` as in "to split by"."""
    named = printable(", ".join(types))[:300]
    remedy = did_you_mean(column, types) or remedy
    return SourceError(f"{table!r} has no column {column!r} {purpose}, it has {named}; {remedy}")


def unknown_label(table: str, column: str, types: Iterable[str], labelled: bool) -> SourceError:
    """Returns the error of a label in a column that a table does not have."""
    if labelled:
        return unknown_column(table, column, types, "for the label")
    last = next((name for name in reversed([*types]) if len(name) <= 60), "fare")
    options = [f"--label {shlex.quote(value)}" for value in (last, f"{REGRESSION}:{last}")]
    named, options_named = printable(", ".join(types))[:300], ", or with its kind, ".join(options)
    return SourceError(
        f"{table!r} has no column 'label', it has {named}; say which one is to be predicted with "
        f"{options_named} (label in a pipeline)"
    )


class Fault(NamedTuple):
    """Rows of a batch that cannot be used, and why the row of a number cannot."""

    mask: _Mask
    reason: Callable[[int], str]


def is_number(value: str) -> bool:
    """Returns whether a text is a number."""
    try:
        float(value)
    except ValueError:
        return False
    return True


def are_classes(count: int, rows: int) -> bool:
    """Returns whether so many different values in so many rows may be classes."""
    return count <= min(_MOST_CLASSES, _SHARE * rows)


def find_labels(wanted: Sequence[LabelSetting], kinds: Mapping[str, str], values: _Values) -> list[Label]:
    """Returns the labels in some columns of a table; `values` gives a column's arrays, first row to last.

    Raises SourceError if a type does not fit the kind, or it is unclear whether whole numbers are classes.
    """
    names = [setting.columns[0] for setting in wanted] if len(wanted) > 1 else [LABEL]
    return [_find_label(name, setting, kinds, values) for name, setting in zip(names, wanted, strict=True)]


def encode_targets(label: Label, setting: LabelSetting, arrays: Sequence[Any]) -> tuple[Any, list[Fault]]:
    """Returns the targets of a batch as stored, and the rows that have none, in which they are anything.

    Args:
        label: What `find_labels` found.
        setting: Its columns.
        arrays: The values of each column, int64, float64, string or list<string>, null where missing.
    """
    faults = [
        _missing(column, np.asarray(array.is_null()))
        for column, array in zip(setting.columns, arrays, strict=True)
    ]
    if label.kind == CLASS:
        targets, more = _encode_class(label, setting.columns[0], arrays[0])
    elif label.kind == REGRESSION:
        targets, more = _encode_numbers(setting.columns, arrays)
    elif _is_names(arrays):
        targets, more = _encode_names(label, setting.columns[0], arrays[0])
    else:
        targets, more = _encode_flags(setting.columns, arrays)
    stored = pa.array(targets.ravel())
    if targets.ndim > 1:
        stored = pa.FixedSizeListArray.from_arrays(stored, targets.shape[1])
    return stored, [fault for fault in faults + more if fault.mask.any()]


def _find_label(name: str, wanted: LabelSetting, kinds: Mapping[str, str], values: _Values) -> Label:
    for column in wanted.columns:
        if wanted.kind == REGRESSION and kinds[column] == "string":
            _refuse_text(column, values(column))
        kind, found = wanted.kind, kinds[column]
        if found not in _FITTING[kind] or (found == "strings" and len(wanted.columns) > 1):
            of_kind = f" of kind {kind}" if kind else ""
            fitting = ", ".join(_TYPE_NAMES[each] for each in _FITTING[kind])
            raise SourceError(
                f"column {column!r} is {_TYPE_NAMES.get(found, found)}; as a label{of_kind}, {fitting} "
                "can be used"
            )
    first, kind = wanted.columns[0], wanted.kind
    is_text = kinds[first] in ("string", "strings")
    if kind == REGRESSION:
        return Label(name, kind, wanted.columns, wanted.units)
    if kind == MULTILABEL and (len(wanted.columns) > 1 or not is_text):
        return Label(name, kind, wanted.columns)
    if is_text:
        kind = kind or (CLASS if kinds[first] == "string" else MULTILABEL)
        return Label(name, kind, _text_classes(first, wanted.kind, kind == MULTILABEL, values))
    numbers = _number_classes(first, wanted.kind, values)
    if numbers is None:
        return Label(name, REGRESSION, wanted.columns)
    return Label(name, CLASS, tuple(map(str, numbers)))


def _number_classes(column: str, wanted: str, values: _Values) -> list[int] | None:
    """Returns the whole numbers that occur, sorted; None for numbers that are not classes."""
    distinct, rows, is_float = set[int](), 0, False
    most = _LARGEST_COUNT if wanted else _MOST_CLASSES
    for array in values(column):
        whole, is_other = _whole(array)
        is_float = is_float or pa.types.is_floating(array.type)
        if is_other.any():
            if not wanted:
                return None
            row = int(is_other.argmax())
            raise SourceError(
                f"column {column!r} has {array[row]} in row {rows + row + 1:,}, which is no whole number, so "
                f"no class; correct it, or predict the number, label=regression:{column}"
            )
        distinct.update(whole.unique().drop_null().to_pylist())
        rows += len(array)
        if len(distinct) > most:
            break
    if wanted or len(distinct) <= _FEW or are_classes(len(distinct), rows):
        _refuse_many(column, distinct)
        return sorted(distinct)
    if is_float:
        return None
    raise SourceError(
        f"column {column!r} has {len(distinct):,} different whole numbers in its first {rows:,} rows: say "
        f"whether they are numbers, label=regression:{column}, or classes, label=class:{column}"
    )


def _text_classes(column: str, wanted: str, is_multilabel: bool, values: _Values) -> tuple[str, ...]:
    """Returns the texts that occur, or the names in them, sorted."""
    distinct, rows = set[str](), 0
    for array in values(column):
        names = _names(array)[0] if is_multilabel else _clean(array.unique())
        distinct.update(set(names.unique().to_pylist()) - {None})
        rows += len(array)
        if len(distinct) > _LARGEST_COUNT:
            break
    if not is_multilabel and not wanted:
        _check_names(column, distinct, rows, values)
    _refuse_many(column, distinct)
    return tuple(sorted(distinct))


def _refuse_many(column: str, distinct: set[Any]) -> None:
    if len(distinct) > _LARGEST_COUNT:
        raise SourceError(
            f"column {column!r} has more than {_LARGEST_COUNT:,} different values, which are no classes; "
            "name another column, or join rare values to one"
        )


def _check_names(column: str, distinct: set[str], rows: int, values: _Values) -> None:
    """Refuses text that is hardly the name of a class: mostly numbers, or another text in most rows."""
    if sum(map(is_number, distinct)) > len(distinct) / 2:
        _refuse_text(column, values(column))
    split = {name: [part for part in map(str.strip, name.split("|")) if part] for name in distinct}
    multiple = min((name for name, parts in split.items() if len(parts) > 1), default=None)
    if multiple is not None and len(set(chain.from_iterable(split.values()))) < len(distinct):
        raise SourceError(
            f"column {column!r} has {short(multiple)}: say whether that is several names, "
            f"label=multilabel:{column}, or one, label=class:{column}"
        )
    # So many texts that nearly every row would be a class of its own.
    if len(distinct) > _FEW and len(distinct) > rows / 2:
        raise SourceError(
            f"column {column!r} has {len(distinct):,} different texts in {rows:,} rows, such as "
            f"{short(min(distinct))}, which are hardly names of classes; name another column, "
            f"or say that they are with label=class:{column}"
        )


def _refuse_text(column: str, arrays: Iterable[Any]) -> None:
    values = chain.from_iterable(array.to_pylist() for array in arrays)
    for row, value in enumerate(values, start=1):
        if value not in (None, "") and not is_number(value):
            raise SourceError(
                f"column {column!r} has {short(value)} in row {row:,}, which is no number; "
                f"correct it, or say that the column is of classes, label=class:{column}"
            )


def _whole(array: Any) -> tuple[Any, _Mask]:
    """Returns whole numbers, null where there are none, and a mask of the numbers that are others."""
    if not pa.types.is_floating(array.type):
        return array.cast(pa.int64()), np.zeros(len(array), bool)
    numbers = array.to_numpy(zero_copy_only=False)
    is_whole = (np.abs(numbers) < _EXACT) & (numbers == np.floor(numbers))
    # numpy's int64 of NaN is undefined.
    whole = np.where(is_whole, numbers, 0).astype(np.int64)
    return pa.array(whole, mask=~is_whole), ~is_whole & ~np.isnan(numbers)


def _clean(text: Any) -> Any:
    """Returns names as they are compared: without spaces around them, and composed; null where empty."""
    text = pc.utf8_trim_whitespace(pc.utf8_normalize(text, form="NFC"))
    return pc.if_else(pc.equal(text, ""), None, text)


def _names(array: Any) -> tuple[Any, Any]:
    """Returns the names in texts, with | between them, or in lists, and the row of each."""
    lists = array if pa.types.is_list(array.type) else pc.split_pattern(array, "|")
    names, rows = _clean(lists.flatten()), lists.value_parent_indices()
    return names.drop_null(), rows.filter(names.is_valid())


def _is_names(arrays: Sequence[Any]) -> bool:
    kind = arrays[0].type
    return len(arrays) == 1 and (pa.types.is_list(kind) or pa.types.is_string(kind))


def _missing(column: str, mask: _Mask) -> Fault:
    return Fault(mask, lambda _: f"has no value in column {column!r}")


def _encode_class(label: Label, column: str, array: Any) -> tuple[npt.NDArray[Any], list[Fault]]:
    if pa.types.is_string(array.type):
        # A look at each text that occurs; the last one is that of rows without a text.
        encoded = array.dictionary_encode()
        names = pa.concat_arrays([_clean(encoded.dictionary), pa.nulls(1, array.type)])
        at = np.asarray(encoded.indices.fill_null(len(names) - 1))
        targets, is_missing = _index(names, label.outputs)[at], np.asarray(names.is_null())[at]
    else:
        numbers = _whole(array)[0]
        targets = _index(numbers, [*map(int, label.outputs)])
        is_missing = np.asarray(numbers.is_null())
    return targets, [
        _missing(column, is_missing),
        Fault(
            targets < 0,
            lambda row: f"has {short(array[row].as_py())} in column {column!r}, none of its classes",
        ),
    ]


def _encode_numbers(columns: Sequence[str], arrays: Sequence[Any]) -> tuple[npt.NDArray[Any], list[Fault]]:
    targets = np.stack(
        [array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False) for array in arrays], axis=1
    )
    faults = []
    for index, column in enumerate(columns):
        wrong = ~(np.abs(targets[:, index]) <= LARGEST_FLOAT)

        def reason(row: int, index: int = index, column: str = column) -> str:
            return (
                f"has {targets[row, index]:g} in column {column!r}, which is to be predicted, not a finite "
                "number that 32 bits can hold"
            )

        faults.append(Fault(wrong, reason))
    return targets[:, 0] if len(columns) == 1 else targets, faults


def _encode_names(label: Label, column: str, array: Any) -> tuple[npt.NDArray[Any], list[Fault]]:
    names, rows = _names(array)
    rows, found = rows.to_numpy(), _index(names, label.outputs)
    unknown = np.isin(np.arange(len(array)), rows[found < 0])
    rows, found = rows[found >= 0], found[found >= 0]
    targets = np.zeros((len(array), len(label.outputs)), np.int64)
    targets[rows, found] = 1
    return targets, [
        Fault(
            unknown, lambda row: f"has {short(array[row].as_py())} in column {column!r}, not only its names"
        )
    ]


def _encode_flags(columns: Sequence[str], arrays: Sequence[Any]) -> tuple[npt.NDArray[Any], list[Fault]]:
    targets, faults = np.zeros((len(arrays[0]), len(columns)), np.int64), []
    for index, (column, array) in enumerate(zip(columns, arrays, strict=True)):
        if pa.types.is_string(array.type):
            text = pc.utf8_lower(pc.utf8_trim_whitespace(array))
            found = _index(text, ["0", "1", "false", "true"])
            flags = np.where(found < 0, found, found % 2)
        else:
            flags = pc.fill_null(_whole(array)[0], -1).to_numpy(zero_copy_only=False)

        def reason(row: int, array: Any = array, column: str = column) -> str:
            return f"has {short(array[row].as_py())} in column {column!r}, not 0 or 1"

        faults.append(Fault((flags != 0) & (flags != 1), reason))
        targets[:, index] = flags
    return targets, faults


def _index(values: Any, known: Sequence[Any]) -> npt.NDArray[np.int64]:
    """Returns the position of each value among the known ones; -1 where it has none."""
    found = pc.index_in(values, pa.array(known, values.type), skip_nulls=True)
    return np.asarray(pc.fill_null(found, -1), np.int64)


def tally_label(label: Label, values: Sequence[Sequence[Any]] | npt.NDArray[Any]) -> Tally:
    """Returns the tally of a label from its stored values in some examples, at least one."""
    table = np.asarray(values, np.float64).reshape(len(values), -1)
    if label.kind == CLASS:
        return Tally(tuple(np.bincount(table[:, 0].astype(np.int64), minlength=len(label.outputs)).tolist()))
    if label.kind == MULTILABEL:
        return Tally(tuple(int(count) for count in table.sum(axis=0)))
    columns = zip(
        *(function(table, axis=0).tolist() for function in (np.min, np.max, np.mean, np.std)), strict=True
    )
    return Tally(spreads=tuple(Spread(*numbers) for numbers in columns))


def describe_label(label: Label, tallies: Sequence[Tally]) -> str:
    """Describes a label in one line: "fare, regression, 3.25 to 88 USD"."""
    name = f"{label.name}, " if label.name != LABEL else ""
    if label.kind != REGRESSION:
        named = printable(", ".join(label.outputs[:5])) + (", ..." if len(label.outputs) > 5 else "")
        return f"{name}{label.kind} of {len(label.outputs):,}: {named}"
    units, spreads = label.units or ("",) * len(label.outputs), [each.spreads for each in tallies]
    ranges = [
        f"{min(each.least for each in found):g} to {max(each.largest for each in found):g} {unit}".rstrip()
        for unit, *found in zip(units, *spreads, strict=True)
    ]
    if len(ranges) == 1:
        return f"{label.outputs[0]}, {label.kind}, {ranges[0]}"
    parts = (f"{output}, {each}" for output, each in zip(label.outputs, ranges, strict=True))
    return f"{name}{label.kind} of {len(ranges)} numbers: {'; '.join(parts)}"
