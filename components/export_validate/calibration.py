"""Calibration: whether a model is right as often as its probabilities say."""

from __future__ import annotations

import numpy as np

from shardline.components.export_validate.evaluation import Bin
from shardline.components.export_validate.outcomes import Outcomes

_BINS = 15


def calibrate(outcomes: Outcomes) -> tuple[Bin, ...]:
    """Returns the reliability by highest probability, in 15 bins of equal width (Guo et al., 2017).

    scikit-learn's `calibration_curve` is for two classes only. Examples with outputs that are not finite
    are left out, as are empty bins.
    """
    finite = outcomes.only(outcomes.finite)
    if not len(finite.labels):
        return ()
    confidence, right = finite.probabilities.max(axis=1).astype(np.float64), finite.right
    edges = np.linspace(0.0, 1.0, _BINS + 1)
    # Each bin includes its upper edge; a probability rounded to more than 1 belongs to the last.
    places = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, _BINS - 1)
    bins = []
    for place in np.unique(places):
        inside = places == place
        bins.append(
            Bin(
                lower=float(edges[place]),
                upper=float(edges[place + 1]),
                examples=int(inside.sum()),
                confidence=float(confidence[inside].mean()),
                accuracy=float(right[inside].mean()),
            )
        )
    return tuple(bins)


def calibration_error(bins: tuple[Bin, ...]) -> float:
    """Returns the expected calibration error (ECE): mean distance of accuracy and confidence, 0..1."""
    examples = sum(item.examples for item in bins)
    return sum(item.examples * abs(item.accuracy - item.confidence) for item in bins) / examples
