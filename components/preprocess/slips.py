"""Slips: values that are no numbers in a column of numbers, and numbers that are stored as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardline.components.preprocess.labels import is_number
from shardline.trainer.errors import SourceError, printable
from shardline.trainer.progress import say

#: What a CSV file has in place of a number, where the column is read as text for another value's sake.
NO_VALUES = frozenset({"", "NA", "N/A", "#N/A", "n/a", "NULL", "null", "NaN", "nan"})

#: Text of this share of numbers is told, and after so many rows without it no longer looked at.
_SHARE, _ENOUGH = 0.9, 1000

#: Up to this share of other values, or one of them, they are slips; more may be what the column is (12a).
_RARE = 0.01

#: Different values of a column that are compared at most (8 MB), how many are put together at least, and the
#: columns that are named.
_MOST_VALUES, _TOGETHER, _NAMED = 1 << 20, 1 << 16, 5


@dataclass
class Slip:
    """A column of text that is nearly all numbers.

    Attributes:
        row, value: The first value that is none, and its row from 1 on.
        texts, numbers: How many rows have a value, and how many of these a number.
    """

    column: str
    row: int = 0
    value: str = ""
    texts: int = 0
    numbers: int = 0


class Slips:
    """Looks for slips in columns of text, row by row."""

    def __init__(self, columns: Iterable[str]) -> None:
        self._seen = list(map(Slip, columns))

    def look(self, number: int, values: Mapping[str, Any]) -> None:
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
            if seen.texts == _ENOUGH and seen.numbers < _SHARE * seen.texts:
                self._seen.remove(seen)

    def found(self) -> list[Slip]:
        """Returns the columns that are nearly all numbers."""
        return [one for one in self._seen if one.row and one.numbers >= max(1, _SHARE * one.texts)]


class Rounding:
    """Counts the different values of columns of which 32 bits are stored, and what is left of them."""

    def __init__(self, columns: Iterable[str]) -> None:
        self._parts = {column: list[Any]() for column in columns}

    def watch(self, batches: Iterable[Mapping[str, Sequence[Any]]]) -> Iterator[Mapping[str, Sequence[Any]]]:
        """Yields batches of columns, and looks at their values."""
        import numpy as np

        for batch in batches:
            for column, parts in self._parts.items():
                if not parts or len(parts[0]) < _MOST_VALUES:
                    numbers = np.array(batch[column])
                    if numbers.dtype == object:
                        numbers = np.array([value for value in batch[column] if value is not None])
                    parts.append(np.unique(numbers))
                    if sum(map(len, parts[1:])) > max(len(parts[0]), _TOGETHER):
                        parts[:] = [np.unique(np.concatenate(parts))]
            yield batch

    def tell(self) -> None:
        """Says in which columns different values have become one, and how many are left."""
        import numpy as np

        told = []
        for column, parts in self._parts.items():
            values = np.unique(np.concatenate(parts or [()]))
            values = values[np.isfinite(values)]
            with np.errstate(over="ignore"):
                left = len(np.unique(values.astype(np.float32)))
            if left < len(values):
                told.append(f"{printable(repr(column))} has {left:,} of {len(values):,}")
        if told:
            more = f" and {len(told) - _NAMED} more columns" if len(told) > _NAMED else ""
            say(
                "preprocess",
                "numbers are stored in 32 bits, in which different values become one: "
                f"{', '.join(told[:_NAMED])}{more}; --column NAME=text (columns in a pipeline) keeps them",
            )


def check_slips(found: Sequence[Slip], group: str) -> None:
    """Tells of columns that are nearly all numbers, but for groups.

    Raises:
        SourceError: So few values are no numbers that they are slips.
    """
    for slip in found:
        if slip.column == group:
            continue
        column, value = printable(repr(slip.column)), printable(repr(slip.value))[:60]
        told = (
            f"column {column} has {value} in row {slip.row:,}, and numbers in {slip.numbers:,} of "
            f"{slip.texts:,} rows"
        )
        if slip.texts - slip.numbers <= max(1, _RARE * slip.texts):
            raise SourceError(
                f"{told}; correct it, or leave it empty, or if the column is text, say so: --column "
                f"{printable(slip.column)}=text (columns in a pipeline)"
            )
        say("preprocess", f"warning: {told}: it is text")
