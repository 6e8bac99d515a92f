"""Classification metrics of labels of kind class and multilabel, with intervals and leads.

scikit-learn computes the metrics wherever it has them; what leaving out one example changes in them follows
from what this example is for its class and for the predicted one: a hit, missed, or a false alarm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from sklearn import metrics

from shardline.components.validate.metrics import intervals
from shardline.components.validate.metrics.evaluation import Baseline, Bin, Curve, Interval, Lead
from shardline.components.validate.metrics.intervals import Estimate, Floats, Ints, Mask
from shardline.components.validate.metrics.metrics import COUNTED, LEADS_BY_KIND
from shardline.components.validate.metrics.outcomes import (
    F1,
    HITS,
    PRECISION,
    PRESENT,
    RECALL,
    TOTAL,
    WEIGHTED,
    Probabilities,
    divide,
)
from shardline.trainer.data.features import MULTILABEL, Tally

#: Points kept of a curve, and curves kept of all classes.
MAX_CURVE_POINTS = 60
MAX_CURVES = 12

_TOP = 5
_BINS = 15


@dataclass(frozen=True)
class ClassOutcomes(Probabilities):
    """Outcomes of kind class: one class per example, the truth is [n]."""

    @property
    def right(self) -> Mask:
        """Which predictions are right, [n]."""
        return self.is_right(self.predicted)

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
                scores["top5_accuracy"] = float(self._among_top.mean())
        return scores | self.means

    @cached_property
    def _among_top(self) -> Mask | None:
        """Which examples have their class among the five most probable, [n]; None of up to five classes."""
        true, outputs = self.finite_only.true, self.finite_only.outputs
        if outputs.shape[1] <= _TOP:
            return None
        of_truth, classes = outputs[np.arange(len(true)), true, None], np.arange(outputs.shape[1])
        # Of equally probable classes scikit-learn's top_k_accuracy_score puts the last first.
        before = (outputs > of_truth) | ((outputs == of_truth) & (classes > true[:, None]))
        among = np.zeros(len(self.true), np.bool_)
        among[self.finite] = before.sum(axis=1) < _TOP
        return among

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

    def measure_slice(self, mask: Mask, *, decided: bool) -> tuple[float, Interval | None, float]:
        """Returns the accuracy on some of the examples, its interval, and the effective examples."""
        right, clusters = self.right[mask], self.clusters_of(mask)
        interval = intervals.share_interval(right, clusters) if decided else None
        return float(right.mean()) if len(right) else 0.0, interval, intervals.effective_size(right, clusters)

    def lead_on_slice(self, other: ClassOutcomes, mask: Mask) -> Lead | None:
        """Returns the lead over another model in accuracy on some of the examples."""
        return intervals.paired_share(self.right[mask], other.right[mask], self.clusters_of(mask))

    def baseline(self, trained: Tally | None) -> Baseline:
        """Returns the baseline that always predicts the most frequent class in training."""
        counts = trained.counts if trained else np.bincount(self.true)
        answer = int(np.argmax(counts))
        always = np.full_like(self.true, answer)
        values, leads = self.count(always), self.lead_counts(always)
        measured = {name: values[name].value for name in COUNTED}
        kept = {name: leads[name] for name in COUNTED if name in leads}
        return Baseline(self.label.outputs[answer], measured, kept)

    def intervals(self) -> dict[str, Interval]:
        """Returns the 95 % interval of every metric, where known; classes without examples have none."""
        among, found = self._among_top, super().intervals()
        top = None if among is None else intervals.share_interval(among, self.clusters)
        return found | ({"top5_accuracy": top} if top else {})

    def tally(self, predicted: Ints) -> tuple[Ints, Ints, Ints]:
        """Returns the hits, examples and predictions of each class."""
        hits, classes = self.true[self.is_right(predicted)], len(self.label.outputs)
        hit, support, answered = (
            np.bincount(labels, minlength=classes) for labels in (hits, self.true, predicted)
        )
        return hit, support, answered

    def spread(self, predicted: Ints, hit: Floats, missed: Floats, alarm: Floats) -> Floats:
        """Returns the sums of each example: of its class and of the predicted one."""
        wrong = missed[:, self.true] + alarm[:, predicted]
        return np.where(self.is_right(predicted), hit[:, self.true], wrong)

    def average(self, sums: Floats, examples: int) -> dict[str, Floats]:
        """Returns the means over the classes that occur or are predicted, as scikit-learn has them."""
        means = [divide(sums[row], sums[PRESENT]) for row in (PRECISION, RECALL, F1)]
        return dict(zip(COUNTED[1:], (*means, sums[WEIGHTED] / max(examples, 1)), strict=True))


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
        leads, values, names = self.lead_counts(always), self.count(always), LEADS_BY_KIND[MULTILABEL]
        measured = {name: values[name].value for name in names}
        return Baseline("all labels", measured, {name: leads[name] for name in names if name in leads})

    def measure_slice(self, mask: Mask, *, decided: bool) -> tuple[float, Interval | None, float]:
        """Returns macro F1, over the labels that occur, on some of the examples, and its interval."""
        part = self.select(mask)
        if not len(part.true):
            return 0.0, None, 0.0
        f1 = part._f1_of_present
        interval = intervals.studentized("macro_f1", f1, part.clusters) if decided else None
        return f1.value, interval, intervals.effective_size(f1.influence, part.clusters)

    def lead_on_slice(self, other: MultilabelOutcomes, mask: Mask) -> Lead | None:
        """Returns the lead over another model in macro F1 on some of the examples."""
        ours, theirs = self.select(mask), other.select(mask)
        return intervals.lead("macro_f1", ours._f1_of_present, theirs._f1_of_present, ours.clusters)

    def tally(self, predicted: Ints) -> tuple[Ints, Ints, Ints]:
        """Returns the hits, examples and predictions of each label."""
        return (self.true * predicted).sum(axis=0), self.true.sum(axis=0), predicted.sum(axis=0)

    def spread(self, predicted: Ints, hit: Floats, missed: Floats, alarm: Floats) -> Floats:
        """Returns the sums of each example over the labels that it has or that are predicted."""
        hits = self.true * predicted
        spread: Floats = missed @ self.true.T + alarm @ predicted.T + (hit - missed - alarm) @ hits.T
        return spread

    def average(self, sums: Floats, examples: int) -> dict[str, Floats]:
        """Returns the means over all labels, and F1 and mistakes of all together."""
        labels, total = len(self.label.outputs), sums[TOTAL]
        return {
            "macro_f1": sums[F1] / labels,
            "micro_f1": divide(2 * sums[HITS], total),
            "macro_precision": sums[PRECISION] / labels,
            "macro_recall": sums[RECALL] / labels,
            "hamming_loss": (total - 2 * sums[HITS]) / (max(examples, 1) * labels),
        }

    @property
    def _f1_of_present(self) -> Estimate:
        """Macro F1 over the labels that occur; 1 where none does, as nothing is wrong then.

        In a slice without cracks, a model that finds none is right; with 0 it would count as a weak slice.
        """

        def average(sums: Floats, _: int) -> dict[str, Floats]:
            return {"": np.where(sums[PRESENT] > 0, divide(sums[F1], sums[PRESENT]), 1.0)}

        return self.count(self.predicted, average)[""]


def _macro_averages(true: Ints, predicted: Ints) -> dict[str, float]:
    """Returns the means over classes, or labels, of precision, recall and F1, by name of the metric."""
    averages = metrics.precision_recall_fscore_support(true, predicted, average="macro", zero_division=0.0)
    return dict(zip(("macro_precision", "macro_recall", "macro_f1"), map(float, averages[:3]), strict=True))
