"""Metrics of labels of each kind, class, multilabel and regression, with intervals and leads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from sklearn import metrics

from shardline.components.text import enumerate_names
from shardline.components.validate.metrics import intervals
from shardline.components.validate.metrics.evaluation import (
    MIN_SLICE,
    Baseline,
    Bin,
    Curve,
    Interval,
    Lead,
    NumberScore,
)
from shardline.components.validate.metrics.intervals import Estimate, Floats, Mask
from shardline.components.validate.metrics.metrics import LEAD_METRICS, LEADS_BY_KIND
from shardline.components.validate.metrics.outcomes import Outcomes, Probabilities, divide
from shardline.trainer.data.features import REGRESSION, Tally

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
    def calibration(self) -> tuple[Bin, ...]:
        """Calibration by highest probability, in 15 bins of equal width (Guo et al., 2017)."""
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

    @cached_property
    def finite(self) -> Mask:
        """Which examples have only finite predictions, [n]."""
        finite: Mask = np.isfinite(self.outputs).all(axis=1)
        return finite

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
        measured = intervals.find_leads(ours.estimates, theirs.estimates)
        known = (each for each in measured if each.partition("[")[0] in LEAD_METRICS)
        return {name: measured[name] for name in known} | ours.lead_by_slice(theirs, min_slice)

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
        squares = (self.outputs[mask] - self.true[mask]) ** 2
        terms, groups = np.column_stack([squares, np.ones(len(squares))]), self._clusters_of(mask)

        def rmse(sums: Floats) -> dict[str, Floats]:
            return {"": np.sqrt(sums[..., :-1] / sums[..., -1:]).mean(axis=-1)}

        with np.errstate(divide="ignore", invalid="ignore"):
            return intervals.jackknife(terms, rmse, groups)[""]

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

    def _score_number(self, index: int) -> NumberScore:
        label, true, outputs = self.label, self.true[:, index], self.outputs[:, index]
        unit, error = label.units[index] if label.units else "", outputs - true
        if not len(error):
            return NumberScore(label.outputs[index], unit, 0.0, 0.0, 0.0)
        most = MAX_POINTS if index < MAX_PLOTTED else 0
        drawn = np.random.default_rng(_SEED).permutation(len(true))[:most]
        return NumberScore(
            label.outputs[index],
            unit,
            rmse=float(np.sqrt((error**2).mean())),
            mae=float(np.abs(error).mean()),
            bias=float(error.mean()),
            errors={f"{share:g}": float(np.quantile(error, share)) for share in _ERROR_QUANTILES},
            points=tuple(zip(true[drawn].tolist(), outputs[drawn].tolist(), strict=True)),
        )
