"""Power of the gate: how often its rule `(within D)` finds that a model is truly worse than the champion.

Of a share of examples, such as accuracy, it is exact. Of n examples, m ~ Binomial(n, differ) are answered
rightly by one of the two models only, and of these the worse model misses c ~ Binomial(m, (differ + loss) /
(2 differ)). McNemar's test (mid-p: Fagerland et al., 2013) and the interval of the difference (Tango, 1998)
decide on m and c, as they do in the gate. Other metrics, and many examples, have the normal distribution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

from shardline.components.model_store import EVALUATION_FILE, catalog, champions
from shardline.components.validate.gate.rules import GateRule
from shardline.components.validate.metrics.evaluation import Evaluation, Interval, Lead
from shardline.components.validate.metrics.metrics import SHARES

#: How often a loss has to be found that counts as found: 9 of 10 cases.
POWER = 0.9
LEVEL, FAMILY = 0.025, 0.05

#: Metrics that are shares of examples; each example is right or wrong.
COUNTED = ("accuracy", "subset_accuracy")
# With more examples that only one of two models answers rightly, the exact power is the normal one.
_MOST_EXACT = 500
_MOST_EXAMPLES = 10**12
# Copies and chance make as much of a difference to the number of independent examples.
_LITTLE = 1.05
_NORMAL = NormalDist()
_Z = _NORMAL.inv_cdf(0.975)


@dataclass(frozen=True)
class Measured:
    """The fields of an `Evaluation` that its power follows from, as evaluation.json has them."""

    examples: int
    metrics: Mapping[str, float | None]
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    leads: Mapping[str, Lead] = field(default_factory=dict)
    compared: Measured | None = None

    @classmethod
    def of_champion(cls, uri: str) -> tuple[Measured, str]:
        """Returns what the champion in a store was measured to be, next to its predecessor, and its version.

        Raises SettingsError, ModelError or PlatformError where there is none, or it cannot be read.
        """
        catalog.require_store(uri)
        version = champions.require_current(uri)
        whole = champions.read_record(uri, version, EVALUATION_FILE, cls)
        return replace(whole.compared or whole, leads=whole.leads), version.version


@dataclass(frozen=True)
class PairedTest:
    """The gate's test of two models on the same examples, in one metric.

    Losses are in the metric's unit, or shares of its value where the rule is relative.

    Attributes:
        examples: Number of examples.
        within: Loss that the rule allows.
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
    def of(
        cls, measured: Measured | Evaluation, rule: GateRule, *, level: float = LEVEL
    ) -> PairedTest | None:
        """Returns the test of a rule `(within D)`; None where its metric has no lead and no interval.

        Without a champion, the next model is assumed to differ from this one as often as this one from the
        truth: then the difference is as uncertain as this one's own metric.
        """
        name, n = rule.expression, measured.examples
        lead, value, within = measured.leads.get(name), measured.metrics.get(name), rule.within
        ends = lead.interval if lead else measured.intervals.get(name)
        if value is None or ends is None or within is None or (rule.relative and not value):
            return None
        if not np.isfinite([value, *ends]).all():
            return None
        scale = 1 / abs(value) if rule.relative else 1.0
        unit = "%" if rule.relative else "points" if rule.metric in SHARES else ""
        test = cls(n, within, level=level, unit=unit)
        if lead and lead.differ is not None:
            differ = lead.differ
            effective = (differ - lead.difference**2) / lead.error**2 if lead.error else n
            basis = f"{_percent(differ)} of the examples are answered rightly by one of the two models only."
        elif rule.metric in COUNTED and not rule.slice:
            # The product of the ends of Wilson's interval gives its number of examples.
            differ, product = 1 - value, ends[0] * ends[1]
            effective = _Z**2 / (value**2 / product - 1) if 0 < product < value**2 else n
            basis = (
                "Assumed, as there was no champion to compare with: the next model answers as many examples "
                f"differently as this one gets wrong, {_percent(differ)}."
            )
        else:
            error = scale * (ends[1] - ends[0]) / (2 * _Z)
            of = (
                "the difference"
                if lead
                else f"{rule.expression} alone, as there was no champion to compare with"
            )
            basis = f"Computed from the standard error of {of}: {test.text(error)}."
            return replace(test, spread=error * math.sqrt(n), basis=basis)
        return replace(test, design=max(1.0, n / max(effective, 1)), differ=differ, basis=basis)

    @property
    def _independent(self) -> int:
        return max(1, round(self.examples / self.design))

    def power(self, loss: float) -> float:
        """Returns how often a model is called worse that truly loses this much, 0..1."""
        n, differ = self._independent, self.spread**2
        if self.differ is not None:
            differ = max(self.differ, loss)
            if n * differ <= _MOST_EXACT:
                return self._exact_power(loss, differ)
        null, error = (math.sqrt(max(variance, 1e-300) / n) for variance in (differ, differ - loss**2))
        error = null if self.differ is None else error
        least = max(-_NORMAL.inv_cdf(self.level) * null, self.within - _Z * null)
        return _NORMAL.cdf((loss - least) / error)

    def _exact_power(self, loss: float, differ: float) -> float:
        n = self._independent
        fewest, most = binom.ppf(1e-9, n, differ), binom.isf(1e-9, n, differ)
        discordant = np.arange(fewest, most + 1)
        worse = (differ + loss) / (2 * differ) if differ else 0.5
        found = binom.sf(self._fewest_worse(discordant) - 1, discordant, worse)
        return float(binom.pmf(discordant, n, differ) @ found)

    def _fewest_worse(self, discordant: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns how many of the discordant examples a model misses, at least, that is called worse."""
        fewest = binom.isf(self.level, discordant, 0.5)
        mid_p = binom.sf(fewest, discordant, 0.5) + binom.pmf(fewest, discordant, 0.5) / 2
        n, tolerance, missed = self._independent, -self.within, np.arange(discordant[-1] + 1)[:, None]
        # Tango's statistic of a lead of `tolerance`: above 1.96, the loss is within it beyond doubt.
        lead = discordant - 2 * missed
        b, c = (2 * n + lead) * tolerance - discordant, missed * tolerance * (1 - tolerance)
        share = (np.sqrt(np.maximum(b**2 + 8 * n * c, 0)) - b) / (4 * n)
        variance = np.maximum(n * (2 * share + tolerance * (1 - tolerance)), 1e-300)
        sure = lead - n * tolerance >= _Z * np.sqrt(variance)
        allowed = (sure & (missed <= discordant)).sum(axis=0)
        least: npt.NDArray[np.float64] = np.maximum(fewest + (mid_p >= self.level), allowed)
        return least

    def smallest_loss(self, power: float = POWER) -> float | None:
        """Returns the smallest loss that is found as often as `power`; None where none is."""
        lower, upper = 0.0, 1.0
        while self.differ is None and self.power(upper) < power:
            upper *= 2
        if self.power(upper) < power:
            return None
        while upper - lower > 1e-4 * upper:
            middle = (lower + upper) / 2
            lower, upper = (lower, middle) if self.power(middle) >= power else (middle, upper)
        return upper

    def examples_needed(self, loss: float, power: float = POWER) -> int | None:
        """Returns about how many examples find a loss as often as `power`; None where no number does."""
        lower, upper = 1, 2
        while replace(self, examples=upper).power(loss) < power:
            lower, upper = upper, 2 * upper
            if upper > _MOST_EXAMPLES or loss < self.within:
                return None
        while upper - lower > 1:
            middle = (lower + upper) // 2
            enough = replace(self, examples=middle).power(loss) >= power
            lower, upper = (lower, middle) if enough else (middle, upper)
        return upper

    def text(self, loss: float) -> str:
        """Returns a loss with its unit."""
        if not self.unit:
            return f"{loss:.3g}"
        number = f"{100 * loss:.1f}".removesuffix(".0") if loss >= 0.01 else f"{100 * loss:.2g}"
        return f"{number} {'point' if number == '1' and self.unit == 'points' else self.unit}"

    def describe(self, power: float = POWER, loss: float | None = None) -> str:
        """Returns how often a loss is found, by default the smallest with this power, in words."""
        loss, start = loss or self.smallest_loss(power), f"With {self.examples:,} examples"
        if self.design > _LITTLE:
            start += f", which tell as much as {self._independent:,} independent ones,"
        if loss is None:
            return f"{start} no loss is found in {odds(power)} cases"
        found = f"{start} a loss of {self.text(loss)} is found in {odds(power)} cases"
        if not self.within or self.text(loss) == self.text(self.within):
            return found
        return f"{found}, one of {self.text(self.within)} in {odds(self.power(self.within))}"


def odds(share: float) -> str:
    """Returns a share of cases as text: "3 of 10"."""
    many = 10 if share >= 0.095 and abs(share - round(share, 1)) < 0.005 else 100
    if 0.005 <= share < 0.995:
        return f"{many * share:.0f} of {many}"
    return f"{'fewer than 1' if share < 0.5 else 'more than 99'} of 100"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
