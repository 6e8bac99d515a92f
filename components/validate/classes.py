"""Classes: how well a label of kind class is told, with intervals and leads.

scikit-learn computes the metrics wherever it has them. Those that are counted from right and wrong
predictions depend on the examples only through the number in each cell (true class, predicted class). To draw
n examples with replacement is then to draw the cells' numbers from a multinomial distribution, which needs no
pass over the examples. Another model's predictions on the same examples make the cells finer; the two models
are always drawn together (paired).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from sklearn import metrics

from shardline.components.validate import resampling
from shardline.components.validate.areas import Areas, draw_curves, measure_areas
from shardline.components.validate.evaluation import Baseline, Bin, Interval, Lead
from shardline.components.validate.metrics import COUNTED
from shardline.components.validate.resampling import Chosen, Floats, Ints, Outcomes, divide, share_interval
from shardline.trainer.data.features import Tally

_TOP = 5
_BINS = 15

_CHUNK = 100
_DRAWS_OF_A_CELL = 8

_RISING = {"log_loss": False, "roc_auc": True, "pr_auc": True}


@dataclass(frozen=True)
class ClassOutcomes(Outcomes):
    """Truth, int64 [n], and probabilities, float32 [n, classes].

    Attributes:
        predicted: int64 [n], the classes that the model served.
    """

    predicted: Ints = field(kw_only=True)

    @property
    def right(self) -> Chosen:
        """Which predictions are right, [n]."""
        right: Chosen = np.equal(self.true, self.predicted)
        return right

    def summarize(self, min_slice: int) -> dict[str, Any]:
        """Returns the fields of an evaluation that follow from the outcomes."""
        names, bins = self.label.outputs, calibrate(self)
        finite = self.only(self.finite)
        measured = score(self, bins) | finite.areas.means
        found = self._intervals() | resampling.finite_intervals(finite.terms, _measure)
        if "top5_accuracy" in measured:
            right = round(measured["top5_accuracy"] * len(self.true))
            found["top5_accuracy"] = share_interval(right, len(self.true), self.copies)
        confusion = metrics.confusion_matrix(self.true, self.predicted, labels=list(range(len(names))))
        of_classes = ((f"class={name}", self.true == i) for i, name in enumerate(names))
        return {
            "examples": len(self.true),
            "accuracy": measured["accuracy"],
            "log_loss": measured.get("log_loss"),
            "non_finite": int((~self.finite).sum()),
            "class_names": names,
            "classes": resampling.score_classes(names, self.true, self.predicted),
            "confusion": tuple(map(tuple, confusion.tolist())),
            "metrics": measured,
            "intervals": found,
            "slices": self.slices(min_slice, of_classes),
            "calibration": bins,
            **draw_curves(finite.true, finite.said, names, finite.areas),
        }

    def judge_slice(self, chosen: Chosen, *, decided: bool) -> dict[str, Any]:
        """Returns the accuracy on some of the examples."""
        examples, right = int(chosen.sum()), int((chosen & self.right).sum())
        copies = None if self.copies is None else self.copies[chosen]
        interval = share_interval(right, examples, copies) if decided else None
        return {"value": right / examples if examples else 0.0, "interval": interval}

    def leads(self, other: ClassOutcomes) -> dict[str, Lead]:
        """Returns the lead over another model on the same examples in each metric with an interval."""
        both = self.finite & other.finite
        ahead = resampling.leads(self.only(both).terms, other.only(both).terms, _measure, _RISING)
        found = {name: one for name, one in ahead.items() if np.isfinite(one.difference)}
        return self._leads(other.predicted) | found

    @cached_property
    def areas(self) -> Areas:
        """Areas under the curves; all probabilities have to be finite."""
        return measure_areas(self.true, self.said)

    @cached_property
    def terms(self) -> Floats:
        """What is summed of each example, where all probabilities are finite, for log loss and mean areas."""
        return resampling.together(np.column_stack([*_losses(self), self.areas.terms]), self.copies)

    def baseline(self, trained: Tally | None) -> Baseline:
        """Returns the class that is most frequent in training, as the answer to every example."""
        counts, names = trained.counts if trained else np.bincount(self.true), self.label.outputs
        answer = int(np.argmax(counts))
        ahead = self._leads(np.full_like(self.true, answer))
        (true, said, _), cells = _cells(self.true, self.predicted)
        ours = dict(zip(COUNTED, _values(cells[None], true, said, len(names))[0].tolist(), strict=False))
        return Baseline(
            answer=repr(names[answer]),
            metrics={name: ours[name] - ahead[name].difference for name in COUNTED},
            leads={name: ahead[name] for name in COUNTED},
        )

    def _intervals(self) -> dict[str, Interval]:
        """Returns the 95 % interval of every counted metric, and of "recall[class=healthy]" and its like.

        Classes without examples have no interval.
        """
        (true, said, size), counts = _cells(self.true, self.predicted, copies=self.copies)
        classes = len(self.label.outputs)
        values = np.concatenate([_values(drawn * size, true, said, classes) for drawn in _draw(counts)])
        places, names = zip(*self._measured(), strict=True)
        return dict(zip(names, resampling.spans(values[:, places]), strict=True))

    def _leads(self, others: Ints) -> dict[str, Lead]:
        """Returns the lead over another model, whose predictions are [n] too, in each counted metric."""
        (true, ours, theirs, size), counts = _cells(self.true, self.predicted, others, copies=self.copies)
        classes = len(self.label.outputs)

        def difference(drawn: Ints) -> Floats:
            drawn = drawn * size
            return _values(drawn, true, ours, classes) - _values(drawn, true, theirs, classes)

        measured = difference(counts[None])[0]
        values = np.concatenate([difference(drawn) for drawn in _draw(counts)])
        return {
            name: resampling.lead(float(measured[place]), values[:, place], rising=True)
            for place, name in self._measured()
        }

    def _measured(self) -> Iterator[tuple[int, str]]:
        """Yields place and name of the metrics in `_values`, less those of classes without examples."""
        yield from enumerate(COUNTED)
        names, present = self.label.outputs, np.unique(self.true)
        for row, metric in enumerate(("precision", "recall", "f1")):
            for label in present:
                yield len(COUNTED) + row * len(names) + int(label), f"{metric}[class={names[label]}]"


def score(outcomes: ClassOutcomes, bins: tuple[Bin, ...]) -> dict[str, float]:
    """Returns the metrics of predictions and probabilities by name.

    Averages over classes leave out those that are neither among the labels nor among the predictions, as
    scikit-learn does. What needs probabilities is measured on the examples with finite ones, except
    `top5_accuracy`, where the others are wrong, and `log_loss`, for which a row without anything above 0 is
    not finite either. `top5_accuracy` is left out where there are no more than five classes.
    `bins` give the expected calibration error (ECE), the mean distance of accuracy and confidence, 0..1.
    """
    labels, predicted = outcomes.true, outcomes.predicted
    found = {"accuracy": float(metrics.accuracy_score(labels, predicted))}
    found |= resampling.macro_averages(labels, predicted)
    found["weighted_f1"] = float(metrics.f1_score(labels, predicted, average="weighted", zero_division=0.0))
    finite = outcomes.only(outcomes.finite)
    if total := len(finite.true):
        losses, there = _losses(finite)
        if there.any():
            found["log_loss"] = float(losses[there].mean())
        found["ece"] = sum(item.examples * abs(item.accuracy - item.confidence) for item in bins) / total
        if (classes := len(outcomes.label.outputs)) > _TOP:
            right = metrics.top_k_accuracy_score(
                finite.true, finite.said, k=_TOP, normalize=False, labels=range(classes)
            )
            found["top5_accuracy"] = float(right) / len(labels)
    return found


def calibrate(outcomes: ClassOutcomes) -> tuple[Bin, ...]:
    """Returns the reliability by highest probability, in 15 bins of equal width (Guo et al., 2017).

    scikit-learn's `calibration_curve` is for two classes only. Examples with outputs that are not finite
    are left out, as are empty bins.
    """
    finite = outcomes.only(outcomes.finite)
    if not len(finite.true):
        return ()
    confidence, right = finite.said.max(axis=1).astype(np.float64), finite.right
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


def _losses(finite: ClassOutcomes) -> tuple[Floats, Chosen]:
    """Returns the log loss of each example, and which examples have one: any probability at all."""
    # Rows of 0..1 that sum to one, as scikit-learn expects them; a softmax in 16 bits does not.
    rows = finite.said.clip(0.0, 1.0)
    sums = rows.sum(axis=1, dtype=np.float64)
    of_truth = rows[np.arange(len(rows)), finite.true].astype(np.float64)
    there = sums > 0
    shares = divide(of_truth, sums).clip(np.finfo(np.float64).eps, 1 - np.finfo(np.float64).eps)
    return np.where(there, -np.log(shares), 0.0), there


def _measure(sums: Floats) -> dict[str, Floats]:
    """Returns the log loss and the mean areas, NaN where there is none, of sums of `ClassOutcomes.terms`."""
    loss, there, roc, pr, examples = np.moveaxis(sums, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "log_loss": loss / there,
            "roc_auc": (roc / examples).clip(0.0, 1.0),
            "pr_auc": (pr / examples).clip(0.0, 1.0),
        }


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
