"""Regression metrics of labels of kind regression, with intervals and leads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from sklearn import metrics

from shardline.components.validate.metrics import intervals
from shardline.components.validate.metrics.evaluation import MIN_SLICE, Baseline, Interval, Lead, NumberScore
from shardline.components.validate.metrics.intervals import Estimate, Floats, Mask
from shardline.components.validate.metrics.metrics import CHAMPION_LEAD_METRICS, LEADS_BY_KIND
from shardline.components.validate.metrics.outcomes import Outcomes
from shardline.trainer.data.features import REGRESSION, Tally

_ERROR_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
#: Examples of each number that are plotted.
MAX_POINTS = 1000
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
        known = (each for each in measured if each.partition("[")[0] in CHAMPION_LEAD_METRICS)
        return {name: measured[name] for name in known} | ours.lead_by_slice(theirs, min_slice)

    def baseline(self, trained: Tally | None) -> Baseline:
        """Returns the baseline that always predicts the means in training."""
        means = [spread.mean for spread in trained.spreads] if trained else self.true.mean(axis=0).tolist()
        outputs = np.tile(means, (len(self.true), 1))
        always = replace(self, outputs=outputs, columns={})
        leads, names = self.leads(always), LEADS_BY_KIND[REGRESSION]
        measured = {name: value for name, value in always.score().items() if name in names}
        answer = ", ".join(f"{mean:.4g}" for mean in means)
        return Baseline(answer, measured, {name: leads[name] for name in names if name in leads})

    def estimate_main(self, mask: Mask) -> Estimate:
        """Returns the RMSE on the examples of a slice."""
        return self.select(mask).estimates["rmse"]

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
        drawn = np.random.default_rng(_SEED).permutation(len(true))[:MAX_POINTS]
        return NumberScore(
            label.outputs[index],
            unit,
            rmse=float(np.sqrt((error**2).mean())),
            mae=float(np.abs(error).mean()),
            bias=float(error.mean()),
            errors={f"{share:g}": float(np.quantile(error, share)) for share in _ERROR_QUANTILES},
            points=tuple(zip(true[drawn].tolist(), outputs[drawn].tolist(), strict=True)),
        )
