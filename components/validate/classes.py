"""Classes: how well a label of kind class is told, with intervals and leads.

scikit-learn computes the metrics wherever it has them. Those that are counted from right and wrong
predictions depend on the examples only through the number in each cell (true class, predicted class). To draw
n examples with replacement is then to draw the cells' numbers from a multinomial distribution, which needs no
pass over the examples. Another model's predictions on the same examples make the cells finer; the two models
are always drawn together (paired).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn import metrics

from shardline.components.validate import resampling
from shardline.components.validate.evaluation import Baseline, Bin, ClassScore, Curve, Interval, Lead, Slice
from shardline.components.validate.metrics import COUNTED
from shardline.components.validate.resampling import RESAMPLES, SEED, interval, lead, share_interval
from shardline.components.validate.slicing import slices
from shardline.trainer.data.features import Tally

#: Points that are kept of a curve, and curves of all classes that are kept.
MOST_POINTS = 60
MOST_CURVES = 12

_TOP = 5
_BINS = 15

_CHUNK = 100

_Array = npt.NDArray[Any]
_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ClassOutcomes:
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
    def said(self) -> npt.NDArray[np.float32]:
        """What the model said: its probabilities."""
        return self.probabilities

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """Which predictions are right, [n]."""
        return np.equal(self.labels, self.predicted)

    @property
    def finite(self) -> npt.NDArray[np.bool_]:
        """Which examples have only finite probabilities, [n]."""
        finite: npt.NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(self.probabilities), axis=1)
        return finite

    def only(self, chosen: npt.NDArray[np.bool_]) -> ClassOutcomes:
        """Returns the outcomes of some of the examples."""
        return ClassOutcomes(
            self.class_names,
            self.labels[chosen],
            self.predicted[chosen],
            self.probabilities[chosen],
            {name: column[chosen] for name, column in self.columns.items()},
        )

    def summarize(self, min_slice: int) -> dict[str, Any]:
        """Returns the fields of an evaluation that follow from the outcomes."""
        labels, predicted, names = self.labels, self.predicted, self.class_names
        bins = calibrate(self)
        roc, precision_recall = draw_curves(self)
        measured = score(self, bins)
        if roc:
            measured["roc_auc"] = mean_area(roc)
            measured["pr_auc"] = mean_area(precision_recall)
        found = intervals(labels, predicted, names) | interval_of_loss(self)
        if "top5_accuracy" in measured:
            right = round(measured["top5_accuracy"] * len(labels))
            found["top5_accuracy"] = share_interval(right, len(labels))
        confusion = metrics.confusion_matrix(labels, predicted, labels=list(range(len(names)))).tolist()
        return {
            "examples": len(labels),
            "accuracy": measured["accuracy"],
            "log_loss": measured.get("log_loss"),
            "non_finite": int((~self.finite).sum()),
            "class_names": names,
            "classes": score_classes(self),
            "confusion": tuple(map(tuple, confusion)),
            "metrics": measured,
            "intervals": found,
            "slices": slice_outcomes(self, min_slice),
            "calibration": bins,
            "roc": worst(roc),
            "precision_recall": worst(precision_recall),
        }

    def leads(self, other: ClassOutcomes) -> dict[str, Lead]:
        """Returns the lead over another model on the same examples in each metric of `intervals`."""
        return leads(self.labels, self.predicted, other.predicted, self.class_names)

    def baseline(self, trained: Tally | None) -> Baseline:
        """Returns the class that is most frequent in training, as the answer to every example."""
        counts = trained.counts if trained else np.bincount(self.labels)
        answer = int(np.argmax(counts))
        always = np.full_like(self.labels, answer)
        ahead = leads(self.labels, self.predicted, always, self.class_names)
        ours = _averages(self.labels, self.predicted, len(self.class_names))
        return Baseline(
            answer=repr(self.class_names[answer]),
            metrics={name: ours[name] - ahead[name].difference for name in COUNTED},
            leads={name: ahead[name] for name in COUNTED},
        )


def score(outcomes: ClassOutcomes, bins: tuple[Bin, ...]) -> dict[str, float]:
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
        if exact := _exact(outcomes):
            found["log_loss"] = float(metrics.log_loss(*exact, labels=classes))
        found["ece"] = sum(item.examples * abs(item.accuracy - item.confidence) for item in bins) / total
        if len(classes) > _TOP:
            right = metrics.top_k_accuracy_score(
                finite.labels, finite.probabilities, k=_TOP, normalize=False, labels=classes
            )
            found["top5_accuracy"] = float(right) / len(labels)
    return found


def score_classes(outcomes: ClassOutcomes) -> tuple[ClassScore, ...]:
    """Returns how well each class is told from the others, in the order of the classes."""
    names = outcomes.class_names
    precision, recall, f1, support = metrics.precision_recall_fscore_support(
        outcomes.labels, outcomes.predicted, labels=list(range(len(names))), zero_division=0.0
    )
    return tuple(
        ClassScore(name, int(support[i]), float(precision[i]), float(recall[i]), float(f1[i]))
        for i, name in enumerate(names)
    )


def calibrate(outcomes: ClassOutcomes) -> tuple[Bin, ...]:
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


def draw_curves(outcomes: ClassOutcomes) -> tuple[tuple[Curve, ...], tuple[Curve, ...]]:
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


def slice_outcomes(outcomes: ClassOutcomes, min_slice: int) -> tuple[Slice, ...]:
    """Returns the accuracy by class and by feature; a slice is decided from `min_slice` examples on."""
    named = [(f"class={name}", outcomes.labels == i) for i, name in enumerate(outcomes.class_names)]
    found = []
    for name, chosen in (*named, *slices(outcomes.columns)):
        examples, right = int(chosen.sum()), int((chosen & outcomes.right).sum())
        decided = examples >= min_slice
        interval = share_interval(right, examples) if decided else None
        found.append(Slice(name, examples, right / examples if examples else 0.0, decided, interval))
    return tuple(found)


def intervals(labels: _Ints, predicted: _Ints, class_names: tuple[str, ...]) -> dict[str, Interval]:
    """Returns the 95 % interval of every counted metric, and of "recall[class=healthy]" and its like.

    Labels and predictions are [n], n >= 1. Classes without examples have no interval. The same arguments give
    the same intervals.
    """
    cells, counts = _cells(labels, predicted)
    true, said = cells.T
    values = np.concatenate([_values(drawn, true, said, len(class_names)) for drawn in _draw(counts)])
    return {name: interval(values[:, place]) for place, name in _measured(labels, class_names)}


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
        name: lead(float(measured[place]), values[:, place], rising=True)
        for place, name in _measured(labels, class_names)
    }


def interval_of_loss(outcomes: ClassOutcomes) -> dict[str, Interval]:
    """Returns the 95 % interval of the log loss, if there is one."""
    exact = _exact(outcomes)
    if exact is None:
        return {}
    labels, probabilities = exact
    of_truth = probabilities[np.arange(len(labels)), labels].clip(np.finfo(np.float64).eps)
    terms = np.stack([-np.log(of_truth), np.ones(len(labels))], axis=1)
    return resampling.intervals(terms, lambda sums: {"log_loss": sums[..., 0] / sums[..., 1]})


def _exact(outcomes: ClassOutcomes) -> tuple[_Ints, _Floats] | None:
    """Returns labels and probabilities of which each row sums to one, of the examples that have any."""
    finite = outcomes.only(outcomes.finite)
    exact = finite.probabilities.astype(np.float64).clip(0.0, 1.0)
    sums = exact.sum(axis=1)
    there = sums > 0
    return (finite.labels[there], exact[there] / sums[there, None]) if there.any() else None


def _averages(labels: _Ints, predicted: _Ints, classes: int) -> dict[str, float]:
    cells, counts = _cells(labels, predicted)
    true, said = cells.T
    values = _values(counts[None], true, said, classes)[0]
    return dict(zip(COUNTED, values[: len(COUNTED)].tolist(), strict=True))


def _thin(name: str, area: float, x: _Array, y: _Array, thresholds: _Array) -> Curve:
    # Evenly along the curve, not along x: it may rise at one place.
    length = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y)))])
    wanted = np.linspace(0.0, length[-1], MOST_POINTS)
    kept = np.unique(np.concatenate([[0, len(x) - 1], np.searchsorted(length, wanted).clip(0, len(x) - 1)]))
    return Curve(
        name, float(area), *(tuple(part[kept].astype(float).tolist()) for part in (x, y, thresholds))
    )


def _cells(*columns: _Ints) -> tuple[_Ints, _Ints]:
    """Returns the distinct combinations, [cells, columns], and how often each of them occurs."""
    return np.unique(np.stack(columns, axis=1), axis=0, return_counts=True)


def _draw(counts: _Ints) -> Iterator[_Ints]:
    """Yields all resamples of cells, [chunk, cells] at a time."""
    rng = np.random.default_rng(SEED)
    total = int(counts.sum())
    for _ in range(RESAMPLES // _CHUNK):
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
