"""Classification metrics of labels of kind class and multilabel, with intervals and leads.

scikit-learn computes the metrics wherever it has them. Those of kind class that count right and wrong
predictions depend only on the number of examples in each cell (true class, predicted class). Drawing n
examples with replacement is then drawing the cell counts from a multinomial distribution, without iterating
over the examples. The predictions of a second model on the same examples split the cells further; both models
are always resampled together (paired).
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
from shardline.components.validate.metrics.metrics import COUNTED, LEADS_BY_KIND
from shardline.components.validate.metrics.resampling import Floats, Ints, Mask, Probabilities, divide
from shardline.trainer.data.features import MULTILABEL, Tally

#: Points kept of a curve, and curves kept of all classes.
MAX_CURVE_POINTS = 60
MAX_CURVES = 12

_TOP = 5
_BINS = 15

_CHUNK = 100
_EXAMPLES_PER_CELL = 8

# Metrics of each class or label.
_CLASS_METRICS = ("precision", "recall", "f1")


@dataclass(frozen=True)
class ClassOutcomes(Probabilities):
    """Outcomes of kind class: one class per example, the truth is [n]."""

    @property
    def right(self) -> Mask:
        """Which predictions are right, [n]."""
        right: Mask = np.equal(self.true, self.predicted)
        return right

    def summarize(self, min_slice: int) -> dict[str, Any]:
        """Returns the fields of an evaluation that follow from the outcomes."""
        summary, names = super().summarize(min_slice), self.label.outputs
        confusion = metrics.confusion_matrix(self.true, self.predicted, labels=list(range(len(names))))
        return {
            **summary,
            "accuracy": summary["metrics"]["accuracy"],
            "confusion": tuple(map(tuple, confusion.tolist())),
            "calibration": self.calibration,
            **_draw_curves(self.finite_only),
        }

    def score(self) -> dict[str, float]:
        """Returns the metrics of predictions and probabilities by name.

        Averages over classes leave out classes that are in neither the labels nor the predictions, as
        scikit-learn does. Metrics of probabilities use the examples with finite ones; `top5_accuracy` counts
        the others as wrong, and `log_loss` also leaves out rows with no probability above 0. There is no
        `top5_accuracy` for five classes or fewer. The expected calibration error (ECE) is the mean distance
        of accuracy and confidence, 0..1.
        """
        scores = {"accuracy": float(metrics.accuracy_score(self.true, self.predicted))}
        scores |= _macro_averages(self.true, self.predicted)
        weighted = metrics.f1_score(self.true, self.predicted, average="weighted", zero_division=0.0)
        scores["weighted_f1"] = float(weighted)
        if total := len(self.finite_only.true):
            losses, has_loss = self.finite_only.losses
            if has_loss.any():
                scores["log_loss"] = float(losses[has_loss].mean())
            distances = (each.examples * abs(each.accuracy - each.confidence) for each in self.calibration)
            scores["ece"] = sum(distances) / total
            if self._among_top is not None:
                scores["top5_accuracy"] = self._among_top / len(self.true)
        return scores | self.means

    @cached_property
    def _among_top(self) -> int | None:
        """The examples whose class is among the five most probable; None of no more classes than these."""
        true, outputs = self.finite_only.true, self.finite_only.outputs
        classes = outputs.shape[1]
        if classes <= _TOP or not len(true):
            return None
        right = metrics.top_k_accuracy_score(true, outputs, k=_TOP, normalize=False, labels=range(classes))
        return int(right)

    @cached_property
    def calibration(self) -> tuple[Bin, ...]:
        """Calibration by highest probability, in 15 bins of equal width (Guo et al., 2017).

        scikit-learn's `calibration_curve` is for two classes only. Examples with non-finite outputs and empty
        bins are left out.
        """
        confidence, right = self.finite_only.outputs.max(axis=1).astype(np.float64), self.finite_only.right
        edges = np.linspace(0.0, 1.0, _BINS + 1)
        # Each bin includes its upper edge; a probability rounded to more than 1 belongs to the last.
        bins = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, _BINS - 1)
        return tuple(
            Bin(
                lower=float(edges[index]),
                upper=float(edges[index + 1]),
                examples=int(inside.sum()),
                confidence=float(confidence[inside].mean()),
                accuracy=float(right[inside].mean()),
            )
            for index in np.unique(bins)
            for inside in [bins == index]
        )

    @cached_property
    def losses(self) -> tuple[Floats, Mask]:
        """The log loss of each example, and which examples have one: those with a probability above 0."""
        # Rows of 0..1 that sum to one, as scikit-learn expects them; a softmax in 16 bits does not.
        rows = self.outputs.clip(0.0, 1.0)
        sums = rows.sum(axis=1, dtype=np.float64)
        of_truth = rows[np.arange(len(rows)), self.true].astype(np.float64)
        shares = divide(of_truth, sums).clip(np.finfo(np.float64).eps, 1 - np.finfo(np.float64).eps)
        return np.where(sums > 0, -np.log(shares), 0.0), sums > 0

    def measure_slice(self, mask: Mask, *, decided: bool) -> tuple[float, Interval | None]:
        """Returns the accuracy on some of the examples, and its interval."""
        examples, right = int(mask.sum()), int((mask & self.right).sum())
        known = resampling.share_intervals({"": (self.right, mask)}, self.copies) if decided else {}
        return right / examples if examples else 0.0, known.get("")

    def baseline(self, trained: Tally | None) -> Baseline:
        """Returns the baseline that always predicts the most frequent class in training."""
        counts, names = trained.counts if trained else np.bincount(self.true), self.label.outputs
        answer = int(np.argmax(counts))
        leads = self.lead_counts(np.full_like(self.true, answer))
        (true, predicted, _), cells = _cells(self.true, self.predicted)
        ours = dict(zip(COUNTED, _values(cells[None], true, predicted, len(names))[0].tolist(), strict=False))
        values = {name: ours[name] - leads[name].difference for name in COUNTED}
        return Baseline(names[answer], values, {name: leads[name] for name in COUNTED})

    def intervals(self) -> dict[str, Interval]:
        """Returns the 95 % interval of every metric, where known; classes without examples have none."""
        (true, predicted, size), counts = _cells(self.true, self.predicted, copies=self.copies)
        classes = len(self.label.outputs)
        values = np.concatenate([_values(drawn * size, true, predicted, classes) for drawn in _draw(counts)])
        intervals = resampling.percentile_intervals({name: values[:, i] for i, name in self._measured()})
        intervals |= resampling.intervals(self.finite_only.terms, self.measure)
        shares = {"accuracy": (self.right, np.full(len(self.true), True))}
        for index in np.unique(self.true):
            name = f"[class={self.label.outputs[index]}]"
            shares |= {f"recall{name}": (self.right, self.true == index)}
            shares |= {f"precision{name}": (self.right, self.predicted == index)}
        intervals |= resampling.share_intervals(shares, self.copies)
        if top := self._among_top is not None and resampling.proportion_interval(
            self._among_top, len(self.true), self.copies
        ):
            intervals["top5_accuracy"] = top
        return intervals

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
            name: resampling.lead(name, float(measured[column]), values[:, column])
            for column, name in self._measured()
        }

    def _measured(self) -> Iterator[tuple[int, str]]:
        """Yields column and name of the metrics in `_values`, without those of classes without examples."""
        yield from enumerate(COUNTED)
        names, present = self.label.outputs, np.unique(self.true)
        for row, metric in enumerate(_CLASS_METRICS):
            for label in present:
                yield len(COUNTED) + row * len(names) + int(label), f"{metric}[class={names[label]}]"


def _cells(*columns: Ints, copies: Ints | None = None) -> tuple[Ints, Ints]:
    """Returns the columns of distinct combinations, the number of copies last, and how often each occurs."""
    first, sizes = resampling.distinct_groups(copies, len(columns[0]))
    cells = np.stack([*(column[first] for column in columns), sizes], axis=1)
    distinct, counts = np.unique(cells, axis=0, return_counts=True)
    return distinct.T, counts


def _draw(counts: Ints) -> Iterator[Ints]:
    """Yields all resamples of cells, [chunk, cells] at a time."""
    rng = np.random.default_rng(resampling.SEED)
    total = int(counts.sum())
    # Drawing the count of a cell costs as much as drawing some examples.
    few = len(counts) * _EXAMPLES_PER_CELL <= total
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
    support, answered = sum_by(true, drawn), sum_by(predicted, drawn)
    precision, recall, f1 = divide(hit, answered), divide(hit, support), divide(2 * hit, answered + support)
    present = (answered + support) > 0
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
        # scikit-learn's first threshold is infinity, which JSON does not have.
        return x, y, np.minimum(thresholds, 1.0)

    def precision_recall(true: Any, scores: Any) -> tuple[Any, ...]:
        y, x, thresholds = metrics.precision_recall_curve(true, scores)
        return x, y, np.append(thresholds, 1.0)

    def draw(values: Floats, curve: Callable[..., tuple[Any, ...]]) -> tuple[Curve, ...]:
        smallest, curves = np.sort(np.argsort(values, kind="stable")[:MAX_CURVES]), []
        for index, label in zip(smallest, finite.areas.classes[smallest], strict=True):
            parts = curve(finite.true == label, finite.outputs[:, label])
            # Thinned evenly along the curve, not along x: it may rise at a single x.
            steps = sum(np.abs(np.diff(part)) for part in parts[:2])
            length = np.concatenate([[0.0], np.cumsum(steps)])
            wanted = np.searchsorted(length, np.linspace(0.0, length[-1], MAX_CURVE_POINTS))
            kept = np.unique([0, *wanted.clip(0, len(length) - 1), len(length) - 1])
            thinned = (tuple(part[kept].astype(float).tolist()) for part in parts)
            curves.append(Curve(finite.label.outputs[label], float(values[index]), *thinned))
        return tuple(curves)

    areas = finite.areas
    return {"roc": draw(areas.roc, roc), "precision_recall": draw(areas.pr, precision_recall)}


@dataclass(frozen=True)
class MultilabelOutcomes(Probabilities):
    """Outcomes of kind multilabel: the truth is 0 or 1 for each label, [n, outputs]."""

    def score(self) -> dict[str, float]:
        """Returns the metrics by name; areas are means over the labels that some, not all, examples have."""
        true, predicted = self.true, self.predicted
        scores = _macro_averages(true, predicted)
        scores["micro_f1"] = metrics.f1_score(true, predicted, average="micro", zero_division=0.0)
        scores["subset_accuracy"] = metrics.accuracy_score(true, predicted)
        scores["hamming_loss"] = metrics.hamming_loss(true, predicted)
        if len(self.finite_only.true):
            scores["log_loss"] = self.finite_only.losses[0].mean()
        return {name: float(value) for name, value in (scores | self.means).items()}

    def intervals(self) -> dict[str, Interval]:
        """Returns the 95 % intervals of the counted metrics, also of each label: "f1[label=cat]"."""
        counted = resampling.intervals(self._terms(self.predicted), self._measure_counts)
        true, predicted = self.true == 1, self.predicted == 1
        shares = {"subset_accuracy": ((true == predicted).all(axis=1), np.full(len(true), True))}
        for index, name in enumerate(self.label.outputs):
            shares |= {f"recall[label={name}]": (predicted[:, index], true[:, index])}
            shares |= {f"precision[label={name}]": (true[:, index], predicted[:, index])}
        counted |= resampling.share_intervals(shares, self.copies)
        return counted | resampling.intervals(self.finite_only.terms, self.measure)

    @cached_property
    def losses(self) -> tuple[Floats, Mask]:
        """The log loss of each example, the mean over the labels; every example has one."""
        smallest = float(np.finfo(np.float32).eps)
        bounded = self.outputs.astype(np.float64).clip(smallest, 1 - smallest)
        losses = -np.where(self.true == 1, np.log(bounded), np.log1p(-bounded)).mean(axis=1)
        return losses, np.full(len(losses), True)

    def baseline(self, trained: Tally | None) -> Baseline:
        """Returns the baseline that always predicts all labels: no constant answer has a higher F1."""
        always = np.ones_like(self.true)
        leads, measured = self.lead_counts(always), self._measure_counts(self._terms(always).sum(axis=0))
        names = LEADS_BY_KIND[MULTILABEL]
        values = {name: float(measured[name]) for name in names}
        return Baseline("all labels", values, {name: leads[name] for name in names if name in leads})

    def measure_slice(self, mask: Mask, *, decided: bool) -> tuple[float, Interval | None]:
        """Returns macro F1, over the labels that occur, on some of the examples, and its interval."""
        part = self.select(mask)
        terms = part._terms(part.predicted)
        value = self._f1_of_present(terms.sum(axis=0, dtype=np.float64)) if len(terms) else 0.0
        drawn = resampling.intervals(terms, lambda sums: {"": self._f1_of_present(sums)}) if decided else {}
        return float(value), drawn.get("")

    def lead_counts(self, predicted: Ints) -> dict[str, Lead]:
        """Returns the lead over these predictions, [n, outputs] too, in each counted metric."""
        ours, theirs = self._terms(self.predicted), self._terms(predicted)
        return resampling.leads(ours, theirs, self._measure_counts)

    def _terms(self, predicted: Ints) -> npt.NDArray[np.float32]:
        """Returns the terms of each example: hits, truths, predictions by label; whether all are right; 1."""
        right = (predicted == self.true).all(axis=1)
        parts = (predicted * self.true, self.true, predicted, right[:, None], np.ones((len(self.true), 1)))
        return resampling.group_copies(np.concatenate(parts, axis=1, dtype=np.float32), self.copies)

    def _measure_counts(self, sums: Floats) -> dict[str, Floats]:
        names = self.label.outputs
        hit, support, answered = np.split(sums[..., :-2], 3, axis=-1)
        right, examples, total = sums[..., -2], sums[..., -1], support + answered
        precision, recall, f1 = divide(hit, answered), divide(hit, support), divide(2 * hit, total)
        measured = {
            "macro_f1": f1.mean(axis=-1),
            "micro_f1": divide(2 * hit.sum(axis=-1), total.sum(axis=-1)),
            "macro_precision": precision.mean(axis=-1),
            "macro_recall": recall.mean(axis=-1),
            "subset_accuracy": right / examples,
            "hamming_loss": (total - 2 * hit).sum(axis=-1) / (examples * len(names)),
        }
        for part, scores in zip(_CLASS_METRICS, (precision, recall, f1), strict=True):
            measured |= {f"{part}[label={name}]": scores[..., i] for i, name in enumerate(names)}
        return measured

    def _f1_of_present(self, sums: Floats) -> Floats:
        """Returns macro F1 over the labels that occur; 1 where none does, as nothing is wrong then.

        In a slice without cracks, a model that finds none is right; with 0 it would count as a weak slice.
        """
        hit, support, answered = np.split(sums[..., :-2], 3, axis=-1)
        present = (support + answered > 0).sum(axis=-1)
        f1 = divide(2 * hit, support + answered).sum(axis=-1)
        return np.where(present > 0, f1 / np.maximum(present, 1), 1.0)


def _macro_averages(true: Ints, predicted: Ints) -> dict[str, float]:
    """Returns the means over classes, or labels, of precision, recall and F1, by name of the metric."""
    averages = metrics.precision_recall_fscore_support(true, predicted, average="macro", zero_division=0.0)
    return dict(zip(("macro_precision", "macro_recall", "macro_f1"), map(float, averages[:3]), strict=True))
