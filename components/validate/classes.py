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
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn import metrics

from shardline.components.validate import resampling
from shardline.components.validate.areas import Areas, draw_curves, measure_areas
from shardline.components.validate.evaluation import Baseline, Bin, ClassScore, Interval, Lead, Slice
from shardline.components.validate.metrics import COUNTED
from shardline.components.validate.resampling import RESAMPLES, SEED, lead, share_interval, spans
from shardline.components.validate.slicing import slices
from shardline.trainer.data.features import Tally

_TOP = 5
_BINS = 15

_CHUNK = 100
_DRAWS_OF_A_CELL = 8

_RISING = {"log_loss": False, "roc_auc": True, "pr_auc": True}

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
        copies: Groups of equal examples, int64 [n]; None where there are no two.
    """

    class_names: tuple[str, ...]
    labels: _Ints
    predicted: _Ints
    probabilities: npt.NDArray[np.float32]
    columns: Mapping[str, npt.NDArray[np.generic]]
    copies: _Ints | None = None

    @property
    def said(self) -> npt.NDArray[np.float32]:
        """What the model said: its probabilities."""
        return self.probabilities

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """Which predictions are right, [n]."""
        return np.equal(self.labels, self.predicted)

    @cached_property
    def finite(self) -> npt.NDArray[np.bool_]:
        """Which examples have only finite probabilities, [n]."""
        # A sum is finite where all its terms are, less far than float64 reaches, and makes no copy.
        sums = self.probabilities.sum(axis=1, dtype=np.float64)
        finite: npt.NDArray[np.bool_] = np.isfinite(sums)
        return finite

    def only(self, chosen: npt.NDArray[np.bool_]) -> ClassOutcomes:
        """Returns the outcomes of some of the examples."""
        if chosen.all():
            return self
        return ClassOutcomes(
            self.class_names,
            self.labels[chosen],
            self.predicted[chosen],
            self.probabilities[chosen],
            {name: column[chosen] for name, column in self.columns.items()},
            None if self.copies is None else self.copies[chosen],
        )

    def summarize(self, min_slice: int) -> dict[str, Any]:
        """Returns the fields of an evaluation that follow from the outcomes."""
        labels, predicted, names = self.labels, self.predicted, self.class_names
        bins = calibrate(self)
        finite = self.only(self.finite)
        measured = score(self, bins) | finite.areas.means
        found = intervals(labels, predicted, names, self.copies) | finite.intervals_of_probabilities()
        if "top5_accuracy" in measured:
            right = round(measured["top5_accuracy"] * len(labels))
            found["top5_accuracy"] = share_interval(right, len(labels), self.copies)
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
            **draw_curves((finite.labels, finite.probabilities), names, finite.areas),
        }

    def leads(self, other: ClassOutcomes) -> dict[str, Lead]:
        """Returns the lead over another model on the same examples in each metric of `intervals`."""
        found = leads(self.labels, self.predicted, other.predicted, self.class_names, self.copies)
        both = self.finite & other.finite
        ours, theirs = self.only(both), other.only(both)
        if not len(ours.labels):
            return found
        ahead = resampling.leads(ours.terms, theirs.terms, _measure, _RISING)
        return found | {name: one for name, one in ahead.items() if np.isfinite(one.difference)}

    @cached_property
    def areas(self) -> Areas:
        """Areas under the curves; all probabilities have to be finite."""
        return measure_areas(self.labels, self.probabilities)

    @cached_property
    def terms(self) -> _Floats:
        """What is summed of each example, where all probabilities are finite, for log loss and mean areas."""
        return resampling.together(np.column_stack([*_losses(self), self.areas.terms]), self.copies)

    def intervals_of_probabilities(self) -> dict[str, Interval]:
        """Returns the 95 % intervals of the log loss and of the mean areas, as far as there are any."""
        found = resampling.intervals(self.terms, _measure)
        return {name: interval for name, interval in found.items() if np.isfinite(interval).all()}

    def baseline(self, trained: Tally | None) -> Baseline:
        """Returns the class that is most frequent in training, as the answer to every example."""
        counts = trained.counts if trained else np.bincount(self.labels)
        answer = int(np.argmax(counts))
        always = np.full_like(self.labels, answer)
        ahead = leads(self.labels, self.predicted, always, self.class_names, self.copies)
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
        losses, there = _losses(finite)
        if there.any():
            found["log_loss"] = float(losses[there].mean())
        found["ece"] = sum(item.examples * abs(item.accuracy - item.confidence) for item in bins) / total
        if len(outcomes.class_names) > _TOP:
            found["top5_accuracy"] = float(_in_top(finite).sum()) / len(labels)
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


def slice_outcomes(outcomes: ClassOutcomes, min_slice: int) -> tuple[Slice, ...]:
    """Returns the accuracy by class and by feature; a slice is decided from `min_slice` examples on."""
    named = [(f"class={name}", outcomes.labels == i) for i, name in enumerate(outcomes.class_names)]
    found = []
    for name, chosen in (*named, *slices(outcomes.columns)):
        examples, right = int(chosen.sum()), int((chosen & outcomes.right).sum())
        copies = None if outcomes.copies is None else outcomes.copies[chosen]
        decided = len(resampling.distinct(copies, examples)[0]) >= min_slice
        interval = share_interval(right, examples, copies) if decided else None
        found.append(Slice(name, examples, right / examples if examples else 0.0, decided, interval))
    return tuple(found)


def intervals(
    labels: _Ints, predicted: _Ints, class_names: tuple[str, ...], copies: _Ints | None = None
) -> dict[str, Interval]:
    """Returns the 95 % interval of every counted metric, and of "recall[class=healthy]" and its like.

    Labels and predictions are [n], n >= 1. Classes without examples have no interval. The same arguments give
    the same intervals.
    """
    cells, counts = _cells(labels, predicted, copies=copies)
    true, said, size = cells.T
    values = np.concatenate([_values(drawn * size, true, said, len(class_names)) for drawn in _draw(counts)])
    found = tuple(_measured(labels, class_names))
    return dict(
        zip((name for _, name in found), spans(values[:, [place for place, _ in found]]), strict=True)
    )


def leads(
    labels: _Ints, predicted: _Ints, others: _Ints, class_names: tuple[str, ...], copies: _Ints | None = None
) -> dict[str, Lead]:
    """Returns the lead over another model, whose predictions are [n] too, in each metric of `intervals`."""
    classes = len(class_names)
    cells, counts = _cells(labels, predicted, others, copies=copies)
    true, ours, theirs, size = cells.T

    def difference(drawn: _Ints) -> _Floats:
        drawn = drawn * size
        return _values(drawn, true, ours, classes) - _values(drawn, true, theirs, classes)

    measured = difference(counts[None])[0]
    values = np.concatenate([difference(drawn) for drawn in _draw(counts)])
    return {
        name: lead(float(measured[place]), values[:, place], rising=True)
        for place, name in _measured(labels, class_names)
    }


def _losses(finite: ClassOutcomes) -> tuple[_Floats, npt.NDArray[np.bool_]]:
    """Returns the log loss of each example, and which examples have one: any probability at all."""
    # Rows of 0..1 that sum to one, as scikit-learn expects them; a softmax in 16 bits does not.
    rows = finite.probabilities.clip(0.0, 1.0)
    sums = rows.sum(axis=1, dtype=np.float64)
    of_truth = rows[np.arange(len(rows)), finite.labels].astype(np.float64)
    there = sums > 0
    shares = _divide(of_truth, sums).clip(np.finfo(np.float64).eps, 1 - np.finfo(np.float64).eps)
    return np.where(there, -np.log(shares), 0.0), there


def _measure(sums: _Floats) -> dict[str, _Floats]:
    """Returns the log loss and the mean areas, NaN where there is none, of sums of `ClassOutcomes.terms`."""
    loss, there, roc, pr, examples = np.moveaxis(sums, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "log_loss": loss / there,
            "roc_auc": (roc / examples).clip(0.0, 1.0),
            "pr_auc": (pr / examples).clip(0.0, 1.0),
        }


def _in_top(finite: ClassOutcomes) -> npt.NDArray[np.bool_]:
    """Returns where the true class is among the five most probable; of equal ones the last come first."""
    truth = finite.labels[:, None]
    of_truth = np.take_along_axis(finite.probabilities, truth, axis=1)
    above = np.count_nonzero(finite.probabilities > of_truth, axis=1)
    equal = finite.probabilities == of_truth
    before = np.count_nonzero(equal & (np.arange(equal.shape[1]) > truth), axis=1)
    within: npt.NDArray[np.bool_] = above + before < _TOP
    return within


def _averages(labels: _Ints, predicted: _Ints, classes: int) -> dict[str, float]:
    cells, counts = _cells(labels, predicted)
    true, said, _ = cells.T
    values = _values(counts[None], true, said, classes)[0]
    return dict(zip(COUNTED, values[: len(COUNTED)].tolist(), strict=True))


def _cells(*columns: _Ints, copies: _Ints | None = None) -> tuple[_Ints, _Ints]:
    """Returns the distinct combinations, the number of copies last, and how often each of them occurs."""
    first, sizes = resampling.distinct(copies, len(columns[0]))
    return np.unique(np.stack([*(one[first] for one in columns), sizes], axis=1), axis=0, return_counts=True)


def _draw(counts: _Ints) -> Iterator[_Ints]:
    """Yields all resamples of cells, [chunk, cells] at a time."""
    rng = np.random.default_rng(SEED)
    total = int(counts.sum())
    # A draw of each cell's number costs as much as some draws of an example.
    few = len(counts) * _DRAWS_OF_A_CELL <= total
    cells = np.repeat(np.arange(len(counts)), counts)
    for _ in range(RESAMPLES // _CHUNK):
        if few:
            yield rng.multinomial(total, counts / total, size=_CHUNK)
        else:
            drawn = cells[rng.integers(total, size=(_CHUNK, total), dtype=np.int32)]
            yield np.stack([np.bincount(row, minlength=len(counts)) for row in drawn])


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
