"""Resampling: 95 % intervals of what is measured of examples, and paired leads, by bootstrap; areas.

A metric that follows from sums over the examples needs no pass over them for a resample: examples are put
into blocks at random, a block for each where they are few, and blocks are drawn with replacement, which is
one product of matrices. Two models on the same examples are always drawn together (paired). Copies of an
example say no more than it does: they are one group, and groups are drawn.

Areas under curves are scikit-learn's numbers, for all classes in one pass: an area follows from where the
examples of a class stand among all others, so that nothing is sorted but the scores of the class itself. How
far an example moves the mean of the areas (its influence: DeLong et al., 1988, for ROC; the derivative by its
weight for average precision) is summed in a resample, which stands for the areas of that resample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn import metrics

from shardline.components.validate.metrics.evaluation import Baseline, ClassScore, Interval, Lead, Slice
from shardline.components.validate.metrics.metrics import AREAS, FALLING, PARTS
from shardline.trainer.data.features import Label, Tally

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Chosen = npt.NDArray[np.bool_]

#: Sums over examples, [..., sums] -> metrics by name, [...] each.
Measure = Callable[[Floats], Mapping[str, Floats]]

RESAMPLES = 1000
SEED = 20170

# More blocks make a resample no better.
_BLOCKS = 4096

# Text with more values is not sliced, and numbers with more are sliced at their quartiles.
_MOST_TEXTS, _MOST_NUMBERS = 20, 5

# Classes whose scores are copied at a time.
_AT_ONCE = 50


@dataclass(frozen=True)
class Outcomes(ABC):
    """Truth and predictions of one label, an element per example.

    Attributes:
        true: The truth, as it is stored: [n] of classes, else [n, outputs].
        said: What the model said, probabilities or numbers, [n, outputs].
        columns: Further features of the examples by name, each [n]; slices are made of them.
        copies: Groups of equal examples, [n]; None where there are no two.
    """

    label: Label
    true: npt.NDArray[Any]
    said: npt.NDArray[Any]
    columns: Mapping[str, npt.NDArray[np.generic]]
    copies: Ints | None = None

    @cached_property
    def finite(self) -> Chosen:
        """Which examples have only finite predictions, [n]."""
        # A sum is finite where all its terms are, less far than float64 reaches, and makes no copy.
        finite: Chosen = np.isfinite(self.said.sum(axis=1, dtype=np.float64))
        return finite

    @cached_property
    def sound(self) -> Self:
        """The outcomes of the examples with only finite predictions."""
        return self.only(self.finite)

    def only(self, chosen: Chosen) -> Self:
        """Returns the outcomes of some of the examples."""
        if chosen.all():
            return self
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        some: dict[str, Any] = {
            name: one[chosen] for name, one in values.items() if isinstance(one, np.ndarray)
        }
        columns = {name: column[chosen] for name, column in self.columns.items()}
        return replace(self, columns=columns, **some)

    @abstractmethod
    def summarize(self, min_slice: int) -> dict[str, Any]:
        """Returns the fields of an evaluation that follow from the outcomes."""

    @abstractmethod
    def leads(self, other: Any) -> dict[str, Lead]:
        """Returns the lead over another model on the same examples in each metric with an interval."""

    @abstractmethod
    def baseline(self, trained: Tally | None) -> Baseline:
        """Returns the trivial answer to every example, as training has shown it."""

    @abstractmethod
    def judge_slice(self, chosen: Chosen, *, decided: bool) -> tuple[float, Interval | None]:
        """Returns the metric that counts first on some examples, and its interval if the slice is decided."""

    def slices(self, min_slice: int, parts: Iterable[tuple[str, Chosen]] = ()) -> tuple[Slice, ...]:
        """Returns the quality of `parts` and by feature; a slice is decided from `min_slice` examples on."""
        found = []
        for name, chosen in (*parts, *_slices(self.columns)):
            examples = int(chosen.sum())
            copies = None if self.copies is None else self.copies[chosen]
            decided = len(distinct(copies, examples)[0]) >= min_slice
            value, interval = self.judge_slice(chosen, decided=decided)
            found.append(Slice(name, examples, value, decided, interval))
        return tuple(found)


def macro_averages(true: Ints, predicted: Ints) -> dict[str, float]:
    """Returns the means over classes, or labels, of precision, recall and F1, by name of the metric."""
    found = metrics.precision_recall_fscore_support(true, predicted, average="macro", zero_division=0.0)
    return dict(zip(("macro_precision", "macro_recall", "macro_f1"), map(float, found[:3]), strict=True))


def score_classes(names: Sequence[str], true: Ints, predicted: Ints) -> tuple[ClassScore, ...]:
    """Returns how well each class, or label, is told from the others, in their order."""
    precision, recall, f1, support = metrics.precision_recall_fscore_support(
        true, predicted, labels=list(range(len(names))), zero_division=0.0
    )
    return tuple(
        ClassScore(name, int(support[i]), float(precision[i]), float(recall[i]), float(f1[i]))
        for i, name in enumerate(names)
    )


def divide(over: Floats, under: Floats) -> Floats:
    """Returns a quotient, 0 where there is none."""
    return np.divide(over, under, out=np.zeros_like(over, dtype=np.float64), where=under > 0)


def _slices(columns: Mapping[str, npt.NDArray[Any]]) -> Iterator[tuple[str, Chosen]]:
    """Yields the names of slices, "camera=left", "height=96..128", and which examples are in them, [n]."""
    for name, column in columns.items():
        floats, numbers = (np.issubdtype(column.dtype, one) for one in (np.floating, np.number))
        finite = np.isfinite(column) if floats else np.full(len(column), True)
        values = np.unique(column[finite])
        if len(values) <= (_MOST_NUMBERS if numbers else _MOST_TEXTS):
            for value in values:
                yield f"{name}={value:g}" if floats else f"{name}={value}", column == value
        elif numbers:
            edges = np.unique(np.quantile(column[finite].astype(np.float64), np.linspace(0, 1, 5)))
            for place, (lower, upper) in enumerate(pairwise(edges)):
                above = column >= lower if place == 0 else column > lower
                yield f"{name}={lower:g}..{upper:g}", finite & above & (column <= upper)
        if not finite.all():
            yield f"{name}=missing", ~finite


def distinct(groups: Ints | None, examples: int) -> tuple[Ints, Ints]:
    """Returns the first example of each group of copies, and the size of each; None is of examples apart."""
    if groups is None:
        return np.arange(examples), np.ones(examples, np.int64)
    _, first, sizes = np.unique(groups, return_index=True, return_counts=True)
    return first, sizes


def together(terms: npt.NDArray[Any], groups: Ints | None) -> npt.NDArray[Any]:
    """Returns the terms of examples, [examples, sums], as those of groups, [groups, sums]."""
    if groups is None:
        return terms
    first, sizes = distinct(groups, len(terms))
    weighted: npt.NDArray[Any] = terms[first] * sizes[:, None]
    return weighted


def intervals(terms: npt.NDArray[Any], measure: Measure) -> dict[str, Interval]:
    """Returns the 95 % interval of each metric of examples' terms, [examples, sums], where it is finite."""
    if not len(terms):
        return {}
    found = {name: spans(values[:, None])[0] for name, values in measure(_drawn(terms)).items()}
    return {name: ends for name, ends in found.items() if np.isfinite(ends).all()}


def leads(ours: npt.NDArray[Any], theirs: npt.NDArray[Any], measure: Measure) -> dict[str, Lead]:
    """Returns the lead in each metric over another model on the same examples, where it is finite."""
    if not len(ours):
        return {}
    width = ours.shape[1]
    both = _drawn(np.concatenate([ours, theirs], axis=1))
    first, second = measure(both[:, :width]), measure(both[:, width:])
    here, there = measure(ours.sum(axis=0)), measure(theirs.sum(axis=0))
    return {
        name: lead(name, float(here[name] - there[name]), first[name] - second[name])
        for name in first
        if np.isfinite(here[name] - there[name])
    }


def lead(name: str, difference: float, drawn: Floats) -> Lead:
    """Returns a lead in a metric of its difference and those of resamples."""
    behind = drawn >= 0 if name.partition("[")[0] in FALLING else drawn <= 0
    return Lead(difference, spans(drawn[:, None])[0], float((behind.sum() + 1) / (len(drawn) + 1)))


def spans(values: Floats) -> list[Interval]:
    """Returns the 95 % interval of each column of values, [resamples, columns]."""
    lower, upper = np.percentile(values, (2.5, 97.5), axis=0)
    return list(zip(lower.tolist(), upper.tolist(), strict=True))


def share_interval(right: int, examples: int, groups: Ints | None = None) -> Interval:
    """Returns the 95 % interval of a share, 0..1, of as many examples as the groups are worth (Kish)."""
    _, sizes = distinct(groups, examples)
    worth = max(1, round(examples**2 / int((sizes**2).sum())))
    drawn = np.random.default_rng(SEED).binomial(worth, right / examples, RESAMPLES)
    return spans(drawn[:, None] / worth)[0]


def _drawn(terms: npt.NDArray[Any]) -> Floats:
    """Returns the sums of all resamples, [resamples, sums]."""
    rng = np.random.default_rng(SEED)
    blocks = np.asarray(terms, np.float64)
    if len(blocks) > _BLOCKS:
        order = rng.permutation(len(blocks))
        starts = np.linspace(0, len(blocks), _BLOCKS, endpoint=False).astype(np.int64)
        blocks = np.add.reduceat(blocks[order], starts, axis=0)
    chosen = rng.integers(len(blocks), size=(RESAMPLES, len(blocks)), dtype=np.int32)
    counts = np.stack([np.bincount(row, minlength=len(blocks)) for row in chosen])
    drawn: Floats = counts.astype(np.float64) @ blocks
    return drawn


@dataclass(frozen=True)
class RocPrAreas:
    """Areas under the curves of the `classes` that some, not all, examples are of, [areas] each.

    `influence`, [n, 2], is how far the means of `roc` and `pr` move with the weight of each example.
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
        """What is summed of each example, [n, 3], and a one: the means are sums over the sum of ones."""
        examples = len(self.influence)
        return np.column_stack(
            [examples * self.influence + (self.means or (np.nan, np.nan)), np.ones(examples)]
        )


def measure_roc_pr(true: Ints, probabilities: npt.NDArray[Any]) -> RocPrAreas:
    """Returns the areas of finite probabilities, [n, classes]; the truth is [n] or of each class 0 or 1."""
    examples, classes = probabilities.shape
    if true.ndim == 1:
        counts, order = np.bincount(true, minlength=classes), np.argsort(true, kind="stable")
        members = np.split(order, np.cumsum(counts)[:-1])
    else:
        counts, members = true.sum(axis=0), [np.flatnonzero(column) for column in true.T]
    mixed = np.flatnonzero((counts > 0) & (counts < examples))
    roc, pr, influence = np.empty(len(mixed)), np.empty(len(mixed)), np.zeros((examples, 2))
    for start in range(0, len(mixed), _AT_ONCE):
        some = mixed[start : start + _AT_ONCE]
        columns = np.ascontiguousarray(probabilities[:, some].T)
        for place, label in enumerate(some):
            roc[start + place], pr[start + place] = _area(columns[place], members[label], influence)
    return RocPrAreas(mixed, roc, pr, influence / max(1, len(mixed)))


def _area(scores: npt.NDArray[Any], mine: Ints, influence: Floats) -> tuple[float, float]:
    """Returns both areas of one class, whose examples are `mine`; adds to the influence of all examples."""
    own, others = np.sort(scores[mine]), len(scores) - len(mine)
    # How many of the class's own scores lie below each score, and how many at or below it.
    below, reached = np.searchsorted(own, scores, side="left"), np.searchsorted(own, scores, side="right")

    def at_least(ranks: Ints) -> Ints:  # how many are at least 0, 1, ...
        counts: Ints = np.bincount(ranks, minlength=len(own) + 2)[::-1].cumsum()[::-1]
        return counts

    # Of each example of the class: its own kind at or above it, and above it; then all examples.
    own_from, own_above = len(own) - below[mine], len(own) - reached[mine]
    all_from, all_above = at_least(reached)[below[mine] + 1], at_least(below)[reached[mine]]
    beaten = 1 - (all_from - own_from + all_above - own_above) / (2 * others)
    roc = float(beaten.mean())
    # Of each example of another class: the share of the class that stands above it, equal ones by half.
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
    """Truth, int64, and probabilities, float32 [n, outputs].

    Attributes:
        predicted: int64, what the model served: its classes, [n], or which labels it gives, [n, outputs].
    """

    predicted: Ints = field(kw_only=True)

    def summarize(self, min_slice: int) -> dict[str, Any]:
        """Returns the fields of an evaluation that follow from the outcomes."""
        names, measured = self.label.outputs, self.score()
        part, one = PARTS[self.label.kind][0], self.true.ndim == 1
        of_parts = (
            (f"{part}={name}", self.true == place if one else self.true[:, place] == 1)
            for place, name in enumerate(names)
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
        """Returns the metrics by name; of areas the means over classes that some, not all, examples have."""

    @abstractmethod
    def intervals(self) -> dict[str, Interval]:
        """Returns the 95 % interval of every metric, and of "recall[class=healthy]" and its like."""

    @abstractmethod
    def lead_counts(self, predicted: Ints) -> dict[str, Lead]:
        """Returns the lead over these predictions in what is counted of right and wrong ones."""

    def leads(self, other: Probabilities) -> dict[str, Lead]:
        """Returns the lead over another model on the same examples in each metric with an interval."""
        both = self.finite & other.finite
        found = leads(self.only(both).terms, other.only(both).terms, self.measure)
        return self.lead_counts(other.predicted) | found

    @cached_property
    @abstractmethod
    def losses(self) -> tuple[Floats, Chosen]:
        """The log loss of each example, and which examples have one; all probabilities have to be finite."""

    @cached_property
    def areas(self) -> RocPrAreas:
        """Areas under the curves; all probabilities have to be finite."""
        return measure_roc_pr(self.true, self.said)

    @property
    def means(self) -> dict[str, float]:
        """The mean areas of finite probabilities by name of the metric."""
        return dict(zip(AREAS[self.label.kind], self.sound.areas.means, strict=False))

    @cached_property
    def terms(self) -> Floats:
        """What is summed of each example for log loss and mean areas; all probabilities have to be finite."""
        return together(np.column_stack([*self.losses, self.areas.terms]), self.copies)

    def measure(self, sums: Floats) -> dict[str, Floats]:
        """Returns the log loss and the mean areas, NaN where there is none, of sums of `terms`."""
        loss, there, *areas, examples = np.moveaxis(sums, -1, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            means = [(one / examples).clip(0.0, 1.0) for one in areas]
            return {"log_loss": loss / there, **dict(zip(AREAS[self.label.kind], means, strict=True))}
