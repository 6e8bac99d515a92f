"""ROC and precision-recall curves, one class against all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn import metrics

from shardline.components.export_validate.evaluation import Curve
from shardline.components.export_validate.outcomes import Outcomes

#: Points that are kept of a curve.
MOST_POINTS = 60

_Array = npt.NDArray[Any]


def roc_curves(outcomes: Outcomes) -> tuple[Curve, ...]:
    """Returns the ROC curve of every class that some examples are of, and some are not."""
    return _curves(outcomes, _roc)


def precision_recall_curves(outcomes: Outcomes) -> tuple[Curve, ...]:
    """Returns the precision over the recall of every class that some examples are of, and some are not."""
    return _curves(outcomes, _precision_recall)


def worst(curves: tuple[Curve, ...], most: int = 12) -> tuple[Curve, ...]:
    """Returns the curves with the smallest areas, in the order of the classes."""
    kept = set(sorted(range(len(curves)), key=lambda place: curves[place].area)[:most])
    return tuple(curve for place, curve in enumerate(curves) if place in kept)


def _curves(outcomes: Outcomes, draw: Callable[[str, _Array, _Array], Curve]) -> tuple[Curve, ...]:
    finite = outcomes.only(outcomes.finite)
    return tuple(draw(name, *sides) for name, *sides in _one_against_all(finite))


def _one_against_all(finite: Outcomes) -> Iterator[tuple[str, _Array, _Array]]:
    for label, name in enumerate(finite.class_names):
        positive = finite.labels == label
        if positive.any() and not positive.all():
            yield name, positive, finite.probabilities[:, label]


def _roc(name: str, positive: _Array, probabilities: _Array) -> Curve:
    false_positive, true_positive, thresholds = metrics.roc_curve(positive, probabilities)
    area = metrics.auc(false_positive, true_positive)
    # scikit-learn begins above all probabilities, at infinity, which JSON does not have.
    return _thin(name, area, false_positive, true_positive, np.minimum(thresholds, 1.0))


def _precision_recall(name: str, positive: _Array, probabilities: _Array) -> Curve:
    precision, recall, thresholds = metrics.precision_recall_curve(positive, probabilities)
    area = metrics.average_precision_score(positive, probabilities)
    return _thin(name, area, recall, precision, np.append(thresholds, 1.0))


def _thin(name: str, area: float, x: _Array, y: _Array, thresholds: _Array) -> Curve:
    # Evenly along the curve, not along x: it may rise at one place.
    length = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y)))])
    wanted = np.linspace(0.0, length[-1], MOST_POINTS)
    kept = np.unique(np.concatenate([[0, len(x) - 1], np.searchsorted(length, wanted).clip(0, len(x) - 1)]))
    return Curve(
        name, float(area), *(tuple(part[kept].astype(float).tolist()) for part in (x, y, thresholds))
    )
