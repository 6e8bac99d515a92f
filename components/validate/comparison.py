"""Comparison of a challenger with the champion, both measured on the same examples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shardline.components.validate.evaluate import Measured, Outcomes
from shardline.components.validate.evaluation import Evaluation, Lead
from shardline.components.validate.metrics import LOSS
from shardline.components.validate.numbers import NumberOutcomes


def compare(
    challenger: Measured, champion: Measured, trained_on: npt.NDArray[np.bool_] | None = None
) -> Evaluation:
    """Returns the challenger's evaluation with that of the champion on the same examples.

    `trained_on` says which of them the champion was trained on: these are left out, for both.
    """
    whole = challenger.evaluation
    if trained_on is not None and trained_on.any():
        challenger, champion = challenger.only(~trained_on), champion.only(~trained_on)
        whole = replace(whole, left_out=int(trained_on.sum()), compared=challenger.evaluation)
    champion = replace(champion, evaluation=_comparable(challenger, champion))
    metrics_of_theirs = dict(champion.evaluation.metrics)
    # The process has had both models in memory by then.
    del metrics_of_theirs["peak_memory_mb"]
    leads: dict[str, Lead] = {}
    for name, ours in challenger.outcomes.items():
        prefix, theirs = f"{name}." if whole.parts else "", champion.outcomes[name]
        leads |= {f"{prefix}{one}": lead for one, lead in _leads(ours, theirs).items()}
    return replace(
        whole,
        champion=replace(champion.evaluation, mistakes=(), metrics=metrics_of_theirs),
        leads=leads,
    )


def _comparable(challenger: Measured, champion: Measured) -> Evaluation:
    """Returns the champion's evaluation without the losses of other quantiles than the challenger's."""
    found = champion.evaluation
    for name, ours in challenger.outcomes.items():
        theirs = champion.outcomes[name]
        if not isinstance(ours, NumberOutcomes) or not isinstance(theirs, NumberOutcomes):
            continue
        if not ours.compares_quantiles(theirs):
            loss = f"{name}.{LOSS}" if found.parts else LOSS
            found = replace(found, metrics={key: one for key, one in found.metrics.items() if key != loss})
            parts = tuple(_without_loss(part) if part.label == name else part for part in found.parts)
            found = replace(found, parts=parts) if parts else _without_loss(found)
    return found


def _without_loss(part: Evaluation) -> Evaluation:
    slices = tuple(
        replace(one, metrics={key: value for key, value in one.metrics.items() if key != LOSS})
        for one in part.slices
    )
    metrics = {key: value for key, value in part.metrics.items() if key != LOSS}
    return replace(part, metrics=metrics, slices=slices)


def _leads(ours: Outcomes, theirs: Any) -> dict[str, Lead]:
    """Returns the lead over another model's outcomes, which are of the same label."""
    return ours.leads(theirs)
