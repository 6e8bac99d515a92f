"""Quantiles: how well those of a number, and the interval between the outermost of them, hold.

The pinball loss is scikit-learn's mean_pinball_loss, a mean over the quantiles. Quantiles are judged as the
model gives them: where a lower one lies above a higher one, they cross, and are counted, not sorted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardline.components.validate.metrics import CROSSINGS, names_of_quantiles

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Quantiles:
    """Quantiles of one number, float64 [n, shares], as a model gives them, and their shares, rising."""

    shares: tuple[float, ...]
    said: _Floats

    @property
    def nominal(self) -> float:
        """The share of the truth that should lie within the outermost quantiles."""
        return self.shares[-1] - self.shares[0]

    @property
    def names(self) -> list[str]:
        """Metrics that follow from sums; one quantile has no interval."""
        return names_of_quantiles(self.shares, counted=False)

    def only(self, chosen: npt.NDArray[np.bool_]) -> Quantiles:
        """Returns those of some of the examples."""
        return Quantiles(self.shares, self.said[chosen])

    def terms(self, true: _Floats) -> _Floats:
        """Returns each example's loss and whether it lies in the interval, [n, 2]; `true` is [n, 1]."""
        error, shares = true - self.said, np.asarray(self.shares)
        losses = np.maximum(shares * error, (shares - 1) * error).mean(axis=1)
        inside = (self.said[:, 0] <= true[:, 0]) & (true[:, 0] <= self.said[:, -1])
        return np.stack([losses, inside], axis=1)

    def measure(self, sums: _Floats, count: _Floats) -> dict[str, _Floats]:
        """Returns the metrics of sums, [..., 2], over `count` examples, [...]."""
        loss, coverage = sums[..., 0] / count, sums[..., 1] / count
        return dict(zip(self.names, (loss, coverage, np.abs(coverage - self.nominal)), strict=False))

    def score(self, true: _Floats) -> dict[str, float]:
        """Returns the metrics by name; of at least one example."""
        measured = self.measure(self.terms(true).sum(axis=0), np.asarray(len(true), np.float64))
        found = {name: float(value) for name, value in measured.items()}
        crossed = (np.diff(self.said, axis=1) < 0).any(axis=1)
        return found | ({CROSSINGS: int(crossed.sum())} if len(self.shares) > 1 else {})

    def calibration(self, true: _Floats) -> tuple[tuple[float, float], ...]:
        """Returns each share, and the share of the truth that is not above its quantile."""
        below = (true <= self.said).mean(axis=0).tolist()
        return tuple(zip(self.shares, below, strict=True))
