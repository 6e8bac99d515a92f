"""Numbers: how well a label of kind regression is told, with intervals and leads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn import metrics

from shardline.components.validate import resampling
from shardline.components.validate.evaluation import Baseline, Interval, Lead, NumberScore, Slice
from shardline.components.validate.metrics import LEADING, LED_BY_CHAMPION, OF_NUMBERS, SLICED_OF_QUANTILES
from shardline.components.validate.quantiles import Quantiles
from shardline.components.validate.slicing import slices
from shardline.trainer.data.features import REGRESSION, Label, Tally

_Floats = npt.NDArray[np.float64]
_Chosen = npt.NDArray[np.bool_]

_RISING = {metric.name: metric.rising for metric in OF_NUMBERS}
_ERRORS = (0.05, 0.25, 0.5, 0.75, 0.95)
#: Examples of each number that are drawn.
MOST_POINTS = 1000
# Sums of which metrics follow: examples, squared, absolute and relative errors, truth and its square.
_SUMS = 6
# Metrics that are quantiles of the absolute error.
_QUANTILES = {"median_absolute_error": 0.5, "p90_absolute_error": 0.9}


@dataclass(frozen=True)
class NumberOutcomes:
    """Truth and predictions of numbers, float64 [n, outputs] each, and the examples' columns, each [n].

    Of one number a model may give `quantiles`. `copies` are the groups of equal examples, [n], if there are
    any.
    """

    label: Label
    true: _Floats
    said: _Floats
    columns: Mapping[str, npt.NDArray[np.generic]]
    quantiles: Quantiles | None = None
    copies: resampling.Ints | None = None

    @property
    def finite(self) -> _Chosen:
        """Which examples have only finite predictions, [n]."""
        said = [self.said] if self.quantiles is None else [self.said, self.quantiles.said]
        finite: _Chosen = np.logical_and.reduce(np.isfinite(np.concatenate(said, axis=1)), axis=1)
        return finite

    def only(self, chosen: _Chosen) -> NumberOutcomes:
        """Returns the outcomes of some of the examples."""
        columns = {name: column[chosen] for name, column in self.columns.items()}
        quantiles = self.quantiles and self.quantiles.only(chosen)
        copies = None if self.copies is None else self.copies[chosen]
        return NumberOutcomes(self.label, self.true[chosen], self.said[chosen], columns, quantiles, copies)

    def summarize(self, min_slice: int) -> dict[str, Any]:
        """Returns the fields of an evaluation that follow from the outcomes.

        Examples whose prediction is not finite have no error, and are left out of all but their number.
        """
        sound = self.only(self.finite)
        return {
            "examples": len(self.true),
            "accuracy": None,
            "log_loss": None,
            "non_finite": int((~self.finite).sum()),
            "class_names": (),
            "classes": (),
            "confusion": (),
            "metrics": sound.score(),
            "intervals": sound.intervals(),
            "slices": sound._slices(min_slice),
            "numbers": tuple(sound._number(place) for place in range(len(self.label.outputs))),
        }

    def score(self) -> dict[str, float]:
        """Returns the metrics by name, means over the numbers; none of no example."""
        if not len(self.true):
            return {}
        absolute = np.abs(self.said - self.true)
        found = {
            "rmse": metrics.root_mean_squared_error(self.true, self.said),
            "mae": metrics.mean_absolute_error(self.true, self.said),
            "median_absolute_error": metrics.median_absolute_error(self.true, self.said),
            "p90_absolute_error": np.quantile(absolute, 0.9, axis=0).mean(),
        }
        if (self.true != 0).all():  # of a truth of 0 there is no share
            found["mape"] = metrics.mean_absolute_percentage_error(self.true, self.said)
        if len(self.true) > 1 and (np.ptp(self.true, axis=0) > 0).all():
            found["r2"] = metrics.r2_score(self.true, self.said)
        if self.quantiles:
            found |= self.quantiles.score(self.true)
        return {name: float(value) for name, value in found.items()}

    def intervals(self) -> dict[str, Interval]:
        """Returns the 95 % intervals of the metrics, and of each of several numbers."""
        if not len(self.true):
            return {}
        found = resampling.intervals(self._terms(self.said), self._measure)
        errors = np.abs(self.said - self.true)
        drawn = resampling.quantiles(errors, [*_QUANTILES.values()], self.copies).mean(axis=-1)
        found |= zip(_QUANTILES, resampling.spans(drawn), strict=True)
        return {name: interval for name, interval in found.items() if np.isfinite(interval).all()}

    def leads(self, other: NumberOutcomes) -> dict[str, Lead]:
        """Returns the lead over another model on the same examples, where the answers of both are finite."""
        both = self.finite & other.finite
        ours, theirs = self.only(both), other.only(both)
        if not self.compares_quantiles(other):
            ours, theirs = replace(ours, quantiles=None), replace(theirs, quantiles=None)
        rising = {name: _RISING[name.partition("[")[0]] for name in ours._names()}
        found = resampling.leads(ours._terms(ours.said), theirs._terms(theirs.said), ours._measure, rising)
        if len(ours.true):
            found |= ours._quantile_leads(theirs)
        known = {name for name in found if name not in SLICED_OF_QUANTILES or name in LED_BY_CHAMPION}
        return {name: lead for name, lead in found.items() if name in known and np.isfinite(lead.difference)}

    def compares_quantiles(self, other: NumberOutcomes) -> bool:
        """Whether both models give the same quantiles, so that the losses of these can be compared."""
        shares = [one.quantiles.shares if one.quantiles else () for one in (self, other)]
        return shares[0] == shares[1]

    def baseline(self, trained: Tally | None) -> Baseline:
        """Returns the means in training, as the answer to every example."""
        means = [spread.mean for spread in trained.spreads] if trained else self.true.mean(axis=0).tolist()
        said = np.tile(means, (len(self.true), 1))
        always = NumberOutcomes(self.label, self.true, said, {}, copies=self.copies)
        leads, names = self.leads(always), LEADING[REGRESSION]
        metrics = {name: value for name, value in always.score().items() if name in names}
        answer = ", ".join(f"{mean:.4g}" for mean in means)
        return Baseline(answer, metrics, {name: leads[name] for name in names if name in leads})

    def _quantile_leads(self, other: NumberOutcomes) -> Iterator[tuple[str, Lead]]:
        """Yields the leads in quantiles of the absolute error, over another model on the same examples."""
        both = np.abs(np.concatenate([self.said - self.true, other.said - other.true], axis=1))
        found = resampling.quantiles(both, [*_QUANTILES.values()], self.copies)
        ours, theirs = np.split(found, 2, axis=-1)
        drawn, here, there = (ours - theirs).mean(axis=-1), self.score(), other.score()
        for place, name in enumerate(_QUANTILES):
            yield name, resampling.lead(here[name] - there[name], drawn[:, place], rising=False)

    def _names(self) -> list[str]:
        names = ["rmse", "mae", "mape", "r2"]
        if len(self.label.outputs) > 1:
            names += [f"{metric}[number={one}]" for metric in ("rmse", "mae") for one in self.label.outputs]
        return names + (self.quantiles.names if self.quantiles else [])

    def _terms(self, said: _Floats) -> _Floats:
        error = said - self.true
        relative = np.full_like(error, np.nan)  # of a truth of 0 there is no share
        if (self.true != 0).all():
            relative = np.abs(error / self.true)
        parts = (np.ones_like(error), error**2, np.abs(error), relative, self.true, self.true**2)
        of_quantiles = [self.quantiles.terms(self.true)] if self.quantiles else []
        return resampling.together(np.concatenate([*parts, *of_quantiles], axis=1), self.copies)

    def _measure(self, sums: _Floats) -> dict[str, _Floats]:
        width = _SUMS * len(self.label.outputs)
        count, squares, absolutes, relatives, truths, of_truths = np.split(sums[..., :width], _SUMS, axis=-1)
        rmse, mae = np.sqrt(squares / count), absolutes / count
        around = of_truths - truths**2 / count
        with np.errstate(divide="ignore", invalid="ignore"):
            r2 = 1 - squares / around
        values = [one.mean(axis=-1) for one in (rmse, mae, relatives / count, r2)]
        if len(self.label.outputs) > 1:
            values += [*np.moveaxis(rmse, -1, 0), *np.moveaxis(mae, -1, 0)]
        if self.quantiles:
            values += self.quantiles.measure(sums[..., width:], count[..., 0]).values()
        return dict(zip(self._names(), values, strict=True))

    def _slices(self, min_slice: int) -> tuple[Slice, ...]:
        found = []
        for name, chosen in slices(self.columns):
            part = self.only(chosen)
            decided = len(resampling.distinct(part.copies, len(part.true))[0]) >= min_slice
            drawn = resampling.intervals(part._terms(part.said), self._measure) if decided else {}
            score, more = part.score(), self.quantiles.names if self.quantiles else []
            found.append(
                Slice(
                    name,
                    int(chosen.sum()),
                    score.get("rmse", 0.0),
                    decided,
                    drawn.get("rmse"),
                    {one: score[one] for one in more if one in score},
                    {one: drawn[one] for one in more if one in drawn},
                )
            )
        return tuple(found)

    def _number(self, place: int) -> NumberScore:
        units, true, said = self.label.units, self.true[:, place], self.said[:, place]
        unit, error = units[place] if units else "", said - true
        if not len(error):
            return NumberScore(self.label.outputs[place], unit, 0.0, 0.0, 0.0)
        drawn = np.random.default_rng(resampling.SEED).permutation(len(true))[:MOST_POINTS]
        quantiles = np.quantile(error, _ERRORS).tolist()
        return NumberScore(
            self.label.outputs[place],
            unit,
            float(np.sqrt((error**2).mean())),
            float(np.abs(error).mean()),
            float(error.mean()),
            {f"{share:g}": value for share, value in zip(_ERRORS, quantiles, strict=True)},
            tuple(zip(true[drawn].tolist(), said[drawn].tolist(), strict=True)),
            self.quantiles.calibration(self.true) if self.quantiles else (),
        )
