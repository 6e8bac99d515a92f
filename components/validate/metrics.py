"""Single numbers over all examples, by scikit-learn wherever it has them.

What a model said of every example of a split, beside what is true.

Calibration: whether a model is right as often as its probabilities say.

ROC and precision-recall curves, one class against all others.

Slices: the accuracy on some of the examples, by class and by every further feature of the dataset.

Which classes are taken for which: the confusion matrix, cut down to what a person can read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn import metrics

from shardline.components.validate.bootstrap import share_interval
from shardline.components.validate.evaluation import Bin, ClassScore, Curve, Slice


@dataclass(frozen=True)
class Outcomes:
    """Truth and predictions, an element per example.

    Attributes:
        class_names: In the order of the labels.
        labels: int64 [n], the true classes.
        predicted: int64 [n], as the model served them.
        probabilities: float32 [n, classes].
        columns: Further features of the examples by name, each [n]; what slices are made of.
    """

    class_names: tuple[str, ...]
    labels: npt.NDArray[np.int64]
    predicted: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float32]
    columns: Mapping[str, npt.NDArray[np.generic]]

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """Which predictions are right, [n]."""
        return np.equal(self.labels, self.predicted)

    @property
    def finite(self) -> npt.NDArray[np.bool_]:
        """Of which examples every probability is finite, [n]."""
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


_BINS = 15


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
    bins = []
    for place in np.unique(places):
        inside = places == place
        bins.append(
            Bin(
                lower=float(edges[place]),
                upper=float(edges[place + 1]),
                examples=int(inside.sum()),
                confidence=float(confidence[inside].mean()),
                accuracy=float(right[inside].mean()),
            )
        )
    return tuple(bins)


def calibration_error(bins: tuple[Bin, ...]) -> float:
    """Returns the expected calibration error (ECE): mean distance of accuracy and confidence, 0..1."""
    examples = sum(item.examples for item in bins)
    return sum(item.examples * abs(item.accuracy - item.confidence) for item in bins) / examples


_TOP = 5


def score(outcomes: Outcomes, bins: tuple[Bin, ...]) -> dict[str, float]:
    """Returns the metrics of predictions and probabilities by name.

    Averages over classes leave out those that are neither among the labels nor among the predictions, as
    scikit-learn does. What needs probabilities is measured on the examples with finite ones, but for
    `top5_accuracy`, where others are wrong; it is left out where there are no more than five classes.

    Args:
        outcomes: Of every example.
        bins: Their calibration.
    """
    labels, predicted = outcomes.labels, outcomes.predicted
    found = {"accuracy": float(metrics.accuracy_score(labels, predicted))}
    macro = metrics.precision_recall_fscore_support(labels, predicted, average="macro", zero_division=0.0)
    found |= dict(zip(("macro_precision", "macro_recall", "macro_f1"), map(float, macro[:3]), strict=True))
    found["weighted_f1"] = float(metrics.f1_score(labels, predicted, average="weighted", zero_division=0.0))
    finite = outcomes.only(outcomes.finite)
    if len(finite.labels):
        found["log_loss"] = _log_loss(finite)
        found["ece"] = calibration_error(bins)
        if len(outcomes.class_names) > _TOP:
            found["top5_accuracy"] = _top(finite) / len(labels)
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


def mean_area(curves: tuple[Curve, ...]) -> float:
    """Returns the macro average of the areas under some curves."""
    return float(np.mean([curve.area for curve in curves]))


def _log_loss(finite: Outcomes) -> float:
    return float(
        metrics.log_loss(
            finite.labels, _normalised(finite.probabilities), labels=list(range(len(finite.class_names)))
        )
    )


def _normalised(probabilities: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Returns rows that sum to one as exactly as scikit-learn expects; a softmax in 16 bits does not."""
    exact = probabilities.astype(np.float64)
    exact /= exact.sum(axis=1, keepdims=True)
    return exact


def _top(finite: Outcomes) -> float:
    return float(
        metrics.top_k_accuracy_score(
            finite.labels,
            finite.probabilities,
            k=_TOP,
            normalize=False,
            labels=list(range(len(finite.class_names))),
        )
    )


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


#: A feature with more values is sliced at its quartiles when they are numbers, and not at all otherwise.
_MOST_VALUES = 20

_Mask = npt.NDArray[np.bool_]


def slice_outcomes(outcomes: Outcomes, min_slice: int) -> tuple[Slice, ...]:
    """Returns the accuracy by class and by feature.

    Args:
        outcomes: Of every example.
        min_slice: Smallest number of examples that a rule may be judged on.
    """
    slices = [
        _measure(f"class={name}", outcomes, outcomes.labels == label, min_slice)
        for label, name in enumerate(outcomes.class_names)
    ]
    for feature, column in outcomes.columns.items():
        slices += [
            _measure(f"{feature}={value}", outcomes, chosen, min_slice) for value, chosen in _parts(column)
        ]
    return tuple(slices)


def _measure(name: str, outcomes: Outcomes, chosen: _Mask, min_slice: int) -> Slice:
    examples, right = int(chosen.sum()), int((chosen & outcomes.right).sum())
    decided = examples >= min_slice
    return Slice(
        name=name,
        examples=examples,
        accuracy=right / examples if examples else 0.0,
        decided=decided,
        interval=share_interval(right, examples) if decided else None,
    )


def _parts(column: npt.NDArray[np.generic]) -> Iterator[tuple[str, _Mask]]:
    values = np.unique(column)
    if len(values) <= _MOST_VALUES:
        yield from ((_text(value), column == value) for value in values)
    elif np.issubdtype(column.dtype, np.number):
        edges = np.unique(np.nanquantile(column.astype(np.float64), (0.0, 0.25, 0.5, 0.75, 1.0)))
        for place, (lower, upper) in enumerate(pairwise(edges)):
            above = column >= lower if place == 0 else column > lower
            yield f"{lower:g}..{upper:g}", above & (column <= upper)


def _text(value: np.generic) -> str:
    return f"{value:g}" if isinstance(value, np.floating) else str(value)


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
