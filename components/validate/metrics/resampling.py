"""95 % intervals of metrics, and paired leads between two models; areas under ROC and PR curves.

Shares of examples have Wilson's interval (1927), all else is by bootstrap. For metrics that follow from sums
over the examples, a resample is a product of matrices: examples are put into blocks at random, one each where
they are few, and blocks are drawn with replacement. Two models on the same examples are always resampled
together (paired). Copies of an example add no information: they form a group, and groups are drawn.

Areas under curves equal scikit-learn's, for all classes in one pass: an area follows from the ranks of a
class's examples among all others, and only the scores of the class itself are sorted. A resample sums the
influence of its examples on the mean of the areas (DeLong et al., 1988, for ROC; the derivative by the weight
of an example for average precision) instead of computing its areas.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from statistics import NormalDist
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn import metrics

from shardline.components.validate.metrics.evaluation import Baseline, ClassScore, Interval, Lead, Slice
from shardline.components.validate.metrics.metrics import AREAS, LOWER_IS_BETTER, PARTS
from shardline.trainer.data.features import Label, Tally

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

#: Sums over examples, [..., sums] -> metrics by name, [...] each.
Measure = Callable[[Floats], Mapping[str, Floats]]

RESAMPLES = 1000
SEED = 20170

# More blocks make a resample no better.
_BLOCKS = 4096

# Text with more values is not sliced, and numbers with more are sliced at their quartiles.
_MAX_CATEGORIES, _MAX_NUMBERS = 20, 5

# Classes whose scores are copied at a time.
_CLASSES_AT_ONCE = 50


@dataclass(frozen=True)
class Outcomes(ABC):
    """Truth and predictions of one label, an element per example.

    Attributes:
        true: The truth, as it is stored: [n] of classes, else [n, outputs].
        outputs: Outputs of the model, probabilities or numbers, [n, outputs].
        columns: Further features of the examples by name, each [n], for slices.
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

    def select(self, mask: Mask) -> Self:
        """Returns the outcomes of the examples in a mask, [n]."""
        if mask.all():
            return self
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        some: dict[str, Any] = {
            name: array[mask] for name, array in values.items() if isinstance(array, np.ndarray)
        }
        columns = {name: column[mask] for name, column in self.columns.items()}
        return replace(self, columns=columns, **some)

    @abstractmethod
    def summarize(self, min_slice: int) -> dict[str, Any]:
        """Returns the fields of an evaluation that follow from the outcomes."""

    @abstractmethod
    def leads(self, other: Any) -> dict[str, Lead]:
        """Returns the lead over another model on the same examples in each metric with an interval."""

    @abstractmethod
    def baseline(self, trained: Tally | None) -> Baseline:
        """Returns the baseline: the same answer to every example, chosen by the training labels."""

    @abstractmethod
    def measure_slice(self, mask: Mask, *, decided: bool) -> tuple[float, Interval | None]:
        """Returns the main metric on the examples of a slice, and its interval if the slice is decided."""

    def slices(self, min_slice: int, parts: Iterable[tuple[str, Mask]] = ()) -> tuple[Slice, ...]:
        """Returns the slices `parts` and those by feature; they are decided from `min_slice` examples on."""
        slices = []
        for name, mask in (*parts, *_slices(self.columns)):
            examples = int(mask.sum())
            copies = None if self.copies is None else self.copies[mask]
            decided = len(distinct_groups(copies, examples)[0]) >= min_slice
            value, interval = self.measure_slice(mask, decided=decided)
            slices.append(Slice(name, examples, value, decided, interval))
        return tuple(slices)


def score_classes(names: Sequence[str], true: Ints, predicted: Ints) -> tuple[ClassScore, ...]:
    """Returns the precision, recall and F1 of each class, or label, in their order."""
    precision, recall, f1, support = metrics.precision_recall_fscore_support(
        true, predicted, labels=list(range(len(names))), zero_division=0.0
    )
    return tuple(
        ClassScore(name, int(support[i]), float(precision[i]), float(recall[i]), float(f1[i]))
        for i, name in enumerate(names)
    )


def divide(over: Floats, under: Floats) -> Floats:
    """Returns a quotient, 0 where the denominator is 0."""
    return np.divide(over, under, out=np.zeros_like(over, dtype=np.float64), where=under > 0)


def _slices(columns: Mapping[str, npt.NDArray[Any]]) -> Iterator[tuple[str, Mask]]:
    """Yields the names of slices, "camera=left", "height=96..128", and the masks of their examples, [n]."""
    for name, column in columns.items():
        floats, numbers = (np.issubdtype(column.dtype, dtype) for dtype in (np.floating, np.number))
        finite = np.isfinite(column) if floats else np.full(len(column), True)
        values = np.unique(column[finite])
        if len(values) <= (_MAX_NUMBERS if numbers else _MAX_CATEGORIES):
            for value in values:
                yield f"{name}={value:g}" if floats else f"{name}={value}", column == value
        elif numbers:
            edges = np.unique(np.quantile(column[finite].astype(np.float64), np.linspace(0, 1, 5)))
            for index, (lower, upper) in enumerate(pairwise(edges)):
                above = column >= lower if index == 0 else column > lower
                yield f"{name}={lower:g}..{upper:g}", finite & above & (column <= upper)
        if not finite.all():
            yield f"{name}=missing", ~finite


def distinct_groups(groups: Ints | None, examples: int) -> tuple[Ints, Ints]:
    """Returns the first example of each group of copies, and its size; None means that none are equal."""
    if groups is None:
        return np.arange(examples), np.ones(examples, np.int64)
    _, first, sizes = np.unique(groups, return_index=True, return_counts=True)
    return first, sizes


def group_copies(terms: npt.NDArray[Any], groups: Ints | None) -> npt.NDArray[Any]:
    """Returns the terms of groups of copies, [groups, sums], from those of examples, [examples, sums]."""
    if groups is None:
        return terms
    first, sizes = distinct_groups(groups, len(terms))
    weighted: npt.NDArray[Any] = terms[first] * sizes[:, None]
    return weighted


def intervals(terms: npt.NDArray[Any], measure: Measure) -> dict[str, Interval]:
    """Returns the 95 % interval of each metric from the terms of examples, [examples, sums], where known."""
    return percentile_intervals(measure(_resample(terms))) if len(terms) else {}


def leads(ours: npt.NDArray[Any], theirs: npt.NDArray[Any], measure: Measure) -> dict[str, Lead]:
    """Returns the lead in each metric over another model on the same examples, where finite."""
    if not len(ours):
        return {}
    width = ours.shape[1]
    both = _resample(np.concatenate([ours, theirs], axis=1))
    first, second = measure(both[:, :width]), measure(both[:, width:])
    ours_total, theirs_total = measure(ours.sum(axis=0)), measure(theirs.sum(axis=0))
    return {
        name: lead(name, float(ours_total[name] - theirs_total[name]), first[name] - second[name])
        for name in first
        if np.isfinite(ours_total[name] - theirs_total[name])
    }


def lead(name: str, difference: float, drawn: Floats) -> Lead:
    """Returns a lead in a metric from its difference and the differences in resamples."""
    behind = drawn >= 0 if name.partition("[")[0] in LOWER_IS_BETTER else drawn <= 0
    return Lead(difference, _percentiles(drawn), float((behind.sum() + 1) / (len(drawn) + 1)))


def percentile_intervals(drawn: Mapping[str, Floats]) -> dict[str, Interval]:
    """Returns the 95 % interval of each metric from its values in resamples.

    There is none where they are not finite, or do not vary: of a model without mistakes, no resample has one.
    """
    ends = {name: _percentiles(values) for name, values in drawn.items()}
    return {name: (lower, upper) for name, (lower, upper) in ends.items() if -np.inf < lower < upper < np.inf}


def _percentiles(drawn: Floats) -> Interval:
    lower, upper = np.percentile(drawn, (2.5, 97.5)).tolist()
    return lower, upper


def proportion_interval(right: int, examples: int, groups: Ints | None = None) -> Interval | None:
    """Returns the 95 % interval of a share, 0..1 (Wilson's score interval); None of no examples.

    Unlike a bootstrap's, it has a width where all or none are right. Groups of copies count by their
    effective sample size (Kish).
    """
    if not examples:
        return None
    _, sizes = distinct_groups(groups, examples)
    share, effective = right / examples, examples**2 / int((sizes**2).sum())
    z = NormalDist().inv_cdf(0.975)
    middle = (share + z**2 / (2 * effective)) / (1 + z**2 / effective)
    half = z * math.sqrt(share * (1 - share) / effective + (z / effective) ** 2 / 4) / (1 + z**2 / effective)
    return (middle - half if right else 0.0, middle + half if right < examples else 1.0)


def share_intervals(shares: Mapping[str, tuple[Mask, Mask]], copies: Ints | None) -> dict[str, Interval]:
    """Returns the intervals of shares from the masks of what is right and of what is counted, by name."""
    found = {}
    for name, (right, among) in shares.items():
        groups = None if copies is None else copies[among]
        if interval := proportion_interval(int((right & among).sum()), int(among.sum()), groups):
            found[name] = interval
    return found


def _resample(terms: npt.NDArray[Any]) -> Floats:
    """Returns the sums of all resamples, [resamples, sums]."""
    rng = np.random.default_rng(SEED)
    blocks = np.asarray(terms, np.float64)
    if len(blocks) > _BLOCKS:
        order = rng.permutation(len(blocks))
        starts = np.linspace(0, len(blocks), _BLOCKS, endpoint=False).astype(np.int64)
        blocks = np.add.reduceat(blocks[order], starts, axis=0)
    sampled = rng.integers(len(blocks), size=(RESAMPLES, len(blocks)), dtype=np.int32)
    counts = np.stack([np.bincount(row, minlength=len(blocks)) for row in sampled])
    drawn: Floats = counts.astype(np.float64) @ blocks
    return drawn


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

    @property
    def terms(self) -> Floats:
        """The terms of each example, [n, 3]: the first two over the last, all summed, are the means."""
        examples = len(self.influence)
        means = examples * self.influence + (self.means or (np.nan, np.nan))
        return np.column_stack([means, np.ones(examples)])


def measure_roc_pr(true: Ints, probabilities: npt.NDArray[Any]) -> RocPrAreas:
    """Returns the areas of finite probabilities, [n, classes]; the truth is [n], or 0 or 1, [n, classes]."""
    examples, classes = probabilities.shape
    if true.ndim == 1:
        counts, order = np.bincount(true, minlength=classes), np.argsort(true, kind="stable")
        members = np.split(order, np.cumsum(counts)[:-1])
    else:
        counts, members = true.sum(axis=0), [np.flatnonzero(column) for column in true.T]
    mixed = np.flatnonzero((counts > 0) & (counts < examples))
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
        part, one = PARTS[self.label.kind][0], self.true.ndim == 1
        of_parts = (
            (f"{part}={name}", self.true == index if one else self.true[:, index] == 1)
            for index, name in enumerate(names)
        )
        return {
            "examples": len(self.true),
            "log_loss": measured.get("log_loss"),
            "non_finite": int((~self.finite).sum()),
            "class_names": names,
            "classes": score_classes(names, self.true, self.predicted),
            "metrics": measured,
            "intervals": self.intervals(),
            "slices": self.slices(min_slice, of_parts),
        }

    @abstractmethod
    def score(self) -> dict[str, float]:
        """Returns the metrics by name; areas are means over the classes that some, not all, examples have."""

    @abstractmethod
    def intervals(self) -> dict[str, Interval]:
        """Returns the 95 % interval of every metric, also of each class: "recall[class=healthy]"."""

    @abstractmethod
    def lead_counts(self, predicted: Ints) -> dict[str, Lead]:
        """Returns the lead over these predictions in each counted metric."""

    def leads(self, other: Probabilities) -> dict[str, Lead]:
        """Returns the lead over another model on the same examples in each metric with an interval."""
        both = self.finite & other.finite
        measured = leads(self.select(both).terms, other.select(both).terms, self.measure)
        return self.lead_counts(other.predicted) | measured

    @cached_property
    @abstractmethod
    def losses(self) -> tuple[Floats, Mask]:
        """The log loss of each example, and which examples have one; all probabilities have to be finite."""

    @cached_property
    def areas(self) -> RocPrAreas:
        """Areas under the curves; all probabilities have to be finite."""
        return measure_roc_pr(self.true, self.outputs)

    @property
    def means(self) -> dict[str, float]:
        """The mean areas of finite probabilities by name of the metric."""
        return dict(zip(AREAS[self.label.kind], self.finite_only.areas.means, strict=False))

    @cached_property
    def terms(self) -> Floats:
        """The terms of each example for log loss and mean areas; all probabilities have to be finite."""
        return group_copies(np.column_stack([*self.losses, self.areas.terms]), self.copies)

    def measure(self, sums: Floats) -> dict[str, Floats]:
        """Returns the log loss and the mean areas from sums of `terms`, NaN where there is none."""
        loss, count, *areas, examples = np.moveaxis(sums, -1, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            means = [(area / examples).clip(0.0, 1.0) for area in areas]
            return {"log_loss": loss / count, **dict(zip(AREAS[self.label.kind], means, strict=True))}
