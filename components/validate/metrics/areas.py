"""Areas under ROC and precision-recall curves, and the influence of each example on their means.

Areas equal scikit-learn's, for all classes in one pass: an area follows from the ranks of a class's examples
among all others, and only the scores of the class itself are sorted. The influence is that of DeLong et al.
(1988) for ROC, and for average precision its derivative by the weight of an example.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardline.components.validate.metrics.intervals import Floats, Ints

# Classes whose scores are copied at a time.
_CLASSES_AT_ONCE = 50


@dataclass(frozen=True)
class RocPrAreas:
    """Areas under the curves of the `classes` that some, not all, examples have, [areas] each.

    `influence`, [n, 2], is the derivative of the means of `roc` and `pr` by the weight of each example.
    """

    classes: Ints
    roc: Floats
    pr: Floats
    influence: Floats

    @property
    def means(self) -> tuple[float, ...]:
        """The macro averages of `roc` and `pr`; none where there is no area."""
        return (float(self.roc.mean()), float(self.pr.mean())) if len(self.classes) else ()


def measure_roc_pr(true: Ints, probabilities: npt.NDArray[Any]) -> RocPrAreas:
    """Returns the areas of finite probabilities, [n, classes]; the truth is [n], or 0 or 1, [n, classes]."""
    examples, classes = probabilities.shape
    if true.ndim == 1:
        counts, order = np.bincount(true, minlength=classes), np.argsort(true, kind="stable")
        members = np.split(order, np.cumsum(counts)[:-1])
    else:
        counts, members = true.sum(axis=0), [np.flatnonzero(column) for column in true.T]
    mixed = np.flatnonzero((counts > 0) & (counts < examples))
    roc, pr, influence = np.empty(len(mixed)), np.empty(len(mixed)), np.zeros((examples, 2))
    for start in range(0, len(mixed), _CLASSES_AT_ONCE):
        some = mixed[start : start + _CLASSES_AT_ONCE]
        columns = np.ascontiguousarray(probabilities[:, some].T)
        for offset, label in enumerate(some):
            roc[start + offset], pr[start + offset] = _area(columns[offset], members[label], influence)
    return RocPrAreas(mixed, roc, pr, influence / max(1, len(mixed)))


def _area(scores: npt.NDArray[Any], mine: Ints, influence: Floats) -> tuple[float, float]:
    """Returns both areas of one class, whose examples are `mine`; adds to the influence of all examples."""
    own, others = np.sort(scores[mine]), len(scores) - len(mine)
    # How many of the class's own scores are below each score, and how many at or below it.
    below, reached = np.searchsorted(own, scores, side="left"), np.searchsorted(own, scores, side="right")

    def at_least(ranks: Ints) -> Ints:  # how many are at least 0, 1, ...
        counts: Ints = np.bincount(ranks, minlength=len(own) + 2)[::-1].cumsum()[::-1]
        return counts

    # For each example of the class: examples of the class at or above it, and above it; then all examples.
    own_from, own_above = len(own) - below[mine], len(own) - reached[mine]
    all_from, all_above = at_least(reached)[below[mine] + 1], at_least(below)[reached[mine]]
    beaten = 1 - (all_from - own_from + all_above - own_above) / (2 * others)
    roc = float(beaten.mean())
    # For each example of another class: the share of the class above it, equal ones by half.
    of_each = (1 - (below + reached) / (2 * len(own)) - roc) / others
    of_each[mine] = (beaten - roc) / len(own)
    influence[:, 0] += of_each

    precision = own_from / all_from
    pr = float(precision.mean())
    upward = np.argsort(scores[mine], kind="stable")
    gained = np.concatenate([[0.0], np.cumsum(1 / all_from[upward])])
    lost = np.concatenate([[0.0], np.cumsum((precision / all_from)[upward])])
    of_each = -lost[reached] / len(own)
    of_each[mine] += (precision - pr + gained[reached[mine]]) / len(own)
    influence[:, 1] += of_each
    return roc, pr
