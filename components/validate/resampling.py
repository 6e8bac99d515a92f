"""Resampling: 95 % intervals of what is measured of examples, and paired leads, by bootstrap.

A metric that follows from sums over the examples needs no pass over them for a resample: examples are put
into blocks at random, a block for each where they are few, and blocks are drawn with replacement, which is
one product of matrices. Two models on the same examples are always drawn together (paired). Copies of an
example say no more than it does: they are one group, and groups are drawn. `Outcomes` are what is resampled,
of all examples or of a slice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn import metrics

from shardline.components.validate.evaluation import Baseline, ClassScore, Interval, Lead, Slice
from shardline.trainer.data.features import Label, Tally

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Chosen = npt.NDArray[np.bool_]

#: Sums over examples, [..., sums] -> metrics by name, [...] each.
Measure = Callable[[Floats], Mapping[str, Floats]]

RESAMPLES = 1000
SEED = 20170
_PERCENTILES = (2.5, 97.5)

# More blocks make a resample no better.
_BLOCKS = 4096

# Text with more values is not sliced, and numbers with more are sliced at their quartiles.
_MOST_TEXTS, _MOST_NUMBERS = 20, 5
_QUARTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Outcomes(ABC):
    """Truth and predictions of one label, an element per example.

    Attributes:
        label: What was to be predicted.
        true: The truth, as it is stored: [n] of classes, else [n, outputs].
        said: What the model said, probabilities or numbers, [n, outputs].
        columns: Further features of the examples by name, each [n]; slices are made of them.
        copies: Groups of equal examples, [n]; None where there are no two.
    """

    label: Label
    true: npt.NDArray[Any]
    said: npt.NDArray[Any]
    columns: Mapping[str, npt.NDArray[np.generic]]
    copies: Ints | None = None

    @cached_property
    def finite(self) -> Chosen:
        """Which examples have only finite predictions, [n]."""
        # A sum is finite where all its terms are, less far than float64 reaches, and makes no copy.
        finite: Chosen = np.isfinite(self.said.sum(axis=1, dtype=np.float64))
        return finite

    def only(self, chosen: Chosen) -> Self:
        """Returns the outcomes of some of the examples."""
        if chosen.all():
            return self
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        some: dict[str, Any] = {
            name: one[chosen] for name, one in values.items() if isinstance(one, np.ndarray)
        }
        columns = {name: column[chosen] for name, column in self.columns.items()}
        return replace(self, columns=columns, **some)

    @abstractmethod
    def summarize(self, min_slice: int) -> dict[str, Any]:
        """Returns the fields of an evaluation that follow from the outcomes."""

    @abstractmethod
    def leads(self, other: Any) -> dict[str, Lead]:
        """Returns the lead over another model on the same examples in each metric with an interval."""

    @abstractmethod
    def baseline(self, trained: Tally | None) -> Baseline:
        """Returns the trivial answer to every example, as training has shown it."""

    @abstractmethod
    def judge_slice(self, chosen: Chosen, *, decided: bool) -> dict[str, Any]:
        """Returns the fields of a slice that follow from the outcomes; intervals only if it is decided."""

    def slices(self, min_slice: int, parts: Iterable[tuple[str, Chosen]] = ()) -> tuple[Slice, ...]:
        """Returns the quality of `parts` and by feature; a slice is decided from `min_slice` examples on."""
        found = []
        for name, chosen in (*parts, *_slices(self.columns)):
            examples = int(chosen.sum())
            copies = None if self.copies is None else self.copies[chosen]
            decided = len(distinct(copies, examples)[0]) >= min_slice
            judged = self.judge_slice(chosen, decided=decided)
            found.append(Slice(name=name, examples=examples, decided=decided, **judged))
        return tuple(found)


def macro_averages(true: Ints, predicted: Ints) -> dict[str, float]:
    """Returns the means over classes, or labels, of precision, recall and F1, by name of the metric."""
    found = metrics.precision_recall_fscore_support(true, predicted, average="macro", zero_division=0.0)
    return dict(zip(("macro_precision", "macro_recall", "macro_f1"), map(float, found[:3]), strict=True))


def score_classes(names: Sequence[str], true: Ints, predicted: Ints) -> tuple[ClassScore, ...]:
    """Returns how well each class, or label, is told from the others, in their order."""
    precision, recall, f1, support = metrics.precision_recall_fscore_support(
        true, predicted, labels=list(range(len(names))), zero_division=0.0
    )
    return tuple(
        ClassScore(name, int(support[i]), float(precision[i]), float(recall[i]), float(f1[i]))
        for i, name in enumerate(names)
    )


def divide(over: Floats, under: Floats) -> Floats:
    """Returns a quotient, 0 where there is none."""
    return np.divide(over, under, out=np.zeros_like(over, dtype=np.float64), where=under > 0)


def _slices(columns: Mapping[str, npt.NDArray[np.generic]]) -> Iterator[tuple[str, Chosen]]:
    """Yields the names of slices, "camera=left", "height=96..128", and which examples are in them, [n]."""
    for name, column in columns.items():
        for value, chosen in _parts(column):
            yield f"{name}={value}", chosen


def _parts(column: npt.NDArray[Any]) -> Iterator[tuple[str, Chosen]]:
    numbers = np.issubdtype(column.dtype, np.number)
    finite = np.isfinite(column) if np.issubdtype(column.dtype, np.floating) else np.full(len(column), True)
    values = np.unique(column[finite])
    if len(values) <= (_MOST_NUMBERS if numbers else _MOST_TEXTS):
        for value in values:
            yield f"{value:g}" if isinstance(value, np.floating) else str(value), column == value
    elif numbers:
        edges = np.unique(np.quantile(column[finite].astype(np.float64), _QUARTILES))
        for place, (lower, upper) in enumerate(pairwise(edges)):
            above = column >= lower if place == 0 else column > lower
            yield f"{lower:g}..{upper:g}", finite & above & (column <= upper)
    if not finite.all():
        yield "missing", ~finite


def distinct(groups: Ints | None, examples: int) -> tuple[Ints, Ints]:
    """Returns the first example of each group of copies, and the size of each; None is of examples apart."""
    if groups is None:
        return np.arange(examples), np.ones(examples, np.int64)
    _, first, sizes = np.unique(groups, return_index=True, return_counts=True)
    return first, sizes


def together(terms: npt.NDArray[Any], groups: Ints | None) -> npt.NDArray[Any]:
    """Returns the terms of examples, [examples, sums], as those of groups, [groups, sums]."""
    if groups is None:
        return terms
    first, sizes = distinct(groups, len(terms))
    weighted: npt.NDArray[Any] = terms[first] * sizes[:, None]
    return weighted


def intervals(terms: npt.NDArray[Any], measure: Measure) -> dict[str, Interval]:
    """Returns the 95 % interval of each metric of examples' terms, [examples, sums].

    The same terms give the same intervals.
    """
    if not len(terms):
        return {}
    return {name: interval(values) for name, values in measure(_drawn(terms)).items()}


def finite_intervals(terms: npt.NDArray[Any], measure: Measure) -> dict[str, Interval]:
    """Returns `intervals`, as far as their ends are numbers."""
    found = intervals(terms, measure)
    return {name: ends for name, ends in found.items() if np.isfinite(ends).all()}


def leads(
    ours: npt.NDArray[Any], theirs: npt.NDArray[Any], measure: Measure, rising: Mapping[str, bool]
) -> dict[str, Lead]:
    """Returns the lead in each metric over another model on the same examples, whose terms are given too.

    `rising` says of each metric, "f1" for "f1[label=cat]", whether more is better.
    """
    if not len(ours):
        return {}
    width = ours.shape[1]
    both = _drawn(np.concatenate([ours, theirs], axis=1))
    first, second = measure(both[:, :width]), measure(both[:, width:])
    here, there = measure(ours.sum(axis=0)), measure(theirs.sum(axis=0))
    return {
        name: lead(
            float(here[name] - there[name]), first[name] - second[name], rising=rising[name.partition("[")[0]]
        )
        for name in first
    }


def lead(difference: float, drawn: Floats, *, rising: bool) -> Lead:
    """Returns a lead of its difference and those of resamples."""
    behind = drawn <= 0 if rising else drawn >= 0
    return Lead(difference, interval(drawn), float((behind.sum() + 1) / (len(drawn) + 1)))


def interval(values: Floats) -> Interval:
    """Returns the 95 % interval of the values of resamples."""
    return spans(values[:, None])[0]


def spans(values: Floats) -> list[Interval]:
    """Returns the 95 % interval of each column of values, [resamples, columns]."""
    lower, upper = np.percentile(values, _PERCENTILES, axis=0)
    return list(zip(lower.tolist(), upper.tolist(), strict=True))


def share_interval(right: int, examples: int, groups: Ints | None = None) -> Interval:
    """Returns the 95 % interval of a share, 0..1, of as many examples as the groups are worth (Kish)."""
    _, sizes = distinct(groups, examples)
    worth = max(1, round(examples**2 / int((sizes**2).sum())))
    drawn = np.random.default_rng(SEED).binomial(worth, right / examples, RESAMPLES)
    return interval(drawn / worth)


def quantiles(values: Floats, shares: Sequence[float], groups: Ints | None = None) -> Floats:
    """Returns the quantiles of each column of values, [examples, columns], in all resamples.

    The result is [resamples, shares, columns]. Quantiles follow from no sums: examples are drawn, of many a
    part, and what a part varies more than the whole is taken back (m out of n bootstrap). Columns are drawn
    together (paired).
    """
    rng = np.random.default_rng(SEED)
    first, sizes = distinct(groups, len(values))
    size = min(len(first), _BLOCKS)
    picked = (rng.integers(len(first), size=size) for _ in range(RESAMPLES))
    drawn = np.stack(
        [np.quantile(values[np.repeat(first[some], sizes[some])], shares, axis=0) for some in picked]
    )
    measured = np.quantile(values, shares, axis=0)
    spread: Floats = measured + (drawn - measured) * np.sqrt(size / len(first))
    return spread


def _drawn(terms: npt.NDArray[Any]) -> Floats:
    """Returns the sums of all resamples, [resamples, sums]."""
    rng = np.random.default_rng(SEED)
    blocks = np.asarray(terms, np.float64)
    if len(blocks) > _BLOCKS:
        order = rng.permutation(len(blocks))
        starts = np.linspace(0, len(blocks), _BLOCKS, endpoint=False).astype(np.int64)
        blocks = np.add.reduceat(blocks[order], starts, axis=0)
    chosen = rng.integers(len(blocks), size=(RESAMPLES, len(blocks)), dtype=np.int32)
    counts = np.stack([np.bincount(row, minlength=len(blocks)) for row in chosen])
    drawn: Floats = counts.astype(np.float64) @ blocks
    return drawn
