"""Outcomes of a model on the examples of a split: what metrics, intervals, slices and leads follow from."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy import sparse

from shardline.components.validate.metrics import intervals
from shardline.components.validate.metrics.evaluation import (
    MIN_SLICE,
    Baseline,
    ClassScore,
    Interval,
    Lead,
    Slice,
)
from shardline.components.validate.metrics.intervals import Estimate, Floats, Ints, Mask
from shardline.components.validate.metrics.metrics import AREAS, BY_KIND, MAIN, PARTS
from shardline.trainer.data.features import CLASS, MULTILABEL, Label, Tally

# Classes whose scores are copied at a time.
_CLASSES_AT_ONCE = 50


@dataclass(frozen=True)
class RocPrAreas:
    """Areas under the curves of the `classes` that some, not all, examples have, [areas] each.

    `influence`, [n, 2], is the derivative of the means of `roc` and `pr` by the weight of each example.
    """

    classes: Ints
    roc: Floats
    pr: Floats
    influence: Floats

    @property
    def means(self) -> tuple[float, ...]:
        """The macro averages of `roc` and `pr`; none where there is no area."""
        return (float(self.roc.mean()), float(self.pr.mean())) if len(self.classes) else ()


def measure_roc_pr(true: Ints, probabilities: npt.NDArray[Any]) -> RocPrAreas:
    """Returns the areas of finite probabilities, [n, classes]; the truth is [n], or 0 or 1, [n, classes]."""
    examples, classes = probabilities.shape
    if true.ndim == 1:
        counts, order = np.bincount(true, minlength=classes), np.argsort(true, kind="stable")
        members = np.split(order, np.cumsum(counts)[:-1])
    else:
        counts, members = true.sum(axis=0), [np.flatnonzero(column) for column in true.T]
    mixed = np.flatnonzero((counts > 0) & (counts < examples))
    if (probabilities == probabilities[:1]).all():  # the same answer to all: half, and the classes' shares
        shares = counts[mixed] / examples
        belongs = np.isin(true, mixed) if true.ndim == 1 else true[:, mixed].sum(axis=1)
        moved = (belongs - shares.sum()) / (examples * max(1, len(mixed)))
        return RocPrAreas(mixed, np.full(len(mixed), 0.5), shares, np.stack([0 * moved, moved], axis=1))
    roc, pr, influence = np.empty(len(mixed)), np.empty(len(mixed)), np.zeros((examples, 2))
    for start in range(0, len(mixed), _CLASSES_AT_ONCE):
        some = mixed[start : start + _CLASSES_AT_ONCE]
        columns = np.ascontiguousarray(probabilities[:, some].T)
        for offset, label in enumerate(some):
            roc[start + offset], pr[start + offset] = _area(columns[offset], members[label], influence)
    return RocPrAreas(mixed, roc, pr, influence / max(1, len(mixed)))


def _area(scores: npt.NDArray[Any], mine: Ints, influence: Floats) -> tuple[float, float]:
    """Returns both areas of one class, whose examples are `mine`; adds to the influence of all examples."""
    own, others = np.sort(scores[mine]), len(scores) - len(mine)
    # How many of the class's own scores are below each score, and how many at or below it.
    below, reached = np.searchsorted(own, scores, side="left"), np.searchsorted(own, scores, side="right")

    def at_least(ranks: Ints) -> Ints:  # how many are at least 0, 1, ...
        counts: Ints = np.bincount(ranks, minlength=len(own) + 2)[::-1].cumsum()[::-1]
        return counts

    # For each example of the class: examples of the class at or above it, and above it; then all examples.
    own_from, own_above = len(own) - below[mine], len(own) - reached[mine]
    all_from, all_above = at_least(reached)[below[mine] + 1], at_least(below)[reached[mine]]
    beaten = 1 - (all_from - own_from + all_above - own_above) / (2 * others)
    roc = float(beaten.mean())
    # For each example of another class: the share of the class above it, equal ones by half.
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


#: Text with more values is not sliced.
MAX_CATEGORIES = 20
# Numbers with more values are sliced at their quartiles.
_MAX_NUMBERS = 5

# The share of examples that are right, and the metric of one class or label that is its main metric.
_SHARES = {CLASS: "accuracy", MULTILABEL: "subset_accuracy"}
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
        arrays = {item.name: getattr(self, item.name) for item in fields(self)}
        some: dict[str, Any] = {
            name: array[mask] for name, array in arrays.items() if isinstance(array, np.ndarray)
        }
        columns = {name: column[mask] for name, column in self.columns.items()}
        return replace(self, columns=columns, **some)

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
        return intervals.lead(MAIN[self.label.kind], self.estimate_main(mask), other.estimate_main(mask))

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
        return (
            count_distinct(None if self.copies is None else self.copies[mask], int(mask.sum())) >= min_slice
        )


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
        names, measured = self.label.outputs, self.score()
        part, (_, truth, _) = PARTS[self.label.kind][0], (tally := self._tally(self.predicted))
        scores = _score_parts(*(each.sum(axis=0) for each in tally))[:3]
        of_parts = ((f"{part}={name}", self.find_part(self.true, index)) for index, name in enumerate(names))
        return {
            "examples": len(self.true),
            "non_finite": int((~self.finite).sum()),
            "class_names": names,
            "classes": tuple(
                ClassScore(name, int(examples), *map(float, parts))
                for name, examples, *parts in zip(names, truth.sum(axis=0), *scores, strict=True)
            ),
            "metrics": measured,
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
        share = {_SHARES[self.label.kind]: intervals.estimate_share(right, self.clusters)}
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
            found[f"f1{part}"] = self._estimate_ratio(
                2 * hit, truth + answered.astype(np.int8), truth | either
            )
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
        return measure_roc_pr(self.true, self.outputs)

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
