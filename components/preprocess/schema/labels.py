"""Setting `label`: the columns to predict and their kinds, and the errors for columns that are not there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from shardline.trainer.base.deserialize import did_you_mean
from shardline.trainer.base.errors import SettingsError, SourceError, printable
from shardline.trainer.manifest import LABEL_KINDS, MULTILABEL, REGRESSION

#: Form of the setting `label`, for messages.
FORM = "KIND:COLUMN, such as regression:fare, class:species or multilabel:tags"

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
