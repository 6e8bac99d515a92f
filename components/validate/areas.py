"""Areas: those under ROC and precision-recall curves of classes, with intervals, and the worst of the curves.

scikit-learn's numbers, for all classes in one pass: an area follows from where the examples of a class stand
among all others, so that nothing is sorted but the scores of the class itself. How far one example moves the
mean of the areas (its influence: DeLong et al., 1988, for ROC; the derivative by its weight for average
precision) is summed in a resample, which stands for the areas of that resample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn import metrics

from shardline.components.validate.evaluation import Curve

#: Points that are kept of a curve, and curves of all classes that are kept.
MOST_POINTS = 60
MOST_CURVES = 12

# Classes whose scores are copied at a time.
_AT_ONCE = 50

_Array = npt.NDArray[Any]
_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Areas:
    """Areas of the classes that some, not all, examples are of.

    Attributes:
        classes: int64 [areas], the classes.
        roc: [areas], areas under the ROC curve.
        pr: [areas], areas under the precision-recall curve, as average precision.
        influence: [n, 2], how far the mean of `roc` and that of `pr` move with the weight of each example.
    """

    classes: _Ints
    roc: _Floats
    pr: _Floats
    influence: _Floats

    @property
    def means(self) -> dict[str, float]:
        """The macro averages by name of the metric; none where there is no area."""
        if not len(self.classes):
            return {}
        return {"roc_auc": float(self.roc.mean()), "pr_auc": float(self.pr.mean())}

    @property
    def terms(self) -> _Floats:
        """What is summed of each example, [n, 3], and a one: the means are sums over the sum of ones."""
        means = [*self.means.values()] or [np.nan, np.nan]
        return np.column_stack([len(self.influence) * self.influence + means, np.ones(len(self.influence))])


def measure_areas(true: _Ints, probabilities: _Array) -> Areas:
    """Returns the areas of finite probabilities, [n, classes].

    `true` are the classes, [n], or of each class 0 or 1, [n, classes].
    """
    examples, classes = probabilities.shape
    if true.ndim == 1:
        counts, order = np.bincount(true, minlength=classes), np.argsort(true, kind="stable")
        members = np.split(order, np.cumsum(counts)[:-1])
    else:
        counts, members = true.sum(axis=0), [np.flatnonzero(column) for column in true.T]
    mixed = np.flatnonzero((counts > 0) & (counts < examples))
    roc, pr, influence = np.empty(len(mixed)), np.empty(len(mixed)), np.zeros((examples, 2))
    for start in range(0, len(mixed), _AT_ONCE):
        some = mixed[start : start + _AT_ONCE]
        columns = np.ascontiguousarray(probabilities[:, some].T)
        for place, label in enumerate(some):
            roc[start + place], pr[start + place] = _area(columns[place], members[label], influence)
    return Areas(mixed, roc, pr, influence / max(1, len(mixed)))


def draw_curves(
    labels: _Ints, probabilities: _Array, names: tuple[str, ...], areas: Areas
) -> dict[str, tuple[Curve, ...]]:
    """Returns the fields `roc` and `precision_recall` of an evaluation: up to 12 curves each.

    They are those with the smallest areas, in the order of the classes. The areas are of these labels and
    probabilities.
    """

    def roc(true: _Array, scores: _Array) -> tuple[_Array, _Array, _Array]:
        x, y, thresholds = metrics.roc_curve(true, scores)
        # scikit-learn begins above all probabilities, at infinity, which JSON does not have.
        return x, y, np.minimum(thresholds, 1.0)

    def precision_recall(true: _Array, scores: _Array) -> tuple[_Array, _Array, _Array]:
        y, x, thresholds = metrics.precision_recall_curve(true, scores)
        return x, y, np.append(thresholds, 1.0)

    def draw(values: _Floats, curve: Callable[..., tuple[_Array, ...]]) -> tuple[Curve, ...]:
        places = np.sort(np.argsort(values, kind="stable")[:MOST_CURVES])
        return tuple(
            _thin(names[label], values[place], *curve(labels == label, probabilities[:, label]))
            for place, label in zip(places, areas.classes[places], strict=True)
        )

    return {"roc": draw(areas.roc, roc), "precision_recall": draw(areas.pr, precision_recall)}


def _area(scores: _Array, mine: _Ints, influence: _Floats) -> tuple[float, float]:
    """Returns both areas of one class, whose examples are `mine`; adds to the influence of all examples."""
    own, others = np.sort(scores[mine]), len(scores) - len(mine)
    # How many of the class's own scores lie below each score, and how many at or below it.
    below, reached = np.searchsorted(own, scores, side="left"), np.searchsorted(own, scores, side="right")
    # Of each example of the class: its own kind at or above it, and above it; then all examples.
    own_from, own_above = len(own) - below[mine], len(own) - reached[mine]
    all_from = _at_least(reached, len(own))[below[mine] + 1]
    all_above = _at_least(below, len(own))[reached[mine]]
    beaten = 1 - (all_from - own_from + all_above - own_above) / (2 * others)
    roc = float(beaten.mean())
    # Of each example of another class: the share of the class that stands above it, equal ones by half.
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


def _at_least(ranks: _Ints, most: int) -> _Ints:
    """Returns how many ranks are at least 0, 1, ... and `most` + 1."""
    counts: _Ints = np.bincount(ranks, minlength=most + 2)[::-1].cumsum()[::-1]
    return counts


def _thin(name: str, area: float, x: _Array, y: _Array, thresholds: _Array) -> Curve:
    # Evenly along the curve, not along x: it may rise at one place.
    length = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y)))])
    wanted = np.linspace(0.0, length[-1], MOST_POINTS)
    kept = np.unique(np.concatenate([[0, len(x) - 1], np.searchsorted(length, wanted).clip(0, len(x) - 1)]))
    return Curve(
        name, float(area), *(tuple(part[kept].astype(float).tolist()) for part in (x, y, thresholds))
    )
