"""Slow slide: a new model's lead over the best of some former champions, on the same examples.

Each of many small losses may be within what a comparison with the present champion allows; their sum is seen
in a comparison with the best of former ones. These are spaced: a few hundred examples do not show what a loss
of 0.3 points a week adds up to over 8 weeks, but over 32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardline.components.model_store.champions import Version
from shardline.components.validate.gate.rules import GateRule
from shardline.components.validate.metrics.evaluation import PastLead
from shardline.components.validate.metrics.metrics import LOWER_IS_BETTER
from shardline.components.validate.metrics.outcomes import Outcomes

if TYPE_CHECKING:
    from shardline.components.validate.evaluate import Assessment

#: Predictions of a former champion by label, and the mask of the examples that it was trained on, if known.
Former = tuple[Mapping[str, Outcomes], npt.NDArray[np.bool_] | None]


def compare_with_past(
    challenger: Assessment,
    last: Sequence[Version],
    slides: Iterable[GateRule],
    predict: Callable[[Version], Former | str],
) -> dict[str, PastLead]:
    """Returns the lead over the best of the `last` champions, newest first, for each rule, by expression.

    `predict` returns the predictions of a former champion, or why there are none; it is called once for each.
    """
    predict = cache(predict)
    return {slide.expression: _compare_with_best(challenger, last, slide, predict) for slide in slides}


def _compare_with_best(
    challenger: Assessment,
    last: Sequence[Version],
    slide: GateRule,
    predict: Callable[[Version], Former | str],
) -> PastLead:
    """Returns the lead over the best of so many champions, the first of which is the present one.

    They are those 1, 2, 4, 8 ... before it, and no further back than the oldest. The best is that with the
    best recorded metric, which is measured again unless it is the present one. One that cannot be measured is
    left out.
    """
    places = {0, *(min(2**power, len(last) - 1) for power in range(slide.last - 1))}
    last, name, notes = [last[place] for place in sorted(places)], slide.expression, list[str]()
    values = {each: value for each in last if (value := each.metrics.get(name)) is not None}
    if unknown := len(last) - len(values):
        notes.append(f"{unknown:,} of {len(last)} champions have no recorded {name}")
    compared = len(values)
    # Of equal ones, the newest.
    for version in sorted(values, key=values.__getitem__, reverse=slide.metric not in LOWER_IS_BETTER):
        if version is last[0]:
            best = f"the champion is the best of {compared}"
            notes.insert(0, best if compared > 1 else "there is no other champion to compare with")
            break
        former = predict(version)
        found = former if isinstance(former, str) else _lead_over(former, challenger, slide)
        if isinstance(found, PastLead):
            note = "; ".join(filter(None, [*notes, found.note]))
            return replace(found, version=version.version, compared=compared, note=note)
        notes.append(f"{version.version} is left out: {found}")
        compared -= 1
    return PastLead(compared=compared, note="; ".join(notes))


def _lead_over(former: Former, ours: Assessment, slide: GateRule) -> PastLead | str:
    """Returns the metric of a former champion and the lead over it, or why they are not known."""
    outcomes, seen = former
    theirs, note = outcomes[slide.label or next(iter(outcomes))], ""
    if seen is None:
        note = "it is not known which examples it was trained on"
    elif seen.any():
        ours, theirs = ours.select(~seen), theirs.select(~seen)
        note = f"on {(~seen).sum():,} of the {len(seen):,} examples: it was trained on the others"
    lead = ours.outcomes[theirs.label.name].leads(theirs).get(slide.metric)
    value = ours.evaluation.metrics.get(slide.expression)
    if lead is None or value is None:
        return f"no {slide.expression} of both on the same examples"
    return PastLead(value=value - lead.difference, lead=lead, note=note)
