"""Outcomes of a model on the examples of a split: what metrics, intervals, slices and leads follow from."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy import sparse
from sklearn import metrics

from shardline.components.text import enumerate_names
from shardline.components.validate.metrics import (
    AREAS,
    BY_KIND,
    COUNTED,
    LEADS_BY_KIND,
    MAIN,
    PARTS,
    evaluation,
    intervals,
)
from shardline.components.validate.metrics.evaluation import MIN_SLICE, Baseline, Interval, Lead, Slice
from shardline.components.validate.metrics.intervals import Estimate, Floats, Ints, Mask, RocPrAreas
from shardline.trainer.manifest import CLASS, MULTILABEL, REGRESSION, Label, Tally

#: Text with more values is not sliced.
MAX_CATEGORIES = 20
# Numbers with more values are sliced at their quartiles.
_MAX_NUMBERS = 5

# The metric of one class or label that is its main metric.
_MAIN_OF_PART = {CLASS: "recall", MULTILABEL: "f1"}


@dataclass(frozen=True)
class Outcomes(ABC):
    """Truth and predictions of one label, an element per example.

    Attributes:
        true: The truth, as it is stored: [n] of classes, else [n, outputs].
        outputs: Outputs of the model, probabilities or numbers, [n, outputs].
        columns: Further features of the examples by name, each [n], for slices; texts are objects, as one
            long text widens all of an array of text.
        copies: Group of equal examples that each belongs to, [n]; None where no two are equal.
        groups: Group, such as a patient or a span of time, that each belongs to, [n]: examples of a group are
            not independent. None where only copies are not.
    """

    label: Label
    true: npt.NDArray[Any]
    outputs: npt.NDArray[Any]
    columns: Mapping[str, npt.NDArray[np.generic]]
    copies: Ints | None = None
    groups: Ints | None = None

    @cached_property
    def finite(self) -> Mask:
        """Which examples have only finite predictions, [n]."""
        # The sum of finite float32 values is a finite float64, and needs no copy.
        finite: Mask = np.isfinite(self.outputs.sum(axis=1, dtype=np.float64))
        return finite

    @cached_property
    def finite_only(self) -> Self:
        """The outcomes of the examples with finite predictions."""
        return self.select(self.finite)

    @cached_property
    def without_columns(self) -> Self:
        """The same outcomes without columns, which a slice does not need, and of which there may be many."""
        return replace(self, columns={})

    def select(self, mask: Mask) -> Self:
        """Returns the outcomes of the examples in a mask, [n]."""
        if mask.all():
            return self
        values = ((item.name, getattr(self, item.name)) for item in fields(self))
        arrays: dict[str, Any] = {name: it[mask] for name, it in values if isinstance(it, np.ndarray)}
        return replace(self, columns={name: it[mask] for name, it in self.columns.items()}, **arrays)

    @abstractmethod
    def summarize(self, min_slice: int) -> dict[str, Any]:
        """Returns the fields of an evaluation that follow from the outcomes."""

    @property
    def clusters(self) -> Ints | None:
        """The groups of examples that are not independent, [n]; None where there are none."""
        return self.copies if self.groups is None else self.groups

    def estimate_share(self, right: Mask, among: Mask) -> Estimate:
        """Returns the share of the examples in a mask that are right."""
        return intervals.estimate_share(right[among], self._clusters_of(among))

    def _clusters_of(self, mask: Mask) -> Ints | None:
        return None if self.clusters is None else self.clusters[mask]

    @abstractmethod
    def leads(self, other: Any, min_slice: int = MIN_SLICE) -> dict[str, Lead]:
        """Returns the lead over another model on the same examples in each metric with an interval.

        Of the main metric, also on each decided slice: "accuracy[camera=left]".
        """

    @abstractmethod
    def baseline(self, trained: Tally | None) -> Baseline:
        """Returns the baseline: the same answer to every example, chosen by the training labels."""

    @abstractmethod
    def estimate_main(self, mask: Mask) -> Estimate:
        """Returns the main metric on the examples of a slice."""

    def measure_slice(self, mask: Mask, *, decided: bool) -> tuple[float, Interval | None, float]:
        """Returns the main metric on a slice, its interval if it is decided, and its effective examples."""
        if not mask.any():
            return 0.0, None, 0.0
        main = self.estimate_main(mask)
        interval = intervals.find_interval(MAIN[self.label.kind], main) if decided else None
        return main.value, interval, intervals.effective_size(main.influence, main.groups)

    def lead_on_slice(self, other: Any, mask: Mask) -> Lead | None:
        """Returns the lead over another model in the main metric on the examples of a slice."""
        return intervals.find_lead(MAIN[self.label.kind], self.estimate_main(mask), other.estimate_main(mask))

    def slices(self, min_slice: int, parts: Iterable[tuple[str, Mask]] = ()) -> tuple[Slice, ...]:
        """Returns the slices `parts` and those by feature; they are decided from `min_slice` examples on."""
        return tuple(
            Slice(name, int(mask.sum()), value, decided, interval, effective)
            for name, mask in (*parts, *_slices(self.columns))
            for decided in [self._is_decided(mask, min_slice)]
            for value, interval, effective in [self.measure_slice(mask, decided=decided)]
        )

    def lead_by_slice(self, other: Any, min_slice: int) -> dict[str, Lead]:
        """Returns the lead in the main metric on each decided slice by feature: "accuracy[camera=left]"."""
        decided = (part for part in _slices(self.columns) if self._is_decided(part[1], min_slice))
        leads = ((name, self.lead_on_slice(other, mask)) for name, mask in decided)
        return {f"{MAIN[self.label.kind]}[{name}]": lead for name, lead in leads if lead}

    def _is_decided(self, mask: Mask, min_slice: int) -> bool:
        copies = None if self.copies is None else self.copies[mask]
        return count_distinct(copies, int(mask.sum())) >= min_slice


def divide(over: npt.NDArray[Any], under: npt.NDArray[Any]) -> Floats:
    """Returns a quotient, 0 where the denominator is 0."""
    quotient = np.zeros_like(over, dtype=np.float64)
    np.divide(over, under, out=quotient, where=under > 0)
    return quotient


def _slices(columns: Mapping[str, npt.NDArray[Any]]) -> Iterator[tuple[str, Mask]]:
    """Yields the names of slices, "camera=left", "height=96..128", and the masks of their examples, [n]."""
    for name, column in columns.items():
        floats, numbers = (np.issubdtype(column.dtype, dtype) for dtype in (np.floating, np.number))
        finite = np.isfinite(column) if floats else np.full(len(column), True)
        values = np.unique(column[finite])
        if len(values) <= (_MAX_NUMBERS if numbers else MAX_CATEGORIES):
            for value in values:
                yield f"{name}={value:g}" if floats else f"{name}={value}", column == value
        elif numbers:
            edges = np.unique(np.quantile(column[finite].astype(np.float64), np.linspace(0, 1, 5)))
            for index, (lower, upper) in enumerate(pairwise(edges)):
                above = column >= lower if index == 0 else column > lower
                yield f"{name}={lower:g}..{upper:g}", finite & above & (column <= upper)
        if not finite.all():
            yield f"{name}=missing", ~finite


def count_distinct(copies: Ints | None, examples: int) -> int:
    """Returns the number of examples of which no two are equal."""
    return examples if copies is None else len(np.unique(copies))


def _score_parts(hit: Ints, support: Ints, answered: Ints) -> Floats:
    """Returns what is averaged over classes or labels, [rows, outputs]: see `Probabilities._average`."""
    total = support + answered
    f1 = divide(2 * hit, total)
    rows = [divide(hit, answered), divide(hit, support), f1, f1 * support, total > 0, hit, total]
    return np.stack(rows).astype(np.float64)


@dataclass(frozen=True)
class Probabilities(Outcomes):
    """Outcomes of kind class and multilabel: truth, int64, and probabilities, float32 [n, outputs].

    Attributes:
        predicted: int64, the served predictions: classes, [n], or 0 or 1 for each label, [n, outputs].
    """

    predicted: Ints = field(kw_only=True)

    def summarize(self, min_slice: int) -> dict[str, Any]:
        """Returns the fields of an evaluation that follow from the outcomes."""
        names, part = self.label.outputs, PARTS[self.label.kind][0]
        scores = metrics.precision_recall_fscore_support(
            self.true, self.predicted, labels=range(len(names)), zero_division=0
        )
        of_parts = ((f"{part}={name}", self.find_part(self.true, index)) for index, name in enumerate(names))
        return {
            "examples": len(self.true),
            "non_finite": int((~self.finite).sum()),
            "class_names": names,
            "classes": tuple(
                evaluation.ClassScore(name, int(examples), *map(float, parts))
                for name, *parts, examples in zip(names, *scores, strict=True)
            ),
            "metrics": self.score(),
            "intervals": self.intervals(),
            "slices": self.slices(min_slice, of_parts),
        }

    def score(self) -> dict[str, float]:
        """Returns the metrics by name, as scikit-learn defines them.

        Averages over classes leave out those that are in neither the labels nor the predictions, and areas
        those that no, or every, example has. Metrics of probabilities use the examples with finite ones.
        """
        return {name: each.value for name, each in self.measured.items() if math.isfinite(each.value)}

    def find_part(self, labels: Ints, index: int) -> Mask:
        """Returns the examples that have a class or label in the truth or in predictions, [n]."""
        found: Mask = np.equal(labels, index) if labels.ndim == 1 else labels[:, index] == 1
        return found

    def _tally(self, predicted: Ints) -> tuple[Any, Any, Any]:
        shape, rows = (len(self.true), len(self.label.outputs)), np.arange(len(self.true))
        truth, answered = (
            sparse.csr_array((np.ones_like(rows), (rows, each)) if each.ndim == 1 else each, shape=shape)
            for each in (self.true, predicted)
        )
        return truth.multiply(answered), truth, answered

    def count(self, predicted: Ints, *, present: bool = False) -> dict[str, Estimate]:
        """Returns the metrics that count right and wrong predictions.

        Averages are over all labels of a multilabel, or with `present`, as those over classes, over those in
        the truth or the predictions.
        """
        present, examples, tally = present or self.label.kind == CLASS, len(self.true), self._tally(predicted)
        counts = [each.sum(axis=0) for each in tally]
        scores = _score_parts(*counts)
        hit, missed, alarm = (
            (scores - _score_parts(*(count - one for count, one in zip(counts, ones, strict=True)))).T
            for ones in ((1, 1, 1), (0, 1, 0), (0, 0, 1))
        )
        changes = tally[0] @ (hit - missed - alarm) + tally[1] @ missed + tally[2] @ alarm
        sums = scores.sum(axis=1)
        values = self._average(sums, examples, present)
        left_out = self._average((sums - changes).T, examples - 1, present)
        right = np.equal(self.true, predicted).reshape(examples, -1).all(axis=1)
        share = {COUNTED[self.label.kind]: intervals.estimate_share(right, self.clusters)}
        return intervals.from_left_out(values, left_out, self.clusters) | share

    def _average(self, sums: Floats, examples: int, present: bool) -> dict[str, Floats]:
        precision, recall, f1, weighted, among, hits, total = sums
        outputs, count = len(self.label.outputs), max(examples, 1)
        measured = {
            f"macro_{name}": np.where(among > 0, divide(each, among), 1.0) if present else each / outputs
            for name, each in (("precision", precision), ("recall", recall), ("f1", f1))
        }
        measured |= {"weighted_f1": weighted / count, "micro_f1": divide(2 * hits, total)}
        measured["hamming_loss"] = (total - 2 * hits) / (count * outputs)
        return {each.name: measured[each.name] for each in BY_KIND[self.label.kind] if each.name in measured}

    @cached_property
    def counted(self) -> dict[str, Estimate]:
        """The metrics that count right and wrong predictions."""
        return self.count(self.predicted)

    @cached_property
    def measured(self) -> dict[str, Estimate]:
        """The metrics of predictions, and of finite probabilities."""
        return self.counted | self.finite_only.estimates

    def intervals(self) -> dict[str, Interval]:
        """Returns the 95 % interval of every metric, where known; also of each class: "recall[class=x]"."""
        return intervals.find_intervals(self.measured | self._estimate_parts(self.predicted))

    def _estimate_parts(self, predicted: Ints, other: Ints | None = None) -> dict[str, Estimate]:
        """Returns recall, precision and F1 of each class or label with examples: "recall[class=x]".

        For a comparison with `other` predictions, precision has an influence of the examples of both.
        """
        found, kind = dict[str, Estimate](), PARTS[self.label.kind][0]
        for index, name in enumerate(self.label.outputs):
            truth, answered = self.find_part(self.true, index), self.find_part(predicted, index)
            if not truth.any():
                continue
            part, hit = f"[{kind}={name}]", truth & answered
            either = answered if other is None else answered | self.find_part(other, index)
            found[f"recall{part}"] = self.estimate_share(answered, truth)
            found[f"precision{part}"] = (
                self.estimate_share(truth, answered)
                if other is None
                else self._estimate_ratio(hit, answered, either)
            )
            both = truth + answered.astype(np.int8)
            found[f"f1{part}"] = self._estimate_ratio(2 * hit, both, truth | either)
        return found

    def _estimate_ratio(self, over: Ints | Mask, under: Ints | Mask, among: Mask) -> Estimate:
        terms, groups = np.stack([over, under], axis=1)[among], self._clusters_of(among)
        return intervals.jackknife(terms, lambda sums: {"": divide(sums[..., 0], sums[..., 1])}, groups)[""]

    def compare_with_constant(self, answer: str, always: Ints, shares: Floats) -> Baseline:
        """Returns the baseline with this answer, and these probabilities, to every example."""
        outputs = np.broadcast_to(shares.astype(np.float32), self.outputs.shape)
        constant = replace(self.without_columns, outputs=outputs, predicted=always)
        values = constant.counted | constant.select(self.finite).estimates
        measured = {name: each.value for name, each in values.items()}
        return Baseline(answer, measured, intervals.find_leads(self.measured, values))

    def leads(self, other: Probabilities, min_slice: int = MIN_SLICE) -> dict[str, Lead]:
        """Returns the lead over another model on the same examples in each metric with an interval."""
        both = self.finite & other.finite
        ours, theirs = self.select(both), other.select(both)
        answers = self.predicted, other.predicted
        parts = self._estimate_parts(*answers), self._estimate_parts(*reversed(answers))
        leads = intervals.find_leads(
            self.counted | ours.estimates | parts[0], other.counted | theirs.estimates | parts[1]
        )
        main, part = MAIN[self.label.kind], f"{_MAIN_OF_PART[self.label.kind]}["
        of_main = {
            f"{main}[{name.removeprefix(part)}": lead for name, lead in leads.items() if name.startswith(part)
        }
        return leads | of_main | self.lead_by_slice(other, min_slice)

    @cached_property
    @abstractmethod
    def losses(self) -> Floats:
        """The log loss of each example, NaN where it has none; all probabilities have to be finite."""

    @cached_property
    def areas(self) -> RocPrAreas:
        """Areas under the curves; all probabilities have to be finite."""
        return intervals.measure_roc_pr(self.true, self.outputs)

    @cached_property
    def estimates(self) -> dict[str, Estimate]:
        """Log loss and mean areas; all probabilities have to be finite."""
        if not len(self.true):
            return {}
        with np.errstate(divide="ignore", invalid="ignore"):
            found = intervals.jackknife(
                np.column_stack([np.nan_to_num(self.losses), np.isfinite(self.losses)]),
                lambda sums: {"log_loss": sums[..., 0] / sums[..., 1]},
                self.clusters,
            )
        influence = len(self.true) * self.areas.influence.T
        names = AREAS[self.label.kind]
        areas = zip(names, self.areas.means, influence, strict=False)
        return found | {name: Estimate(mean, moved, self.clusters) for name, mean, moved in areas}


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
        right: Mask = np.equal(self.true, self.predicted)
        return right

    def summarize(self, min_slice: int) -> dict[str, Any]:
        """Returns the fields of an evaluation that follow from the outcomes."""
        classes = len(self.label.outputs)
        cells, counts = np.unique(self.true * classes + self.predicted, return_counts=True)
        confusion = np.column_stack([*np.divmod(cells, classes), counts])
        return {
            **super().summarize(min_slice),
            "confusion": tuple(map(tuple, confusion.tolist())),
            "calibration": self.calibration,
            **_draw_curves(self.finite_only),
        }

    def score(self) -> dict[str, float]:
        """Returns the metrics of predictions and probabilities by name.

        `top5_accuracy` counts examples without finite probabilities as wrong, and needs six classes or more.
        `log_loss` leaves out rows with no probability above 0. The expected calibration error (ECE) is the
        mean distance of accuracy and confidence, 0..1.
        """
        scores = super().score()
        if total := len(self.finite_only.true):
            distances = (each.examples * abs(each.accuracy - each.confidence) for each in self.calibration)
            scores["ece"] = sum(distances) / total
        return scores

    @cached_property
    def measured(self) -> dict[str, Estimate]:
        """The metrics of predictions, and of finite probabilities."""
        found, true, outputs = super().measured, self.finite_only.true, self.finite_only.outputs
        if outputs.shape[1] <= _TOP or not len(true):
            return found
        of_truth, classes = outputs[np.arange(len(true)), true, None], np.arange(outputs.shape[1])
        # Of equally probable classes scikit-learn's top_k_accuracy_score puts the last first.
        before = (outputs > of_truth) | ((outputs == of_truth) & (classes > true[:, None]))
        among = np.zeros(len(self.true), np.bool_)
        among[self.finite] = before.sum(axis=1) < _TOP
        return found | {"top5_accuracy": intervals.estimate_share(among, self.clusters)}

    @cached_property
    def calibration(self) -> tuple[evaluation.Bin, ...]:
        """Calibration by highest probability, in 15 bins of equal width (Guo et al., 2017)."""
        confidence, right = self.finite_only.outputs.max(axis=1).astype(np.float64), self.finite_only.right
        edges = np.linspace(0.0, 1.0, _BINS + 1)
        # Each bin includes its upper edge; a probability rounded to more than 1 belongs to the last.
        bins = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, _BINS - 1)
        return tuple(
            evaluation.Bin(
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
    def losses(self) -> Floats:
        """The log loss of each example, NaN where no probability is above 0."""
        # Rows of 0..1 that sum to one, as scikit-learn expects them; a softmax in 16 bits does not.
        rows = self.outputs.clip(0.0, 1.0)
        sums = rows.sum(axis=1, dtype=np.float64)
        of_truth = rows[np.arange(len(rows)), self.true].astype(np.float64)
        shares = divide(of_truth, sums).clip(np.finfo(np.float64).eps, 1 - np.finfo(np.float64).eps)
        return np.where(sums > 0, -np.log(shares), np.nan)

    def estimate_main(self, mask: Mask) -> Estimate:
        """Returns the accuracy on the examples of a slice."""
        return self.estimate_share(self.right, mask)

    def baseline(self, trained: Tally | None) -> Baseline:
        """Returns the baseline of the most frequent class in training; its probabilities are their shares."""
        names = self.label.outputs
        counts = np.array(trained.counts) if trained else np.bincount(self.true, minlength=len(names))
        answer, shares = int(np.argmax(counts)), counts / max(1, counts.sum())
        return self.compare_with_constant(names[answer], np.full_like(self.true, answer), shares)


def _draw_curves(finite: ClassOutcomes) -> dict[str, tuple[evaluation.Curve, ...]]:
    """Returns the fields `roc` and `precision_recall`: up to 12 curves each, of the smallest areas."""

    def roc(true: Any, scores: Any) -> tuple[Any, ...]:
        x, y, thresholds = metrics.roc_curve(true, scores)
        # scikit-learn's first threshold is infinity, which JSON does not have.
        return x, y, np.minimum(thresholds, 1.0)

    def precision_recall(true: Any, scores: Any) -> tuple[Any, ...]:
        y, x, thresholds = metrics.precision_recall_curve(true, scores)
        return x, y, np.append(thresholds, 1.0)

    def draw(values: Floats, curve: Callable[..., tuple[Any, ...]]) -> tuple[evaluation.Curve, ...]:
        smallest, curves = np.sort(np.argsort(values, kind="stable")[:MAX_CURVES]), []
        for index, label in zip(smallest, finite.areas.classes[smallest], strict=True):
            parts = curve(finite.true == label, finite.outputs[:, label])
            # Thinned evenly along the curve, not along x: it may rise at a single x.
            steps = sum(np.abs(np.diff(part)) for part in parts[:2])
            length = np.concatenate([[0.0], np.cumsum(steps)])
            wanted = np.searchsorted(length, np.linspace(0.0, length[-1], MAX_CURVE_POINTS))
            kept = np.unique([0, *wanted.clip(0, len(length) - 1), len(length) - 1])
            thinned = (tuple(part[kept].astype(float).tolist()) for part in parts)
            curves.append(evaluation.Curve(finite.label.outputs[label], float(values[index]), *thinned))
        return tuple(curves)

    areas = finite.areas
    return {"roc": draw(areas.roc, roc), "precision_recall": draw(areas.pr, precision_recall)}


@dataclass(frozen=True)
class MultilabelOutcomes(Probabilities):
    """Outcomes of kind multilabel: the truth is 0 or 1 for each label, [n, outputs]."""

    def estimate_main(self, mask: Mask) -> Estimate:
        """Returns macro F1 over the labels that occur; 1 where none does, as nothing is wrong then."""
        part = self.without_columns.select(mask)
        return part.count(part.predicted, present=True)["macro_f1"]

    @cached_property
    def losses(self) -> Floats:
        """The log loss of each example, the mean over the labels; every example has one."""
        smallest = float(np.finfo(np.float32).eps)
        bounded = self.outputs.astype(np.float64).clip(smallest, 1 - smallest)
        losses: Floats = -np.where(self.true == 1, np.log(bounded), np.log1p(-bounded)).mean(axis=1)
        return losses

    def baseline(self, trained: Tally | None) -> Baseline:
        """Returns the baseline of all labels, as no constant answer has a higher F1, with their shares."""
        return self.compare_with_constant("all labels", np.ones_like(self.true), self.true.mean(axis=0))


_ERROR_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
#: Numbers that are plotted, and examples of each.
MAX_PLOTTED, MAX_POINTS = 6, 1000
_SEED = 20170


@dataclass(frozen=True)
class RegressionOutcomes(Outcomes):
    """Outcomes of kind regression: truth and outputs are float64 [n, outputs]."""

    def summarize(self, min_slice: int) -> dict[str, Any]:
        """Returns the fields of an evaluation, measured on the examples with finite predictions."""
        return {
            "examples": len(self.true),
            "non_finite": int((~self.finite).sum()),
            "metrics": self.finite_only.score(),
            "intervals": self.finite_only.intervals(),
            "slices": self.finite_only.slices(min_slice),
            "numbers": tuple(self.finite_only._score_number(i) for i in range(len(self.label.outputs))),
        }

    def score(self) -> dict[str, float]:
        """Returns the metrics by name, means over the numbers; empty without examples."""
        if not len(self.true):
            return {}
        values = {name: each.value for name, each in self.estimates.items() if "[" not in name}
        values |= {
            "median_absolute_error": metrics.median_absolute_error(self.true, self.outputs),
            "p90_absolute_error": np.quantile(np.abs(self.outputs - self.true), 0.9, axis=0).mean(),
        }
        return {name: float(value) for name, value in values.items() if math.isfinite(value)}

    def intervals(self) -> dict[str, Interval]:
        """Returns the 95 % intervals of the metrics that follow from sums, and of each number of several."""
        return intervals.find_intervals(self.estimates)

    def leads(self, other: RegressionOutcomes, min_slice: int = MIN_SLICE) -> dict[str, Lead]:
        """Returns the lead over another model on the examples where the outputs of both are finite."""
        both = self.finite & other.finite
        ours, theirs = self.select(both), other.select(both)
        leads = intervals.find_leads(ours.estimates, theirs.estimates)
        return leads | ours.lead_by_slice(theirs, min_slice)

    def baseline(self, trained: Tally | None) -> Baseline:
        """Returns the baseline that always predicts the means in training."""
        means = [spread.mean for spread in trained.spreads] if trained else self.true.mean(axis=0).tolist()
        outputs = np.tile(means, (len(self.true), 1))
        always = replace(self.without_columns, outputs=outputs)
        leads, names = self.without_columns.leads(always), LEADS_BY_KIND[REGRESSION]
        measured = {name: value for name, value in always.score().items() if name in names}
        answer = enumerate_names([f"{mean:.4g}" for mean in means])
        return Baseline(answer, measured, {name: leads[name] for name in names if name in leads})

    def estimate_main(self, mask: Mask) -> Estimate:
        """Returns the RMSE on the examples of a slice."""
        return self.without_columns.select(mask).estimates["rmse"]

    @cached_property
    def estimates(self) -> dict[str, Estimate]:
        """The metrics that follow from sums, with the influence of each example."""
        if not len(self.true):
            return {}
        error, true = self.outputs - self.true, self.true - self.true.mean(axis=0)
        relative = np.full_like(error, np.nan)  # undefined for a truth of 0
        if (self.true != 0).all():
            relative = np.abs(error / self.true)
        parts = [np.ones_like(error), error**2, np.abs(error), relative, true, true**2]
        with np.errstate(divide="ignore", invalid="ignore"):
            return intervals.jackknife(np.stack(parts, axis=1), self._measure, self.clusters)

    def _measure(self, sums: Floats) -> dict[str, Floats]:
        names = self.label.outputs
        count, squares, absolutes, relatives, truths, of_truths = np.moveaxis(sums, -2, 0)
        rmse, mae = np.sqrt(squares / count), absolutes / count
        around = of_truths - truths**2 / count
        r2 = 1 - squares / np.where(np.ptp(self.true, axis=0) > 0, around, np.nan)
        measured = {"rmse": rmse, "mae": mae, "mape": relatives / count, "r2": r2}
        means = {name: values.mean(axis=-1) for name, values in measured.items()}
        if len(names) > 1:
            means |= {f"rmse[number={name}]": rmse[..., i] for i, name in enumerate(names)}
            means |= {f"mae[number={name}]": mae[..., i] for i, name in enumerate(names)}
        return means

    def _score_number(self, index: int) -> evaluation.NumberScore:
        label, true, outputs = self.label, self.true[:, index], self.outputs[:, index]
        unit, error = label.units[index] if label.units else "", outputs - true
        if not len(error):
            return evaluation.NumberScore(label.outputs[index], unit, 0.0, 0.0, 0.0)
        most = MAX_POINTS if index < MAX_PLOTTED else 0
        drawn = np.random.default_rng(_SEED).permutation(len(true))[:most]
        return evaluation.NumberScore(
            label.outputs[index],
            unit,
            rmse=float(np.sqrt((error**2).mean())),
            mae=float(np.abs(error).mean()),
            bias=float(error.mean()),
            errors={f"{share:g}": float(np.quantile(error, share)) for share in _ERROR_QUANTILES},
            points=tuple(zip(true[drawn].tolist(), outputs[drawn].tolist(), strict=True)),
        )
