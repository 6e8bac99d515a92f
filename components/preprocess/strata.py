"""Strata: splits in which every class has its share of the examples, as closely as whole examples allow.

The split of an example follows from its place among all of its class, in the order of the points that salted
hashes give them: validation takes the first, test those behind. So a few more examples move few others.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from struct import iter_unpack

import numpy as np

from shardline.components.preprocess.plan import digests
from shardline.components.preprocess.rows import Numbers, Rows, known_bytes
from shardline.trainer.data.manifest import KEY_BYTES, SPLITS

_TRAIN = SPLITS.index("train")


class Strata:
    """The splits of some examples, as indices into `SPLITS`.

    Examples of equal points are duplicates: they are together, and counted for the first of their classes.

    Attributes:
        counts: Number of examples of each split.
    """

    def __init__(self, points: Numbers, labels: Numbers, shares: Mapping[str, float]) -> None:
        order = np.lexsort((labels, points))
        points, labels = points[order], labels[order]
        starts = np.flatnonzero(np.append(True, points[1:] != points[:-1])[: len(points)])
        sizes = np.diff(np.append(starts, len(points)))
        self._points, classes = points[starts], labels[starts]
        by_class = np.argsort(classes, kind="stable")
        bounds = np.flatnonzero(np.diff(classes[by_class], prepend=-1, append=-1))
        self._codes = np.empty(len(starts), np.uint8)
        for start, end in pairwise(bounds.tolist()):
            members = by_class[start:end]
            self._codes[members] = allot(sizes[members], shares)
        self.counts = np.bincount(self._codes, sizes, len(SPLITS)).astype(np.int64)

    def codes(self, points: Numbers) -> Numbers:
        """Returns the splits of examples with these points."""
        return self._codes[np.searchsorted(self._points, points)]


def allot(sizes: Numbers, shares: Mapping[str, float]) -> Numbers:
    """Returns the splits of duplicates of these numbers, those of one class in order.

    Where there are as many as splits, each split gets one at least.
    """
    reached = np.append(0, np.cumsum(sizes))
    wanted = [split for split in ("validation", "test") if split in shares]
    least = int(len(sizes) > len(wanted))
    codes = np.full(len(sizes), _TRAIN, np.uint8)
    start, share = 0, 0.0
    for rest, split in zip(range(len(wanted), 0, -1), wanted, strict=True):
        share += shares[split]
        nearest = int(np.abs(reached - share * reached[-1]).argmin())
        most = len(sizes) - (rest if least else 1)
        end = max(start, min(max(nearest, start + least), most))
        codes[start:end] = SPLITS.index(split)
        start = end
    return codes


def points_of(rows: Rows, key: str, salt: int) -> Numbers:
    """Returns the points of examples, which follow from their keys, or with the key "content" from that."""
    return (
        digests(rows.keys(), salt)[1] if key != "content" else points_of_known(known_bytes(rows.heads), salt)
    )


def points_of_known(known: bytes, salt: int) -> Numbers:
    """Returns the points of examples from what they are known by in other datasets, `KEY_BYTES` for each."""
    each = (identity for (identity,) in iter_unpack(f"{KEY_BYTES}s", known))
    return digests(each, salt)[1]
