"""Several labels: how well a label of kind multilabel is told, with intervals and leads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn import metrics

from shardline.components.validate import resampling
from shardline.components.validate.answers import THRESHOLD
from shardline.components.validate.areas import Areas, measure_areas
from shardline.components.validate.evaluation import Baseline, Interval, Lead
from shardline.components.validate.metrics import LEADING, OF_SEVERAL
from shardline.components.validate.resampling import Chosen, Floats, Ints, Outcomes, divide
from shardline.trainer.data.features import MULTILABEL, Tally

# What is counted, in the order of `_measure_counts`, and of each label.
_COUNTED = ("macro_f1", "micro_f1", "macro_precision", "macro_recall", "subset_accuracy", "hamming_loss")
_PARTS = ("precision", "recall", "f1")

_RISING = {metric.name: metric.rising for metric in OF_SEVERAL} | dict.fromkeys(_PARTS, True)


@dataclass(frozen=True)
class SeveralOutcomes(Outcomes):
    """Truth, 0 or 1, int64, and probabilities, float32, [n, outputs] each."""

    @cached_property
    def predicted(self) -> Ints:
        """Which labels the model gives, 0 or 1, [n, outputs]; none where a probability is not finite."""
        predicted: Ints = (np.nan_to_num(self.said, nan=0.0) >= THRESHOLD).astype(np.int64)
        return predicted

    def summarize(self, min_slice: int) -> dict[str, Any]:
        """Returns the fields of an evaluation that follow from the outcomes."""
        names, measured = self.label.outputs, self.score()
        of_labels = ((f"label={name}", self.true[:, i] == 1) for i, name in enumerate(names))
        return {
            "examples": len(self.true),
            "log_loss": measured.get("log_loss"),
            "non_finite": int((~self.finite).sum()),
            "class_names": names,
            "classes": resampling.score_classes(names, self.true, self.predicted),
            "metrics": measured,
            "intervals": self.intervals(),
            "slices": self.slices(min_slice, of_labels),
            "together": tuple(map(tuple, (self.true.T @ self.predicted).tolist())),
        }

    def score(self) -> dict[str, float]:
        """Returns the metrics by name; of areas the means over labels that some, not all, examples have."""
        true, predicted = self.true, self.predicted
        found = resampling.macro_averages(true, predicted)
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
        found = resampling.finite_intervals(self._terms(self.predicted), self._measure_counts)
        return found | resampling.finite_intervals(self.only(self.finite).terms, _measure)

    def leads(self, other: SeveralOutcomes) -> dict[str, Lead]:
        """Returns the lead over another model on the same examples in each metric of `intervals`."""
        both = self.finite & other.finite
        ahead = resampling.leads(self.only(both).terms, other.only(both).terms, _measure, _RISING)
        found = {name: one for name, one in ahead.items() if np.isfinite(one.difference)}
        return self._leads(other.predicted) | found

    @cached_property
    def losses(self) -> Floats:
        """The log loss of each example, the mean over the labels; all probabilities have to be finite."""
        smallest = float(np.finfo(np.float32).eps)
        bounded = self.said.astype(np.float64).clip(smallest, 1 - smallest)
        losses: Floats = -np.where(self.true == 1, np.log(bounded), np.log1p(-bounded)).mean(axis=1)
        return losses

    @cached_property
    def areas(self) -> Areas:
        """Areas under the curves of the labels; all probabilities have to be finite."""
        return measure_areas(self.true, self.said)

    @cached_property
    def terms(self) -> Floats:
        """What is summed of each example for log loss and areas, where all probabilities are finite."""
        return resampling.together(np.column_stack([self.losses, self.areas.terms]), self.copies)

    def baseline(self, trained: Tally | None) -> Baseline:
        """Returns all labels, as the answer to every example: no other trivial one has a higher F1."""
        always = np.ones_like(self.true)
        leads, measured = self._leads(always), self._measure_counts(self._terms(always).sum(axis=0))
        names = LEADING[MULTILABEL]
        values = {name: float(measured[name]) for name in names}
        return Baseline("all labels", values, {name: leads[name] for name in names if name in leads})

    def judge_slice(self, chosen: Chosen, *, decided: bool) -> dict[str, Any]:
        """Returns macro F1, over the labels that occur, on some of the examples."""
        part = self.only(chosen)
        terms = part._terms(part.predicted)
        value = self._f1_there(terms.sum(axis=0, dtype=np.float64)) if len(terms) else 0.0
        drawn = resampling.intervals(terms, lambda sums: {"": self._f1_there(sums)}) if decided else {}
        return {"value": float(value), "interval": drawn.get("")}

    def _leads(self, predicted: Ints) -> dict[str, Lead]:
        ours, theirs = self._terms(self.predicted), self._terms(predicted)
        return resampling.leads(ours, theirs, self._measure_counts, _RISING)

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


def _measure(sums: Floats) -> dict[str, Floats]:
    """Returns the log loss and the mean areas, NaN where there is none, of `SeveralOutcomes.terms`."""
    loss, roc, precision, examples = np.moveaxis(sums, -1, 0)
    return {
        "log_loss": loss / examples,
        "roc_auc": (roc / examples).clip(0.0, 1.0),
        "mean_average_precision": (precision / examples).clip(0.0, 1.0),
    }
