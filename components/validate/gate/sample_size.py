"""Sample size and power: how often a rule `(within D)` finds that a model is worse than the champion.

Of a share of examples, such as accuracy, it is exact. Of n examples, m ~ Binomial(n, differ) are answered
rightly by one of the two models only, and of these the worse model misses c ~ Binomial(m, (differ + loss) /
(2 differ)). McNemar's test (mid-p: Fagerland et al., 2013) and the interval of the difference (Tango, 1998)
decide on m and c, as they do in the gate. Other metrics, and many examples, have the normal distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom

from shardline.components.validate.gate.rules import LEVEL, GateRule
from shardline.components.validate.metrics import COUNTED, SHARES
from shardline.components.validate.metrics.evaluation import Evaluation
from shardline.components.validate.metrics.intervals import mid_p

#: How often a loss has to be found that counts as found, and in words.
POWER, ODDS = 0.9, "9 of 10"

# With more examples that differ, the exact power is the normal one.
_MOST_EXACT = 500
_ASSUMED = "Assumed, as there was no champion to compare with:"
_NORMAL = NormalDist()
_Z = _NORMAL.inv_cdf(0.975)


@dataclass(frozen=True)
class PairedTest:
    """The gate's test of two models on the same examples, in one metric.

    Attributes:
        examples: Number of examples.
        within: Loss that the rule allows; as all losses in the metric's unit, or relative to the champion's.
        differ: Share of the examples that only one of the two models answers rightly, 0..1; None for a metric
            that is no share of examples.
        spread: Standard error of the difference times the square root of `examples`, where `differ` is None.
        design: Number of examples that tell as much as an independent one; more than 1 in groups.
        level: Largest p of a model that is called worse.
        unit: "points", "%", or "" for the metric's own.
        basis: What `differ` or `spread` was taken from, a sentence.
    """

    examples: int
    within: float
    differ: float | None = None
    spread: float = 0.0
    design: float = 1.0
    level: float = LEVEL
    unit: str = "points"
    basis: str = ""

    @classmethod
    def of(cls, measured: Evaluation, rule: GateRule, level: float = LEVEL) -> PairedTest | None:
        """Returns the test of a rule `(within D)`; None where its metric has no lead and no interval.

        Without a champion, the next model is assumed to differ from this one as often as this one from the
        truth: then the difference is as uncertain as this one's own metric.
        """
        name, n = rule.expression, measured.examples
        lead, value, within = measured.leads.get(name), measured.metrics.get(name), rule.within
        ends = lead.interval if lead else measured.intervals.get(name)
        if value is not None and lead:  # a relative loss is a share of the champion's value
            value -= lead.difference
        if not value or ends is None or within is None or not np.isfinite([value, *ends]).all():
            return None
        test = cls(n, within, level=level, unit="%" if rule.relative else "points" * (rule.metric in SHARES))
        differ = lead.differ if lead else 1 - value if rule.metric in COUNTED.values() else None
        if differ is None:
            error = (ends[1] - ends[0]) / (2 * _Z) / (abs(value) if rule.relative else 1)
            basis = f"Computed from the standard error of the difference: {test.text(error)}."
            if not lead:
                basis = f"{_ASSUMED} the difference is as uncertain as {name} alone: {test.text(error)}."
            return replace(test, spread=error * math.sqrt(n), basis=basis)
        share = f"{100 * differ:.1f} %"
        basis = f"{share} of the examples differ: only one of the models answers them rightly."
        if lead:
            effective = (differ - lead.difference**2) / lead.error**2 if lead.error else n
        else:
            # The product of the ends of Wilson's interval gives its number of examples.
            above = value**2 / max(ends[0] * ends[1], 1e-9) - 1
            effective = _Z**2 / above if above > 0 else n
            basis = f"{_ASSUMED} the next model differs in as many answers as this one gets wrong, {share}."
        return replace(test, design=max(1.0, n / max(effective, 1)), differ=differ, basis=basis)

    def power(self, loss: float) -> float:
        """Returns how often a model is called worse that truly loses this much, 0..1."""
        n, differ = max(1, round(self.examples / self.design)), self.spread**2
        if self.differ is not None:
            differ = max(self.differ, loss)
            if n * differ <= _MOST_EXACT:
                return self._exact_power(n, loss, differ)
        null = math.sqrt(max(differ, 1e-99) / n)
        error = null if self.differ is None else math.sqrt(max(differ - loss**2, 1e-99) / n)
        return _NORMAL.cdf((loss - self.within + _NORMAL.inv_cdf(self.level) * null) / error)

    def _exact_power(self, n: int, loss: float, differ: float) -> float:
        discordant = np.arange(binom.ppf(1e-9, n, differ), binom.isf(1e-9, n, differ) + 1)
        fewest = binom.isf(self.level, discordant, 0.5)
        p = np.array([mid_p(*counts, 0.5) for counts in zip(fewest, discordant, strict=True)])
        # Tango's score at a lead of -within: the loss is larger beyond doubt where it is far below 0.
        lead, missed = -self.within, np.arange(discordant[-1] + 1)[:, None]
        b = (2 * n - discordant + 2 * missed) * lead - discordant
        c = missed * lead * (1 - lead)
        share = (np.sqrt(np.maximum(b**2 + 8 * n * c, 0)) - b) / (4 * n)
        error = np.sqrt(np.maximum(n * (2 * share + lead * (1 - lead)), 1e-99))
        allowed = (discordant - 2 * missed - n * lead > _NORMAL.inv_cdf(self.level) * error) & (
            missed <= discordant
        )
        fewest = np.maximum(fewest + (p >= self.level), allowed.sum(axis=0))
        found = binom.sf(fewest - 1, discordant, (differ + loss) / (2 * differ) if differ else 0.5)
        return float(binom.pmf(discordant, n, differ) @ found)

    def smallest_loss(self) -> float | None:
        """Returns the smallest loss that is found in 9 of 10 cases; None where none is."""
        most = 1.0 if self.differ is not None else self.within + 20 * self.spread / math.sqrt(self.examples)
        if not self.power(most) > POWER > self.power(0.0):
            return None
        return float(brentq(lambda loss: self.power(loss) - POWER, 0.0, most, xtol=1e-9, rtol=1e-6))

    def examples_needed(self, loss: float) -> int | None:
        """Returns about how many examples find a loss in 9 of 10 cases; None where no number does."""

        def surplus(exponent: float) -> float:
            return replace(self, examples=int(2**exponent)).power(loss) - POWER

        return round(2 ** brentq(surplus, 0, 40)) if surplus(0) < 0 < surplus(40) else None

    def text(self, loss: float) -> str:
        """Returns a loss with its unit."""
        shown = (100 if self.unit else 1) * loss
        number = f"{shown:,.0f}" if shown >= 10 else f"{shown:.2g}"
        return f"{number} {self.unit[:-1] if number == '1' and self.unit == 'points' else self.unit}".rstrip()

    def __str__(self) -> str:
        """What the test finds in 9 of 10 cases."""
        loss, start = self.smallest_loss(), f"With {self.examples:,} examples"
        if self.design > 1.05:  # not by a few copies, or by chance
            start += f", which tell as much as {self.examples / self.design:,.0f} independent ones,"
        found = "no loss" if loss is None else f"a loss of {self.text(loss)}"
        return f"{start} {found} is found in {ODDS} cases"
