"""Slips: values that are no numbers in a column of numbers, of which CSV makes text for their sake."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardline.components.preprocess.labels import is_number
from shardline.components.preprocess.schema import Schema
from shardline.trainer.errors import SourceError, printable
from shardline.trainer.progress import say

#: What a CSV file has in place of a number, where the column is read as text for another value's sake.
NO_VALUES = frozenset({"", "NA", "N/A", "#N/A", "n/a", "NULL", "null", "NaN", "nan"})

#: Text of this share of numbers is told, and after so many rows without it no longer looked at.
_SHARE, _ENOUGH = 0.9, 1000

#: Up to this share of other values, or one of them, they are slips; more may be what the column is (12a).
_RARE = 0.01


class Slip(NamedTuple):
    """A column of text that is nearly all numbers.

    Attributes:
        row, value: The first value that is none, and its row from 1 on.
        texts, numbers: How many rows have a value, and how many of these a number.
    """

    column: str
    row: int
    value: str
    texts: int
    numbers: int


class Slips:
    """Looks for slips in columns of text, row by row."""

    def __init__(self, columns: Iterable[str]) -> None:
        self._seen = {column: Slip(column, 0, "", 0, 0) for column in columns}

    def look(self, number: int, values: Mapping[str, Any]) -> None:
        """Counts the numbers in a row's columns of text."""
        for column, seen in [*self._seen.items()]:
            value = values[column]
            if value is None or value.strip() in NO_VALUES:
                continue
            if is_number(value):
                seen = seen._replace(numbers=seen.numbers + 1)
            elif not seen.row:
                seen = seen._replace(row=number, value=value)
            self._seen[column] = seen._replace(texts=seen.texts + 1)
            if seen.texts == _ENOUGH and seen.numbers < _SHARE * seen.texts:
                del self._seen[column]

    def found(self) -> Iterator[Slip]:
        """Yields the columns that are nearly all numbers."""
        for seen in self._seen.values():
            if seen.row and seen.numbers and seen.numbers >= _SHARE * seen.texts:
                yield seen


def check_slips(found: Sequence[Slip], group: str, schema: Schema | None) -> None:
    """Tells of columns that are nearly all numbers, but for groups, and for those whose type a schema says.

    Raises:
        SourceError: So few values are no numbers that they are slips.
    """
    for slip in found:
        if slip.column == group or (schema and slip.column in schema.fields):
            continue
        column, value = printable(repr(slip.column)), printable(repr(slip.value))[:60]
        told = (
            f"column {column} has {value} in row {slip.row:,}, and numbers in {slip.numbers:,} of "
            f"{slip.texts:,} rows"
        )
        if slip.texts - slip.numbers <= max(1, _RARE * slip.texts):
            raise SourceError(
                f"{told}; correct it, or leave it empty, or if the column is text, say so in a schema: "
                f'{{"fields": [{{"name": "{printable(slip.column)}", "type": "string"}}]}}'
            )
        say("preprocess", f"warning: {told}: it is text")
