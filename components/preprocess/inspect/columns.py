"""Column statistics: ranges, quantiles and frequent values of a dataset's columns, counted shard by shard."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from shardline.components import text
from shardline.components.preprocess.inspect import Values
from shardline.trainer.base.errors import DatasetError, printable
from shardline.trainer.data.features import REGRESSION, Spread, Tally
from shardline.trainer.data.manifest import Manifest

#: Shares of the values that are below each of the quantiles.
SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)

# Values kept for quantiles: of a dataset about so many, of a shard at least.
_KEPT, _KEPT_OF_SHARD = 200_000, 64

# Most different texts that are counted; more are only reported as more.
_MOST_TEXTS = 10_000
# Up to so many, including an empty one, all are listed.
_MOST_LISTED = 51
_LONGEST = 100
_FREQUENT = 3

# Values of a column that are summed at a time.
_BLOCK = 4096


@dataclass(frozen=True)
class NumberColumn:
    """Numbers of a column: of all examples, those `missing` a finite number, and those that are `zeros`.

    `spread` is None where all are missing. `quantiles` are those at `SHARES`; of many examples, of a random
    sample.
    """

    name: str
    examples: int
    missing: int
    zeros: int
    spread: Spread | None
    quantiles: tuple[float, ...]


@dataclass(frozen=True)
class TextColumn:
    """Texts of a column.

    Attributes:
        empty: Number of examples with an empty text.
        distinct: Number of texts that differ in their first 100 characters.
        has_more: Whether there are more texts than are counted.
        frequent: The most frequent, cut after 100 characters, and their numbers.
        lengths: Smallest, largest and mean number of characters, and standard deviation.
        values: All texts but the empty one, sorted, where they are few and short.
    """

    name: str
    examples: int
    empty: int
    distinct: int
    has_more: bool
    frequent: tuple[tuple[str, int], ...]
    lengths: Spread
    values: tuple[str, ...] = ()


class ColumnCounter:
    """Counts the values of columns, and of labels that are numbers, in the examples of one of `shards` parts.

    `merge_columns` joins their results.
    """

    def __init__(self, manifest: Manifest, shards: int) -> None:
        kept = max(_KEPT_OF_SHARD, _KEPT // shards)
        labels = [label for label in manifest.labels if label.kind == REGRESSION]
        sources = {output: (label.name, i) for label in labels for i, output in enumerate(label.outputs)}
        columns = [
            column for column in manifest.columns if not column.shape and column.name != manifest.time_feature
        ]
        sources |= {column.name: (column.name, 0) for column in columns if column.dtype != "string"}
        self._numbers = {name: (*source, NumberCounter(kept)) for name, source in sources.items()}
        self._texts = {c.name: (c.name, 0, _TextCounter()) for c in columns if c.dtype == "string"}

    def add(self, values: Values) -> None:
        """Counts an example; DatasetError names a missing column."""
        for kind, columns in ((bytes, self._texts), (float | int, self._numbers)):
            for name, (feature, index, counter) in columns.items():
                found = values.get(feature, ("", ()))[1]
                if len(found) <= index or not isinstance(found[index], kind):
                    raise DatasetError(f"an example has no {name!r} as the manifest says")
                counter.add(found[index])

    def found(self) -> dict[str, dict[str, Any]]:
        """Returns the counts as JSON, for `merge_columns`."""
        return {
            "numbers": {name: counted.found() for name, (*_, counted) in self._numbers.items()},
            "texts": {name: counted.found() for name, (*_, counted) in self._texts.items()},
        }


class NumberCounter:
    """Counts numbers, and keeps the first `kept` of them."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._block: list[float] = []
        self._examples = self._zeros = 0
        self._spreads: list[tuple[int, Spread]] = []
        self._sample: list[float] = []

    def add(self, value: float) -> None:
        """Counts a number."""
        self._block.append(value)
        if len(self._block) == _BLOCK:
            self._sum_up()

    def _sum_up(self) -> None:
        values = np.asarray(self._block, np.float64)
        finite = values[np.isfinite(values)]
        self._examples += len(values)
        self._zeros += int((finite == 0).sum())
        self._block = []
        # The first values of a shard are a random sample: shards are written in the order of hashes.
        self._sample += finite[: self._kept - len(self._sample)].tolist()
        if len(finite):
            numbers = (finite.min(), finite.max(), finite.mean(), finite.std())
            self._spreads = [_pooled([*self._spreads, (len(finite), Spread(*map(float, numbers)))])]

    def found(self) -> dict[str, Any]:
        """Returns the counts as JSON, for `number_column`."""
        self._sum_up()
        spread = [(count, *astuple(each)) for count, each in self._spreads]
        return {
            "examples": self._examples, "zeros": self._zeros, "spread": spread, "sample": self._sample
        }  # fmt: skip


class _TextCounter:
    def __init__(self) -> None:
        self._counts, self._lengths = Counter[str](), Counter[int]()
        self._has_more = False

    def add(self, value: bytes) -> None:
        characters = value.decode("utf-8", "replace")
        self._lengths[len(characters)] += 1
        characters = characters[:_LONGEST]
        if characters in self._counts or len(self._counts) < _MOST_TEXTS:
            self._counts[characters] += 1
        else:
            self._has_more = True

    def found(self) -> dict[str, Any]:
        return {
            "counts": list(self._counts.items()),
            "lengths": list(self._lengths.items()),
            "has_more": self._has_more,
        }


def merge_columns(parts: Iterable[Mapping[str, Any]]) -> tuple[list[NumberColumn], list[TextColumn]]:
    """Merges the results of a `ColumnCounter` for each part of a dataset, at least one."""
    found = list(parts)
    return (
        [number_column(name, [part["numbers"][name] for part in found]) for name in found[0]["numbers"]],
        [_text_column(name, [part["texts"][name] for part in found]) for name in found[0]["texts"]],
    )


def number_column(name: str, parts: Sequence[Mapping[str, Any]]) -> NumberColumn:
    """Merges the results of a `NumberCounter` for each part of a dataset, at least one."""
    spreads = [(count, Spread(*spread)) for part in parts for count, *spread in part["spread"]]
    examples = sum(part["examples"] for part in parts)
    sample = np.concatenate([np.asarray(part["sample"], np.float64) for part in parts])
    weights = [
        np.full(len(part["sample"]), sum(count for count, *_ in part["spread"]) / max(1, len(part["sample"])))
        for part in parts
    ]
    return NumberColumn(
        name,
        examples,
        examples - sum(count for count, _ in spreads),
        sum(part["zeros"] for part in parts),
        _pooled(spreads)[1] if spreads else None,
        tuple(
            np.quantile(sample, SHARES, method="inverted_cdf", weights=np.concatenate(weights)).tolist()
            if len(sample)
            else ()
        ),
    )


def _text_column(name: str, parts: Sequence[Mapping[str, Any]]) -> TextColumn:
    counts, lengths = Counter[str](), Counter[int]()
    for part in parts:
        counts.update(dict(part["counts"]))
        lengths.update(dict(part["lengths"]))
    sizes, weights = np.asarray(sorted(lengths.items()), np.float64).T
    mean = float(np.average(sizes, weights=weights))
    deviation = math.sqrt(float(np.average((sizes - mean) ** 2, weights=weights)))
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    has_all = len(counts) <= _MOST_LISTED and sizes[-1] <= _LONGEST
    return TextColumn(
        name,
        lengths.total(),
        counts[""],
        len(counts),
        any(part["has_more"] for part in parts),
        tuple(ordered[:_FREQUENT]),
        Spread(float(sizes[0]), float(sizes[-1]), mean, deviation),
        tuple(sorted(filter(None, counts))) if has_all else (),
    )


def _pooled(spreads: Sequence[tuple[int, Spread]]) -> tuple[int, Spread]:
    tally = Tally.merge([(count, Tally(spreads=(spread,))) for count, spread in spreads])
    return sum(count for count, _ in spreads), tally.spreads[0]


#: Titles of the cells of `number_row` and `text_row`.
NUMBER_TITLES = (
    "numbers", "least", "5 %", "median", "95 %", "largest", "mean", "deviation", "missing", "zeros"
)  # fmt: skip
TEXT_TITLES = ("text", "different", "empty", "characters", "most frequent")


def number_row(column: NumberColumn, shown: Callable[[float], str] = "{:.5g}".format) -> tuple[str, ...]:
    """Returns the table row of a column of numbers, formatted by `shown`."""
    shares = (f"{count / column.examples:.1%}" for count in (column.missing, column.zeros))
    if column.spread is None:
        return (printable(column.name), *("",) * 7, *shares)
    low, _, middle, _, high = column.quantiles
    least, largest, mean, deviation = astuple(column.spread)
    numbers = map(shown, (least, low, middle, high, largest, mean, deviation))
    return (printable(column.name), *numbers, *shares)


def text_row(column: TextColumn) -> tuple[str, ...]:
    """Returns the table row of a column of texts."""
    lengths = f"{column.lengths.least:,.0f} to {column.lengths.largest:,.0f}, mean {column.lengths.mean:,.1f}"
    frequent = ", ".join(
        f"{text.truncate(printable(value), 30) or 'empty'} {count / column.examples:.1%}"
        for value, count in column.frequent
        if count > 1
    )
    distinct = f"over {column.distinct:,}" if column.has_more else f"{column.distinct:,}"
    return printable(column.name), distinct, f"{column.empty / column.examples:.1%}", lengths, frequent
