"""Resampling: 95 % intervals of what is measured of examples, and paired leads, by bootstrap.

A metric that follows from sums over the examples needs no pass over them for a resample: examples are put
into blocks at random, a block for each where they are few, and blocks are drawn with replacement, which is
one product of matrices. Two models on the same examples are always drawn together (paired). Copies of an
example say no more than it does: they are one group, and groups are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardline.components.validate.evaluation import Interval, Lead

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Sums over examples, [..., sums] -> metrics by name, [...] each.
Measure = Callable[[Floats], Mapping[str, Floats]]

RESAMPLES = 1000
SEED = 20170
_PERCENTILES = (2.5, 97.5)

# More blocks make a resample no better.
_BLOCKS = 4096


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


def leads(
    ours: npt.NDArray[Any], theirs: npt.NDArray[Any], measure: Measure, rising: Mapping[str, bool]
) -> dict[str, Lead]:
    """Returns the lead in each metric over another model on the same examples, whose terms are given too.

    `rising` says of each metric whether more is better.
    """
    if not len(ours):
        return {}
    width = ours.shape[1]
    both = _drawn(np.concatenate([ours, theirs], axis=1))
    first, second = measure(both[:, :width]), measure(both[:, width:])
    here, there = measure(ours.sum(axis=0)), measure(theirs.sum(axis=0))
    return {
        name: lead(float(here[name] - there[name]), first[name] - second[name], rising=rising[name])
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
