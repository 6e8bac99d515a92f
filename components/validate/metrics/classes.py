"""Classes: how well labels of kind class and multilabel are told, with intervals and leads.

scikit-learn computes the metrics wherever it has them. Those of one class of several that are counted from
right and wrong predictions depend on the examples only through the number in each cell (true class, predicted
class). To draw n examples with replacement is then to draw the cells' numbers from a multinomial
distribution, which needs no pass over the examples. Another model's predictions on the same examples make the
cells finer; the two models are always drawn together (paired).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn import metrics

from shardline.components.validate.metrics import resampling
from shardline.components.validate.metrics.evaluation import Baseline, Bin, Curve, Interval, Lead
from shardline.components.validate.metrics.metrics import COUNTED, LEADING
from shardline.components.validate.metrics.resampling import (
    Chosen,
    Floats,
    Ints,
    Probabilities,
    divide,
    share_interval,
)
from shardline.trainer.data.features import MULTILABEL, Tally

#: Points that are kept of a curve, and curves of all classes that are kept.
MOST_POINTS = 60
MOST_CURVES = 12

_TOP = 5
_BINS = 15

_CHUNK = 100
_DRAWS_OF_A_CELL = 8

# What is counted of several labels, in the order of `MultilabelOutcomes._measure_counts`.
_COUNTED = ("macro_f1", "micro_f1", "macro_precision", "macro_recall", "subset_accuracy", "hamming_loss")
# And of each class or label.
_PARTS = ("precision", "recall", "f1")


@dataclass(frozen=True)
class ClassOutcomes(Probabilities):
    """One class of several: the truth is [n]."""

    @property
    def right(self) -> Chosen:
        """Which predictions are right, [n]."""
        right: Chosen = np.equal(self.true, self.predicted)
        return right

    def summarize(self, min_slice: int) -> dict[str, Any]:
        """Returns the fields of an evaluation that follow from the outcomes."""
        found, names = super().summarize(min_slice), self.label.outputs
        confusion = metrics.confusion_matrix(self.true, self.predicted, labels=list(range(len(names))))
        return {
            **found,
            "accuracy": found["metrics"]["accuracy"],
            "confusion": tuple(map(tuple, confusion.tolist())),
            "calibration": self.calibration,
            **_draw_curves(self.sound),
        }

    def score(self) -> dict[str, float]:
        """Returns the metrics of predictions and probabilities by name.

        Averages over classes leave out those that are neither among the labels nor among the predictions, as
        scikit-learn does. What needs probabilities is measured on the examples with finite ones, except
        `top5_accuracy`, where the others are wrong, and `log_loss`, for which a row without anything above 0
        is not finite either. `top5_accuracy` is left out where there are no more than five classes. The
        expected calibration error (ECE) is the mean distance of accuracy and confidence, 0..1.
        """
        found = {"accuracy": float(metrics.accuracy_score(self.true, self.predicted))}
        found |= resampling.macro_averages(self.true, self.predicted)
        weighted = metrics.f1_score(self.true, self.predicted, average="weighted", zero_division=0.0)
        found["weighted_f1"] = float(weighted)
        if total := len(self.sound.true):
            losses, there = self.sound.losses
            if there.any():
                found["log_loss"] = float(losses[there].mean())
            distances = (one.examples * abs(one.accuracy - one.confidence) for one in self.calibration)
            found["ece"] = sum(distances) / total
            if self._among_top is not None:
                found["top5_accuracy"] = self._among_top / len(self.true)
        return found | self.means

    @cached_property
    def _among_top(self) -> int | None:
        """The examples whose class is among the five most probable; None of no more classes than these."""
        true, classes = self.sound.true, len(self.label.outputs)
        if classes <= _TOP or not len(true):
            return None
        labels = range(classes)
        right = metrics.top_k_accuracy_score(true, self.sound.said, k=_TOP, normalize=False, labels=labels)
        return int(right)

    @cached_property
    def calibration(self) -> tuple[Bin, ...]:
        """The reliability by highest probability, in 15 bins of equal width (Guo et al., 2017).

        scikit-learn's `calibration_curve` is for two classes only. Examples with outputs that are not finite
        are left out, as are empty bins.
        """
        confidence, right = self.sound.said.max(axis=1).astype(np.float64), self.sound.right
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

    @cached_property
    def losses(self) -> tuple[Floats, Chosen]:
        """The log loss of each example, and which examples have one: any probability at all."""
        # Rows of 0..1 that sum to one, as scikit-learn expects them; a softmax in 16 bits does not.
        rows = self.said.clip(0.0, 1.0)
        sums = rows.sum(axis=1, dtype=np.float64)
        of_truth = rows[np.arange(len(rows)), self.true].astype(np.float64)
        shares = divide(of_truth, sums).clip(np.finfo(np.float64).eps, 1 - np.finfo(np.float64).eps)
        return np.where(sums > 0, -np.log(shares), 0.0), sums > 0

    def judge_slice(self, chosen: Chosen, *, decided: bool) -> tuple[float, Interval | None]:
        """Returns the accuracy on some of the examples, and its interval."""
        examples, right = int(chosen.sum()), int((chosen & self.right).sum())
        copies = None if self.copies is None else self.copies[chosen]
        interval = share_interval(right, examples, copies) if decided else None
        return right / examples if examples else 0.0, interval

    def baseline(self, trained: Tally | None) -> Baseline:
        """Returns the class that is most frequent in training, as the answer to every example."""
        counts, names = trained.counts if trained else np.bincount(self.true), self.label.outputs
        answer = int(np.argmax(counts))
        leads = self.lead_counts(np.full_like(self.true, answer))
        (true, said, _), cells = _cells(self.true, self.predicted)
        ours = dict(zip(COUNTED, _values(cells[None], true, said, len(names))[0].tolist(), strict=False))
        values = {name: ours[name] - leads[name].difference for name in COUNTED}
        return Baseline(repr(names[answer]), values, {name: leads[name] for name in COUNTED})

    def intervals(self) -> dict[str, Interval]:
        """Returns the 95 % interval of every metric; classes without examples have none."""
        (true, said, size), counts = _cells(self.true, self.predicted, copies=self.copies)
        classes = len(self.label.outputs)
        values = np.concatenate([_values(drawn * size, true, said, classes) for drawn in _draw(counts)])
        places, names = zip(*self._measured(), strict=True)
        found = dict(zip(names, resampling.spans(values[:, places]), strict=True))
        found |= resampling.intervals(self.sound.terms, self.measure)
        if self._among_top is not None:
            found["top5_accuracy"] = share_interval(self._among_top, len(self.true), self.copies)
        return found

    def lead_counts(self, predicted: Ints) -> dict[str, Lead]:
        """Returns the lead over these predictions, [n] too, in each counted metric."""
        (true, ours, theirs, size), counts = _cells(self.true, self.predicted, predicted, copies=self.copies)
        classes = len(self.label.outputs)

        def difference(drawn: Ints) -> Floats:
            drawn = drawn * size
            return _values(drawn, true, ours, classes) - _values(drawn, true, theirs, classes)

        measured = difference(counts[None])[0]
        values = np.concatenate([difference(drawn) for drawn in _draw(counts)])
        return {
            name: resampling.lead(name, float(measured[place]), values[:, place])
            for place, name in self._measured()
        }

    def _measured(self) -> Iterator[tuple[int, str]]:
        """Yields place and name of the metrics in `_values`, less those of classes without examples."""
        yield from enumerate(COUNTED)
        names, present = self.label.outputs, np.unique(self.true)
        for row, metric in enumerate(_PARTS):
            for label in present:
                yield len(COUNTED) + row * len(names) + int(label), f"{metric}[class={names[label]}]"


def _cells(*columns: Ints, copies: Ints | None = None) -> tuple[Ints, Ints]:
    """Returns the columns of distinct combinations, the number of copies last, and how often each occurs."""
    first, sizes = resampling.distinct(copies, len(columns[0]))
    cells = np.stack([*(one[first] for one in columns), sizes], axis=1)
    found, counts = np.unique(cells, axis=0, return_counts=True)
    return found.T, counts


def _draw(counts: Ints) -> Iterator[Ints]:
    """Yields all resamples of cells, [chunk, cells] at a time."""
    rng = np.random.default_rng(resampling.SEED)
    total = int(counts.sum())
    # A draw of each cell's number costs as much as some draws of an example.
    few = len(counts) * _DRAWS_OF_A_CELL <= total
    cells = np.repeat(np.arange(len(counts)), counts)
    for _ in range(resampling.RESAMPLES // _CHUNK):
        if few:
            yield rng.multinomial(total, counts / total, size=_CHUNK)
        else:
            drawn = cells[rng.integers(total, size=(_CHUNK, total), dtype=np.int32)]
            yield np.stack([np.bincount(row, minlength=len(counts)) for row in drawn])


def _values(drawn: Ints, true: Ints, predicted: Ints, classes: int) -> Floats:
    """Returns the metrics of each resample, [resamples, metrics]: those in COUNTED, then those by class."""

    def sum_by(keys: Ints, counts: Ints) -> Floats:
        return np.stack([np.bincount(keys, weights=row, minlength=classes) for row in counts])

    hit = sum_by(true, drawn * (true == predicted))
    support, said = sum_by(true, drawn), sum_by(predicted, drawn)
    precision, recall, f1 = divide(hit, said), divide(hit, support), divide(2 * hit, said + support)
    present = (said + support) > 0
    averages = [
        hit.sum(axis=1) / support.sum(axis=1),
        *(scores.sum(axis=1) / present.sum(axis=1) for scores in (precision, recall, f1)),
        (f1 * support).sum(axis=1) / support.sum(axis=1),
    ]
    return np.concatenate([np.stack(averages, axis=1), precision, recall, f1], axis=1)


def _draw_curves(finite: ClassOutcomes) -> dict[str, tuple[Curve, ...]]:
    """Returns the fields `roc` and `precision_recall`: up to 12 curves each, of the smallest areas."""

    def roc(true: Any, scores: Any) -> tuple[Any, ...]:
        x, y, thresholds = metrics.roc_curve(true, scores)
        # scikit-learn begins above all probabilities, at infinity, which JSON does not have.
        return x, y, np.minimum(thresholds, 1.0)

    def precision_recall(true: Any, scores: Any) -> tuple[Any, ...]:
        y, x, thresholds = metrics.precision_recall_curve(true, scores)
        return x, y, np.append(thresholds, 1.0)

    def draw(values: Floats, curve: Callable[..., tuple[Any, ...]]) -> tuple[Curve, ...]:
        places, found = np.sort(np.argsort(values, kind="stable")[:MOST_CURVES]), []
        for place, label in zip(places, finite.areas.classes[places], strict=True):
            parts = curve(finite.true == label, finite.said[:, label])
            # Thinned evenly along the curve, not along x: it may rise at one place.
            steps = sum(np.abs(np.diff(part)) for part in parts[:2])
            length = np.concatenate([[0.0], np.cumsum(steps)])
            wanted = np.searchsorted(length, np.linspace(0.0, length[-1], MOST_POINTS))
            kept = np.unique([0, *wanted.clip(0, len(length) - 1), len(length) - 1])
            thinned = (tuple(part[kept].astype(float).tolist()) for part in parts)
            found.append(Curve(finite.label.outputs[label], float(values[place]), *thinned))
        return tuple(found)

    areas = finite.areas
    return {"roc": draw(areas.roc, roc), "precision_recall": draw(areas.pr, precision_recall)}


@dataclass(frozen=True)
class MultilabelOutcomes(Probabilities):
    """Several labels: of each 0 or 1, [n, outputs]."""

    def score(self) -> dict[str, float]:
        """Returns the metrics by name; of areas the means over labels that some, not all, examples have."""
        true, predicted = self.true, self.predicted
        found = resampling.macro_averages(true, predicted)
        found["micro_f1"] = metrics.f1_score(true, predicted, average="micro", zero_division=0.0)
        found["subset_accuracy"] = metrics.accuracy_score(true, predicted)
        found["hamming_loss"] = metrics.hamming_loss(true, predicted)
        if len(self.sound.true):
            found["log_loss"] = self.sound.losses[0].mean()
        return {name: float(value) for name, value in (found | self.means).items()}

    def intervals(self) -> dict[str, Interval]:
        """Returns the 95 % intervals of what is counted, and of "f1[label=cat]" and its like."""
        found = resampling.intervals(self._terms(self.predicted), self._measure_counts)
        return found | resampling.intervals(self.sound.terms, self.measure)

    @cached_property
    def losses(self) -> tuple[Floats, Chosen]:
        """The log loss of each example, the mean over the labels; every example has one."""
        smallest = float(np.finfo(np.float32).eps)
        bounded = self.said.astype(np.float64).clip(smallest, 1 - smallest)
        losses = -np.where(self.true == 1, np.log(bounded), np.log1p(-bounded)).mean(axis=1)
        return losses, np.full(len(losses), True)

    def baseline(self, trained: Tally | None) -> Baseline:
        """Returns all labels, as the answer to every example: no other trivial one has a higher F1."""
        always = np.ones_like(self.true)
        leads, measured = self.lead_counts(always), self._measure_counts(self._terms(always).sum(axis=0))
        names = LEADING[MULTILABEL]
        values = {name: float(measured[name]) for name in names}
        return Baseline("all labels", values, {name: leads[name] for name in names if name in leads})

    def judge_slice(self, chosen: Chosen, *, decided: bool) -> tuple[float, Interval | None]:
        """Returns macro F1, over the labels that occur, on some of the examples, and its interval."""
        part = self.only(chosen)
        terms = part._terms(part.predicted)
        value = self._f1_there(terms.sum(axis=0, dtype=np.float64)) if len(terms) else 0.0
        drawn = resampling.intervals(terms, lambda sums: {"": self._f1_there(sums)}) if decided else {}
        return float(value), drawn.get("")

    def lead_counts(self, predicted: Ints) -> dict[str, Lead]:
        """Returns the lead over these predictions, [n, outputs] too, in each counted metric."""
        ours, theirs = self._terms(self.predicted), self._terms(predicted)
        return resampling.leads(ours, theirs, self._measure_counts)

    def _terms(self, predicted: Ints) -> npt.NDArray[np.float32]:
        """Returns of each example what is summed: hits, truths, predictions by label; all right; one."""
        right = (predicted == self.true).all(axis=1)
        parts = (predicted * self.true, self.true, predicted, right[:, None], np.ones((len(self.true), 1)))
        return resampling.together(np.concatenate(parts, axis=1, dtype=np.float32), self.copies)

    def _measure_counts(self, sums: Floats) -> dict[str, Floats]:
        names = self.label.outputs
        hit, support, given = np.split(sums[..., :-2], 3, axis=-1)
        right, examples = sums[..., -2], sums[..., -1]
        precision, recall, f1 = divide(hit, given), divide(hit, support), divide(2 * hit, support + given)
        wrong = (support + given - 2 * hit).sum(axis=-1)
        values = [
            f1.mean(axis=-1),
            divide(2 * hit.sum(axis=-1), (support + given).sum(axis=-1)),
            precision.mean(axis=-1),
            recall.mean(axis=-1),
            right / examples,
            wrong / (examples * len(names)),
        ]
        found = dict(zip(_COUNTED, values, strict=True))
        for part, scores in zip(_PARTS, (precision, recall, f1), strict=True):
            found |= {f"{part}[label={name}]": scores[..., i] for i, name in enumerate(names)}
        return found

    def _f1_there(self, sums: Floats) -> Floats:
        """Returns macro F1 over the labels that occur; 1 where none does, as nothing is wrong then.

        In a slice without any crack a model that finds none is right, where 0 would make the slice weak.
        """
        hit, support, given = np.split(sums[..., :-2], 3, axis=-1)
        there = (support + given > 0).sum(axis=-1)
        f1 = divide(2 * hit, support + given).sum(axis=-1)
        return np.where(there > 0, f1 / np.maximum(there, 1), 1.0)
