"""Which classes are taken for which: the confusion matrix, cut down to what a person can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Confusions:
    """A confusion matrix, whole or of the classes that are confused most.

    Attributes:
        names: Of its classes; where some were left out the last one stands for all of these.
        counts: Examples by true class (row) and predicted class (column).
        left_out: Number of classes behind the last name; 0 when the matrix is whole.
    """

    names: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    left_out: int = 0


@dataclass(frozen=True)
class ConfusedPair:
    """One class that is taken for another.

    Attributes:
        true: Name of the class.
        predicted: Name of the class that it is taken for.
        count: Number of such examples.
        share: Of the examples of the true class, 0..1.
    """

    true: str
    predicted: str
    count: int
    share: float


def most_confused(matrix: Sequence[Sequence[int]], names: Sequence[str], most: int) -> Confusions:
    """Returns the matrix of the classes with the most mistakes, missed and wrongly given together.

    Args:
        matrix: Examples by true class (row) and predicted class (column).
        names: Of the classes.
        most: Number of classes to keep, in their order; all others become one.
    """
    counts = np.asarray(matrix, dtype=np.int64)
    if len(names) <= most:
        return Confusions(tuple(names), tuple(map(tuple, counts.tolist())))
    wrong = counts.sum(axis=0) + counts.sum(axis=1) - 2 * counts.diagonal()
    kept = np.sort(np.argsort(-wrong, kind="stable")[:most])
    place = np.full(len(names), most)
    place[kept] = np.arange(most)
    folded = np.zeros((most + 1, most + 1), np.int64)
    np.add.at(folded, (place[:, None], place[None, :]), counts)
    left_out = len(names) - most
    shown = (*(names[i] for i in kept), f"{left_out:,} others")
    return Confusions(shown, tuple(map(tuple, folded.tolist())), left_out)


def confused_pairs(
    matrix: Sequence[Sequence[int]], names: Sequence[str], most: int
) -> tuple[ConfusedPair, ...]:
    """Returns the pairs of classes that are confused most often, the most frequent first.

    Args:
        matrix: Examples by true class (row) and predicted class (column).
        names: Of the classes.
        most: Number of pairs.
    """
    counts = np.array(matrix, dtype=np.int64)
    examples = counts.sum(axis=1)
    np.fill_diagonal(counts, 0)
    first = np.argsort(-counts, axis=None, kind="stable")[:most]
    cells = zip(*np.unravel_index(first, counts.shape), strict=True)
    return tuple(
        ConfusedPair(names[i], names[j], int(counts[i, j]), float(counts[i, j] / examples[i]))
        for i, j in cells
        if counts[i, j]
    )
