"""95 % intervals and one-sided p values of metrics, and of the leads between two models.

A share of examples has Wilson's interval (1927); the difference of two models' shares of the same examples
has Tango's (1998), and the p value of McNemar's test in its mid-p form (Fagerland et al., 2013). Both have a
width where all answers are right, and where two models give the same ones.

Any other metric has an influence value per example, by the jackknife (Efron, 1982), and a standard error from
these. One metric has Hall's interval (1992), Student's t corrected for the skewness of the influence values;
a lead has Student's t of the differences, because that of two equal models is not skewed.

Examples of one group (copies, a patient's, neighbours in time) are not independent: their influence values
are added up, and shares count the effective number of examples (Kish, 1965; Korn and Graubard, 1998).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from shardline.components.validate import metrics
from shardline.components.validate.metrics.evaluation import Interval, Lead
from shardline.trainer.manifest import CLASS, MULTILABEL

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

#: Sums over examples, [..., sums] -> metrics by name, [...] each.
Measure = Callable[[Floats], Mapping[str, Floats]]

_SIDE = 0.975
_Z = NormalDist().inv_cdf(_SIDE)

# Metrics that count right and wrong answers, and all within 0..1.
_COUNTED = {*metrics.LEADS_BY_KIND[CLASS], *metrics.LEADS_BY_KIND[MULTILABEL], *metrics.PARTS[CLASS][1]}
_BOUNDED = {*metrics.SHARES, *_COUNTED}
# More blocks of neighbours in time hardly make an interval narrower.
_MAX_BLOCKS = 30
# Classes whose scores are copied at a time.
_CLASSES_AT_ONCE = 50
# A standard error below this share of the values is rounding.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Estimate:
    """A metric's value, and the influence of each example on it, [n]; their mean is about 0.

    Attributes:
        groups: Groups of the examples that are not independent, [n]; None where all are.
        right: Which examples are right, [n], of a share of examples; None of any other metric.
    """

    value: float
    influence: Floats
    groups: Ints | None = None
    right: Mask | None = None


def estimate_share(right: Mask, groups: Ints | None) -> Estimate:
    """Returns the share of examples that are right; NaN of no examples."""
    value = float(right.mean()) if len(right) else math.nan
    return Estimate(value, np.subtract(right, value, dtype=np.float64), groups, right)


def jackknife(terms: npt.NDArray[Any], measure: Measure, groups: Ints | None = None) -> dict[str, Estimate]:
    """Returns the metrics that follow from sums of the terms of examples, [n, sums]."""
    total = terms.sum(axis=0, dtype=np.float64)
    return from_left_out(measure(total), measure(total - terms), groups)


def from_left_out(
    values: Mapping[str, Floats], left_out: Mapping[str, Floats], groups: Ints | None
) -> dict[str, Estimate]:
    """Returns metrics from their values on all examples, and on all but each one, [examples]."""
    return {
        name: Estimate(float(value), (len(left_out[name]) - 1) * (value - left_out[name]), groups)
        for name, value in values.items()
    }


def find_intervals(estimates: Mapping[str, Estimate]) -> dict[str, Interval]:
    """Returns the interval of each metric that varies: a model without mistakes has none of its F1."""
    found = ((name, find_interval(name, estimate)) for name, estimate in estimates.items())
    return {name: interval for name, interval in found if interval}


def find_leads(ours: Mapping[str, Estimate], theirs: Mapping[str, Estimate]) -> dict[str, Lead]:
    """Returns the lead in each metric that both models have, over another on the same examples."""
    found = {name: find_lead(name, ours[name], theirs[name]) for name in ours if name in theirs}
    return {name: each for name, each in found.items() if each}


def find_interval(name: str, estimate: Estimate) -> Interval | None:
    """Returns Wilson's interval of a share, else Hall's, within the metric's possible values.

    It is None of no examples, and where a metric that is no share does not vary.
    """
    if estimate.right is not None:
        return share_interval(estimate.right, estimate.groups)
    error, skewness, freedom = _moments(estimate.influence, estimate.groups)
    if not _ROUNDING * abs(estimate.value) < error < math.inf:
        return None
    t = float(special.stdtrit(freedom, _SIDE))
    lower, upper = (estimate.value - error * _unskewed(end, skewness) for end in (t, -t))
    metric = name.partition("[")[0]
    lower = lower if metric == "r2" else max(lower, 0.0)
    return lower, min(upper, 1.0) if metric == "r2" or metric in _BOUNDED else upper


def find_lead(name: str, ours: Estimate, theirs: Estimate) -> Lead | None:
    """Returns the lead in a share, or in another metric by Student's t; None of one group, or not finite.

    Where no example tells two models apart, this is no proof that none would. Of the others, as large a share
    may differ as Wilson's interval of 0 leaves open, each by the range of the metric, or by the largest
    influence in one that has no range; p is then that of a sign test, 0.5 where the values are equal. No
    interval of a metric that counts right and wrong answers is narrower than that, as Tango's is not.
    """
    if ours.right is not None and theirs.right is not None:
        return paired_share(ours.right, theirs.right, ours.groups)
    difference, scale = ours.value - theirs.value, max(abs(ours.value), abs(theirs.value))
    moved, metric = ours.influence - theirs.influence, name.partition("[")[0]
    error, _, freedom = _moments(moved, ours.groups)
    if not math.isfinite(difference) or not math.isfinite(error):
        return None
    ahead = -difference if metric in metrics.LOWER_IS_BETTER else difference
    left_open = _Z**2 / (effective_size(moved, ours.groups) + _Z**2)
    if error > _ROUNDING * scale:
        p = float(special.stdtr(freedom, -ahead / error))
        half = float(special.stdtrit(freedom, _SIDE)) * error
        half = max(half, left_open) if metric in _COUNTED else half
    else:
        half = left_open * (1.0 if metric in _BOUNDED else float(np.abs(ours.influence).max()))
        error, unlikely = half / _Z, 0.5 ** (freedom + 1)
        p = 0.5 if abs(ahead) <= _ROUNDING * scale else unlikely if ahead > 0 else 1 - unlikely
    ends = float(difference - half), float(difference + half)
    return Lead(difference, ends, float(p), float(error), size=freedom)


def share_interval(right: Mask, groups: Ints | None) -> Interval | None:
    """Returns Wilson's score interval of the share of examples that are right; None of no examples."""
    if not len(right):
        return None
    share, examples = float(right.mean()), effective_size(right, groups)
    middle = (share + _Z**2 / (2 * examples)) / (1 + _Z**2 / examples)
    half = _Z * math.sqrt(share * (1 - share) / examples + (_Z / examples) ** 2 / 4) / (1 + _Z**2 / examples)
    return (middle - half if share > 0 else 0.0, middle + half if share < 1 else 1.0)


def paired_share(ours: Mask, theirs: Mask, groups: Ints | None) -> Lead | None:
    """Returns the lead in the share of examples that two models have right; None of no examples."""
    if not (total := len(ours)):
        return None
    only_ours, only_theirs = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    effective = effective_size(ours.astype(np.int8) - theirs, groups)
    counts = only_ours * effective / total, only_theirs * effective / total
    difference, differ = (only_ours - only_theirs) / total, (only_ours + only_theirs) / total
    error, p = math.sqrt((differ - difference**2) / effective), mid_p(counts[0], sum(counts), 0.5)
    return Lead(difference, tango(*counts, effective), p, error, differ, effective)


def p_within(lead: Lead, allowed: float, *, lower_is_better: bool = False) -> float:
    """Returns the one-sided p value of "it is worse by at most what is allowed", small where it is by more.

    It is that of the lead's interval (Tango, Student), and never below that of "not worse".
    """
    if lead.differ is not None and lead.size:
        ours, theirs = ((lead.differ + sign * lead.difference) / 2 * lead.size for sign in (1, -1))
        p = float(special.ndtr(tango_score(ours, theirs, lead.size, -allowed)))
    else:
        ahead, freedom = -lead.difference if lower_is_better else lead.difference, lead.size or math.inf
        error = (lead.interval[1] - lead.interval[0]) / 2 / float(special.stdtrit(freedom, _SIDE))
        p = float(special.stdtr(freedom, (ahead + allowed) / (error or math.ulp(0.0))))
    return max(p, 1 - lead.p)


def tango(ours: float, theirs: float, examples: float) -> Interval:
    """Returns Tango's score interval of a paired difference of shares.

    `ours` and `theirs` are the numbers of examples that only one of two models has right.
    """
    measured, ends = (ours - theirs) / examples, []
    for outer, sign in ((-1.0, 1.0), (1.0, -1.0)):
        inner = measured
        for _ in range(45):  # to 1e-13
            middle = (inner + outer) / 2
            is_inside = sign * tango_score(ours, theirs, examples, middle) < _Z
            inner, outer = (middle, outer) if is_inside else (inner, middle)
        ends.append((inner + outer) / 2)
    return ends[0], ends[1]


def tango_score(ours: float, theirs: float, examples: float, difference: float) -> float:
    """Returns how many standard errors a measured difference is above a true one, by Tango's score."""
    b = (2 * examples - ours + theirs) * difference - ours - theirs
    c = theirs * difference * (1 - difference)
    share = (math.sqrt(max(b * b + 8 * examples * c, 0.0)) - b) / (4 * examples)
    variance = examples * (2 * share + difference * (1 - difference))
    above = ours - theirs - examples * difference
    return above / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, above)


def mid_p(right: float, examples: float, share: float) -> float:
    """Returns the mid-p value of at least so many right where the true share is `share` (Lancaster, 1961).

    The counts may be effective ones, that are not whole. With the share 0.5 and the examples that only one of
    two models has right, it is McNemar's test.
    """
    tails = (
        1.0 if least <= 0 else float(special.betainc(least, above, share)) if above > 0 else 0.0
        for least, above in ((right, examples - right + 1), (right + 1, examples - right))
    )
    return sum(tails) / 2


def p_below(
    value: float,
    limit: float,
    interval: Interval | None,
    effective: float,
    *,
    share: bool,
    lower_is_better: bool = False,
) -> float:
    """Returns the one-sided p value of "the true value is not worse than a limit", small where it is worse.

    Of a share, and of a metric within 0..1 that does not vary, it is that of the exact binomial test.
    `interval` is the value's 95 % interval, None where it does not vary, and `effective` the number of
    independent examples, as in `Slice.effective`.
    """
    if share or (interval is None and not lower_is_better):
        wrong, limit = effective * (1 - value), min(max(limit, 0.0), 1.0)
        return float(special.betainc(wrong, effective - wrong + 1, 1 - limit)) if wrong > 0 else 1.0
    behind = value - limit if lower_is_better else limit - value
    if interval is None or effective < 2:
        return 0.5 ** max(effective, 1.0) if behind > 0 else 1.0
    end, other = interval if lower_is_better else interval[::-1]
    end = other if end in (0.0, 1.0) else end  # cut off at the metric's range
    freedom = effective - 1
    error = abs(end - value) / float(special.stdtrit(freedom, _SIDE))
    return float(special.stdtr(freedom, -behind / error)) if error else 0.5


def effective_size(values: npt.NDArray[Any], groups: Ints | None) -> float:
    """Returns the number of independent examples that tell as much about a mean as these, [n], do.

    It is the number of groups (Kish) where the values of each group are equal; else it follows from the
    variance between groups, and is smaller for few groups, of which this variance is little known.
    """
    total = len(values)
    if groups is None or total < 2:
        return float(total)
    around = values - values.mean()
    sums, sizes = _add_up(around, groups)
    if (around**2).sum() - (sums**2 / sizes).sum() <= _ROUNDING * total:
        return float(total**2 / (sizes**2).sum())
    error, _, freedom = _moments(around, groups)
    if not freedom:
        return 1.0
    effect = (error / _moments(around, None)[0]) ** 2
    few = (_Z / float(special.stdtrit(freedom, _SIDE))) ** 2
    return float(min(max(total * few / max(effect, few), 1.0), total))


def number_groups(values: npt.NDArray[Any], *, by_time: bool) -> Ints:
    """Returns the number of the group of each example: of its value or, by time, of its block.

    As in batch means, a block has as many examples as there are blocks (Fishman and Yarberry, 1997), up to 30
    blocks (Schmeiser, 1982); examples of one time are in one block.
    """
    if by_time:
        blocks = min(_MAX_BLOCKS, math.isqrt(len(values)))
        values = np.searchsorted(np.sort(values), values) * blocks // len(values)
    groups: Ints = np.unique(values, return_inverse=True)[1]
    return groups


def _add_up(values: Floats, groups: Ints | None) -> tuple[Floats, Floats]:
    if groups is None:
        return values, np.ones(len(values))
    _, members = np.unique(groups, return_inverse=True)
    sums = np.bincount(members, values).astype(np.float64)
    return sums, np.bincount(members).astype(np.float64)


def _moments(influence: Floats, groups: Ints | None) -> tuple[float, float, int]:
    """Returns the standard error, its skewness and the degrees of freedom; NaN for less than two groups."""
    if len(influence) < 2:
        return math.nan, 0.0, 0
    sums, sizes = _add_up(influence - influence.mean(), groups)
    if (count := len(sums)) < 2:
        return math.nan, 0.0, 0
    # As a jackknife over groups has them: a large one draws the mean to it.
    sums = sums * (1 - 1 / count) / (1 - sizes / sizes.sum())
    squares = float((sums**2).sum())
    skewness = float((sums**3).sum()) / squares**1.5 if squares > 0 else 0.0
    return math.sqrt(squares * count / (count - 1)) / len(influence), skewness, count - 1


def _unskewed(t: float, skewness: float) -> float:
    if abs(skewness) < 1e-9:
        return t
    return 3 / skewness * (math.cbrt(1 + skewness * (t - skewness / 6)) - 1)


@dataclass(frozen=True)
class RocPrAreas:
    """Areas under the curves of the `classes` that some, not all, examples have, [areas] each.

    `influence`, [n, 2], is the derivative of the means of `roc` and `pr` by the weight of each example.
    """

    classes: Ints
    roc: Floats
    pr: Floats
    influence: Floats

    @property
    def means(self) -> tuple[float, ...]:
        """The macro averages of `roc` and `pr`; none where there is no area."""
        return (float(self.roc.mean()), float(self.pr.mean())) if len(self.classes) else ()


def measure_roc_pr(true: Ints, probabilities: npt.NDArray[Any]) -> RocPrAreas:
    """Returns the areas of finite probabilities, [n, classes]; the truth is [n], or 0 or 1, [n, classes]."""
    examples, classes = probabilities.shape
    if true.ndim == 1:
        counts, order = np.bincount(true, minlength=classes), np.argsort(true, kind="stable")
        members = np.split(order, np.cumsum(counts)[:-1])
    else:
        counts, members = true.sum(axis=0), [np.flatnonzero(column) for column in true.T]
    mixed = np.flatnonzero((counts > 0) & (counts < examples))
    if (probabilities == probabilities[:1]).all():  # the same answer to all: half, and the classes' shares
        shares = counts[mixed] / examples
        belongs = np.isin(true, mixed) if true.ndim == 1 else true[:, mixed].sum(axis=1)
        moved = (belongs - shares.sum()) / (examples * max(1, len(mixed)))
        return RocPrAreas(mixed, np.full(len(mixed), 0.5), shares, np.stack([0 * moved, moved], axis=1))
    roc, pr, influence = np.empty(len(mixed)), np.empty(len(mixed)), np.zeros((examples, 2))
    for start in range(0, len(mixed), _CLASSES_AT_ONCE):
        some = mixed[start : start + _CLASSES_AT_ONCE]
        columns = np.ascontiguousarray(probabilities[:, some].T)
        for offset, label in enumerate(some):
            roc[start + offset], pr[start + offset] = _area(columns[offset], members[label], influence)
    return RocPrAreas(mixed, roc, pr, influence / max(1, len(mixed)))


def _area(scores: npt.NDArray[Any], mine: Ints, influence: Floats) -> tuple[float, float]:
    """Returns both areas of one class, whose examples are `mine`; adds to the influence of all examples."""
    own, others = np.sort(scores[mine]), len(scores) - len(mine)
    # How many of the class's own scores are below each score, and how many at or below it.
    below, reached = np.searchsorted(own, scores, side="left"), np.searchsorted(own, scores, side="right")

    def at_least(ranks: Ints) -> Ints:  # how many are at least 0, 1, ...
        counts: Ints = np.bincount(ranks, minlength=len(own) + 2)[::-1].cumsum()[::-1]
        return counts

    # For each example of the class: examples of the class at or above it, and above it; then all examples.
    own_from, own_above = len(own) - below[mine], len(own) - reached[mine]
    all_from, all_above = at_least(reached)[below[mine] + 1], at_least(below)[reached[mine]]
    beaten = 1 - (all_from - own_from + all_above - own_above) / (2 * others)
    roc = float(beaten.mean())
    # For each example of another class: the share of the class above it, equal ones by half.
    of_each = (1 - (below + reached) / (2 * len(own)) - roc) / others
    of_each[mine] = (beaten - roc) / len(own)
    influence[:, 0] += of_each

    precision = own_from / all_from
    pr = float(precision.mean())
    upward = np.argsort(scores[mine], kind="stable")
    gained = np.concatenate([[0.0], np.cumsum(1 / all_from[upward])])
    lost = np.concatenate([[0.0], np.cumsum((precision / all_from)[upward])])
    of_each = -lost[reached] / len(own)
    of_each[mine] += (precision - pr + gained[reached[mine]]) / len(own)
    influence[:, 1] += of_each
    return roc, pr
