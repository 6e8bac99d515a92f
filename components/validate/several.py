"""Several labels: how well a label of kind multilabel is told, with intervals and leads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn import metrics

from shardline.components.validate import resampling
from shardline.components.validate.answers import THRESHOLD
from shardline.components.validate.areas import Areas, measure_areas_of_several
from shardline.components.validate.evaluation import Baseline, ClassScore, Interval, Lead, Slice
from shardline.components.validate.metrics import LEADING, OF_SEVERAL
from shardline.components.validate.slicing import slices
from shardline.trainer.data.features import MULTILABEL, Label, Tally

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]
_Chosen = npt.NDArray[np.bool_]

_RISING = {metric.name: metric.rising for metric in OF_SEVERAL}
_PARTS = ("precision", "recall", "f1")


@dataclass(frozen=True)
class SeveralOutcomes:
    """Truth, 0 or 1, and probabilities, [n, outputs] each, and the examples' columns, each [n].

    `copies` are the groups of equal examples, [n], if there are any.
    """

    label: Label
    true: _Ints
    said: npt.NDArray[np.float32]
    columns: Mapping[str, npt.NDArray[np.generic]]
    copies: resampling.Ints | None = None

    @property
    def finite(self) -> _Chosen:
        """Which examples have only finite probabilities, [n]."""
        finite: _Chosen = np.logical_and.reduce(np.isfinite(self.said), axis=1)
        return finite

    @property
    def predicted(self) -> _Ints:
        """Which labels the model gives, 0 or 1, [n, outputs]; none where a probability is not finite."""
        predicted: _Ints = (np.nan_to_num(self.said, nan=0.0) >= THRESHOLD).astype(np.int64)
        return predicted

    def only(self, chosen: _Chosen) -> SeveralOutcomes:
        """Returns the outcomes of some of the examples."""
        columns = {name: column[chosen] for name, column in self.columns.items()}
        copies = None if self.copies is None else self.copies[chosen]
        return SeveralOutcomes(self.label, self.true[chosen], self.said[chosen], columns, copies)

    def summarize(self, min_slice: int) -> dict[str, Any]:
        """Returns the fields of an evaluation that follow from the outcomes."""
        measured = self.score()
        return {
            "examples": len(self.true),
            "accuracy": None,
            "log_loss": measured.get("log_loss"),
            "non_finite": int((~self.finite).sum()),
            "class_names": self.label.outputs,
            "classes": self._classes(),
            "confusion": (),
            "metrics": measured,
            "intervals": self.intervals(),
            "slices": self._slices(min_slice),
            "together": tuple(map(tuple, (self.true.T @ self.predicted).tolist())),
        }

    def score(self) -> dict[str, float]:
        """Returns the metrics by name; of areas the means over labels that some, not all, examples have."""
        true, predicted = self.true, self.predicted
        macro = metrics.precision_recall_fscore_support(true, predicted, average="macro", zero_division=0.0)
        found = dict(zip(("macro_precision", "macro_recall", "macro_f1"), macro[:3], strict=True))
        found["micro_f1"] = metrics.f1_score(true, predicted, average="micro", zero_division=0.0)
        found["subset_accuracy"] = metrics.accuracy_score(true, predicted)
        found["hamming_loss"] = metrics.hamming_loss(true, predicted)
        sound = self.only(self.finite)
        if len(sound.true):
            found["log_loss"] = sound.losses.mean()
            if means := sound.areas.means:
                found |= {"mean_average_precision": means["pr_auc"], "roc_auc": means["roc_auc"]}
        return {name: float(value) for name, value in found.items()}

    def intervals(self) -> dict[str, Interval]:
        """Returns the 95 % intervals of what is counted, and of "f1[label=cat]" and its like."""
        found = resampling.intervals(self._terms(self.predicted), self._measure)
        found |= resampling.intervals(self.only(self.finite).terms, _measure)
        return {name: interval for name, interval in found.items() if np.isfinite(interval).all()}

    def leads(self, other: SeveralOutcomes) -> dict[str, Lead]:
        """Returns the lead over another model on the same examples in each metric of `intervals`."""
        both = self.finite & other.finite
        ahead = resampling.leads(self.only(both).terms, other.only(both).terms, _measure, _RISING)
        return self._leads(other.predicted) | {
            name: one for name, one in ahead.items() if np.isfinite(one.difference)
        }

    @cached_property
    def losses(self) -> _Floats:
        """The log loss of each example, the mean over the labels; all probabilities have to be finite."""
        smallest = float(np.finfo(np.float32).eps)
        bounded = self.said.astype(np.float64).clip(smallest, 1 - smallest)
        losses: _Floats = -np.where(self.true == 1, np.log(bounded), np.log1p(-bounded)).mean(axis=1)
        return losses

    @cached_property
    def areas(self) -> Areas:
        """Areas under the curves of the labels; all probabilities have to be finite."""
        return measure_areas_of_several(self.true, self.said)

    @cached_property
    def terms(self) -> _Floats:
        """What is summed of each example for log loss and areas, where all probabilities are finite."""
        return resampling.together(np.column_stack([self.losses, self.areas.terms]), self.copies)

    def baseline(self, trained: Tally | None) -> Baseline:
        """Returns all labels, as the answer to every example: no other trivial one has a higher F1."""
        always = np.ones_like(self.true)
        leads = self._leads(always)
        measured = self._measure(self._terms(always).sum(axis=0))
        names = LEADING[MULTILABEL]
        values = {name: float(measured[name]) for name in names}
        return Baseline("all labels", values, {name: leads[name] for name in names if name in leads})

    def _leads(self, predicted: _Ints) -> dict[str, Lead]:
        rising = {name: _RISING.get(name, True) for name in self._names()}
        return resampling.leads(self._terms(self.predicted), self._terms(predicted), self._measure, rising)

    def _names(self) -> list[str]:
        counted = [
            "macro_f1",
            "micro_f1",
            "macro_precision",
            "macro_recall",
            "subset_accuracy",
            "hamming_loss",
        ]
        return counted + [f"{part}[label={one}]" for part in _PARTS for one in self.label.outputs]

    def _terms(self, predicted: _Ints) -> npt.NDArray[np.float32]:
        """Returns of each example what is summed: hits, truths, predictions by label; all right; one."""
        right = (predicted == self.true).all(axis=1)
        parts = (predicted * self.true, self.true, predicted, right[:, None], np.ones((len(self.true), 1)))
        return resampling.together(np.concatenate(parts, axis=1, dtype=np.float32), self.copies)

    def _measure(self, sums: _Floats) -> dict[str, _Floats]:
        count = len(self.label.outputs)
        hit, support, given = (sums[..., place * count : (place + 1) * count] for place in range(3))
        right, examples = sums[..., -2], sums[..., -1]
        precision, recall, f1 = _divide(hit, given), _divide(hit, support), _divide(2 * hit, support + given)
        wrong = (support + given - 2 * hit).sum(axis=-1)
        values = [
            f1.mean(axis=-1),
            _divide(2 * hit.sum(axis=-1), (support + given).sum(axis=-1)),
            precision.mean(axis=-1),
            recall.mean(axis=-1),
            right / examples,
            wrong / (examples * count),
        ]
        values += [column for part in (precision, recall, f1) for column in np.moveaxis(part, -1, 0)]
        return dict(zip(self._names(), values, strict=True))

    def _f1_there(self, sums: _Floats) -> dict[str, _Floats]:
        """Returns macro F1 over the labels that occur; 1 where none does, as nothing is wrong then.

        In a slice without any crack a model that finds none is right, where 0 would make the slice weak.
        """
        count = len(self.label.outputs)
        hit, support, given = (sums[..., place * count : (place + 1) * count] for place in range(3))
        there = (support + given > 0).sum(axis=-1)
        f1 = _divide(2 * hit, support + given).sum(axis=-1)
        return {"macro_f1": np.where(there > 0, f1 / np.maximum(there, 1), 1.0)}

    def _classes(self) -> tuple[ClassScore, ...]:
        precision, recall, f1, support = metrics.precision_recall_fscore_support(
            self.true, self.predicted, average=None, zero_division=0.0
        )
        return tuple(
            ClassScore(name, int(support[i]), float(precision[i]), float(recall[i]), float(f1[i]))
            for i, name in enumerate(self.label.outputs)
        )

    def _slices(self, min_slice: int) -> tuple[Slice, ...]:
        named = [(f"label={name}", self.true[:, i] == 1) for i, name in enumerate(self.label.outputs)]
        found, main = [], "macro_f1"
        for name, chosen in (*named, *slices(self.columns)):
            part, examples = self.only(chosen), int(chosen.sum())
            decided = len(resampling.distinct(part.copies, examples)[0]) >= min_slice
            terms = part._terms(part.predicted)
            value = float(self._f1_there(terms.sum(axis=0, dtype=np.float64))[main]) if examples else 0.0
            interval = resampling.intervals(terms, self._f1_there)[main] if decided else None
            found.append(Slice(name, examples, value, decided, interval))
        return tuple(found)


def _measure(sums: _Floats) -> dict[str, _Floats]:
    """Returns the log loss and the mean areas, NaN where there is none, of `SeveralOutcomes.terms`."""
    loss, roc, precision, examples = np.moveaxis(sums, -1, 0)
    return {
        "log_loss": loss / examples,
        "roc_auc": (roc / examples).clip(0.0, 1.0),
        "mean_average_precision": (precision / examples).clip(0.0, 1.0),
    }


def _divide(over: _Floats, under: _Floats) -> _Floats:
    return np.divide(over, under, out=np.zeros_like(over, dtype=np.float64), where=under > 0)
