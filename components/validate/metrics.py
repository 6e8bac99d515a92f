"""Metrics: the numbers that follow from a model's outcomes on a split, with their bootstrap intervals.

scikit-learn computes them wherever it has them. Metrics that are counted from right and wrong predictions
depend on the examples only through the number in each cell (true class, predicted class). To draw n examples
with replacement is then to draw the cells' numbers from a multinomial distribution, which needs no pass over
the examples. The champion's predictions on the same examples make the cells finer; the two models are always
drawn together (paired).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn import metrics

from shardline.components.validate.evaluation import COUNTED, Bin, ClassScore, Curve, Interval, Lead, Slice

#: Points that are kept of a curve, and curves of all classes that are kept.
MOST_POINTS = 60
MOST_CURVES = 12

_TOP = 5
_BINS = 15

# A feature with more values is sliced at its quartiles when they are numbers, and not at all otherwise.
_MOST_VALUES = 20

_RESAMPLES = 1000
_CHUNK = 100
_SEED = 20170
_PERCENTILES = (2.5, 97.5)

_Array = npt.NDArray[Any]
_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Outcomes:
    """Truth and predictions, an element per example.

    Attributes:
        class_names: Class names in the order of the labels.
        labels: int64 [n], the true classes.
        predicted: int64 [n], the classes that the model served.
        probabilities: float32 [n, classes].
        columns: Further features of the examples by name, each [n]; slices are made of them.
    """

    class_names: tuple[str, ...]
    labels: _Ints
    predicted: _Ints
    probabilities: npt.NDArray[np.float32]
    columns: Mapping[str, npt.NDArray[np.generic]]

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """Which predictions are right, [n]."""
        return np.equal(self.labels, self.predicted)

    @property
    def finite(self) -> npt.NDArray[np.bool_]:
        """Which examples have only finite probabilities, [n]."""
        finite: npt.NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(self.probabilities), axis=1)
        return finite

    def only(self, chosen: npt.NDArray[np.bool_]) -> Outcomes:
        """Returns the outcomes of some of the examples."""
        return Outcomes(
            self.class_names,
            self.labels[chosen],
            self.predicted[chosen],
            self.probabilities[chosen],
            {name: column[chosen] for name, column in self.columns.items()},
        )


def score(outcomes: Outcomes, bins: tuple[Bin, ...]) -> dict[str, float]:
    """Returns the metrics of predictions and probabilities by name.

    Averages over classes leave out those that are neither among the labels nor among the predictions, as
    scikit-learn does. What needs probabilities is measured on the examples with finite ones, except
    `top5_accuracy`, where the others are wrong, and `log_loss`, for which a row without anything above 0 is
    not finite either. `top5_accuracy` is left out where there are no more than five classes.
    `bins` give the expected calibration error (ECE), the mean distance of accuracy and confidence, 0..1.
    """
    labels, predicted = outcomes.labels, outcomes.predicted
    found = {"accuracy": float(metrics.accuracy_score(labels, predicted))}
    macro = metrics.precision_recall_fscore_support(labels, predicted, average="macro", zero_division=0.0)
    found |= dict(zip(("macro_precision", "macro_recall", "macro_f1"), map(float, macro[:3]), strict=True))
    found["weighted_f1"] = float(metrics.f1_score(labels, predicted, average="weighted", zero_division=0.0))
    finite = outcomes.only(outcomes.finite)
    if total := len(finite.labels):
        classes = list(range(len(outcomes.class_names)))
        # Rows of 0..1 sum to one as exactly as scikit-learn expects; a softmax in 16 bits does not.
        exact = finite.probabilities.astype(np.float64).clip(0.0, 1.0)
        sums = exact.sum(axis=1)
        if (there := sums > 0).any():
            exact = exact[there] / sums[there, None]
            found["log_loss"] = float(metrics.log_loss(finite.labels[there], exact, labels=classes))
        found["ece"] = sum(item.examples * abs(item.accuracy - item.confidence) for item in bins) / total
        if len(classes) > _TOP:
            right = metrics.top_k_accuracy_score(
                finite.labels, finite.probabilities, k=_TOP, normalize=False, labels=classes
            )
            found["top5_accuracy"] = float(right) / len(labels)
    return found


def score_classes(outcomes: Outcomes) -> tuple[ClassScore, ...]:
    """Returns how well each class is told from the others, in the order of the classes."""
    names = outcomes.class_names
    precision, recall, f1, support = metrics.precision_recall_fscore_support(
        outcomes.labels, outcomes.predicted, labels=list(range(len(names))), zero_division=0.0
    )
    return tuple(
        ClassScore(name, int(support[i]), float(precision[i]), float(recall[i]), float(f1[i]))
        for i, name in enumerate(names)
    )


def calibrate(outcomes: Outcomes) -> tuple[Bin, ...]:
    """Returns the reliability by highest probability, in 15 bins of equal width (Guo et al., 2017).

    scikit-learn's `calibration_curve` is for two classes only. Examples with outputs that are not finite
    are left out, as are empty bins.
    """
    finite = outcomes.only(outcomes.finite)
    if not len(finite.labels):
        return ()
    confidence, right = finite.probabilities.max(axis=1).astype(np.float64), finite.right
    edges = np.linspace(0.0, 1.0, _BINS + 1)
    # Each bin includes its upper edge; a probability rounded to more than 1 belongs to the last.
    places = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, _BINS - 1)
    return tuple(
        Bin(
            lower=float(edges[place]),
            upper=float(edges[place + 1]),
            examples=int(inside.sum()),
            confidence=float(confidence[inside].mean()),
            accuracy=float(right[inside].mean()),
        )
        for place in np.unique(places)
        for inside in [places == place]
    )


def draw_curves(outcomes: Outcomes) -> tuple[tuple[Curve, ...], tuple[Curve, ...]]:
    """Returns the ROC and precision-recall curves of the classes that some, not all, examples are of."""
    finite = outcomes.only(outcomes.finite)
    roc, precision_recall = [], []
    for label, name in enumerate(finite.class_names):
        positive, probabilities = finite.labels == label, finite.probabilities[:, label]
        if not positive.any() or positive.all():
            continue
        x, y, thresholds = metrics.roc_curve(positive, probabilities)
        # scikit-learn begins above all probabilities, at infinity, which JSON does not have.
        roc.append(_thin(name, metrics.auc(x, y), x, y, np.minimum(thresholds, 1.0)))
        precision, recall, thresholds = metrics.precision_recall_curve(positive, probabilities)
        area = metrics.average_precision_score(positive, probabilities)
        precision_recall.append(_thin(name, area, recall, precision, np.append(thresholds, 1.0)))
    return tuple(roc), tuple(precision_recall)


def mean_area(curves: tuple[Curve, ...]) -> float:
    """Returns the macro average of the areas under some curves."""
    return float(np.mean([curve.area for curve in curves]))


def worst(curves: tuple[Curve, ...]) -> tuple[Curve, ...]:
    """Returns up to 12 curves with the smallest areas, in the order of the classes."""
    kept = set(sorted(range(len(curves)), key=lambda place: curves[place].area)[:MOST_CURVES])
    return tuple(curve for place, curve in enumerate(curves) if place in kept)


def slice_outcomes(outcomes: Outcomes, min_slice: int) -> tuple[Slice, ...]:
    """Returns the accuracy by class and by feature; a slice is decided from `min_slice` examples on."""
    named = [(f"class={name}", outcomes.labels == i) for i, name in enumerate(outcomes.class_names)]
    for feature, column in outcomes.columns.items():
        named += [(f"{feature}={value}", chosen) for value, chosen in _parts(column)]
    slices = []
    for name, chosen in named:
        examples, right = int(chosen.sum()), int((chosen & outcomes.right).sum())
        decided = examples >= min_slice
        interval = share_interval(right, examples) if decided else None
        slices.append(Slice(name, examples, right / examples if examples else 0.0, decided, interval))
    return tuple(slices)


def intervals(labels: _Ints, predicted: _Ints, class_names: tuple[str, ...]) -> dict[str, Interval]:
    """Returns the 95 % interval of every counted metric, and of "recall[class=healthy]" and its like.

    Labels and predictions are [n], n >= 1. Classes without examples have no interval. The same arguments give
    the same intervals.
    """
    cells, counts = _cells(labels, predicted)
    true, said = cells.T
    values = np.concatenate([_values(drawn, true, said, len(class_names)) for drawn in _draw(counts)])
    return {name: _interval(values[:, place]) for place, name in _measured(labels, class_names)}


def leads(labels: _Ints, predicted: _Ints, others: _Ints, class_names: tuple[str, ...]) -> dict[str, Lead]:
    """Returns the lead over another model, whose predictions are [n] too, in each metric of `intervals`."""
    classes = len(class_names)
    cells, counts = _cells(labels, predicted, others)
    true, ours, theirs = cells.T

    def difference(drawn: _Ints) -> _Floats:
        return _values(drawn, true, ours, classes) - _values(drawn, true, theirs, classes)

    measured = difference(counts[None])[0]
    values = np.concatenate([difference(drawn) for drawn in _draw(counts)])
    return {
        name: Lead(
            difference=float(measured[place]),
            interval=_interval(values[:, place]),
            p=float(((values[:, place] <= 0).sum() + 1) / (_RESAMPLES + 1)),
        )
        for place, name in _measured(labels, class_names)
    }


def share_interval(right: int, examples: int) -> Interval:
    """Returns the 95 % interval of a share, 0..1."""
    drawn = np.random.default_rng(_SEED).binomial(examples, right / examples, _RESAMPLES)
    return _interval(drawn / examples)


def _thin(name: str, area: float, x: _Array, y: _Array, thresholds: _Array) -> Curve:
    # Evenly along the curve, not along x: it may rise at one place.
    length = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y)))])
    wanted = np.linspace(0.0, length[-1], MOST_POINTS)
    kept = np.unique(np.concatenate([[0, len(x) - 1], np.searchsorted(length, wanted).clip(0, len(x) - 1)]))
    return Curve(
        name, float(area), *(tuple(part[kept].astype(float).tolist()) for part in (x, y, thresholds))
    )


def _parts(column: npt.NDArray[np.generic]) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    finite = np.isfinite(column) if np.issubdtype(column.dtype, np.floating) else np.full(len(column), True)
    values = np.unique(column[finite])
    if len(values) <= _MOST_VALUES:
        for value in values:
            yield f"{value:g}" if isinstance(value, np.floating) else str(value), column == value
    elif np.issubdtype(column.dtype, np.number):
        edges = np.unique(np.quantile(column[finite].astype(np.float64), (0.0, 0.25, 0.5, 0.75, 1.0)))
        for place, (lower, upper) in enumerate(pairwise(edges)):
            above = column >= lower if place == 0 else column > lower
            yield f"{lower:g}..{upper:g}", finite & above & (column <= upper)
    if not finite.all():
        yield "not finite", ~finite


def _cells(*columns: _Ints) -> tuple[_Ints, _Ints]:
    """Returns the distinct combinations, [cells, columns], and how often each of them occurs."""
    return np.unique(np.stack(columns, axis=1), axis=0, return_counts=True)


def _draw(counts: _Ints) -> Iterator[_Ints]:
    """Yields all resamples of cells, [chunk, cells] at a time."""
    rng = np.random.default_rng(_SEED)
    total = int(counts.sum())
    for _ in range(_RESAMPLES // _CHUNK):
        yield rng.multinomial(total, counts / total, size=_CHUNK)


def _values(drawn: _Ints, true: _Ints, predicted: _Ints, classes: int) -> _Floats:
    """Returns the metrics of each resample, [resamples, metrics], in the order of `_measured`."""
    hit = _sum_by(drawn * (true == predicted), true, classes)
    support, said = _sum_by(drawn, true, classes), _sum_by(drawn, predicted, classes)
    precision, recall, f1 = _divide(hit, said), _divide(hit, support), _divide(2 * hit, said + support)
    present = (said + support) > 0
    averages = [
        hit.sum(axis=1) / support.sum(axis=1),
        *(scores.sum(axis=1) / present.sum(axis=1) for scores in (precision, recall, f1)),
        (f1 * support).sum(axis=1) / support.sum(axis=1),
    ]
    return np.concatenate([np.stack(averages, axis=1), precision, recall, f1], axis=1)


def _measured(labels: _Ints, class_names: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Yields place and name of the metrics in `_values`, less those of classes without examples."""
    yield from enumerate(COUNTED)
    present = np.unique(labels)
    for row, metric in enumerate(("precision", "recall", "f1")):
        for label in present:
            place = len(COUNTED) + row * len(class_names) + int(label)
            yield place, f"{metric}[class={class_names[label]}]"


def _sum_by(drawn: _Ints, keys: _Ints, classes: int) -> _Floats:
    return np.stack([np.bincount(keys, weights=row, minlength=classes) for row in drawn])


def _divide(over: _Floats, under: _Floats) -> _Floats:
    return np.divide(over, under, out=np.zeros_like(over), where=under > 0)


def _interval(values: _Floats) -> Interval:
    lower, upper = np.percentile(values, _PERCENTILES)
    return float(lower), float(upper)
