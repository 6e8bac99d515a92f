"""Left side of a rule: its value in an evaluation, with the interval in which that lies."""

from __future__ import annotations

from shardline.components.validate.evaluation import Evaluation, Interval, Slice
from shardline.components.validate.metrics import FALLING, MAIN, SLICED_OF_QUANTILES
from shardline.components.validate.rules import Rule

#: Why a rule about a metric that an evaluation lacks is undecided.
NOT_MEASURED = "it was not measured"


def measure_left(rule: Rule, evaluation: Evaluation) -> tuple[float | None, str]:
    """Returns the value of a rule's left side, None where it is unknown, and a note."""
    if rule.worst:
        return _worst(rule.metric, evaluation.of(rule.label))
    if not rule.slice or rule.format or rule.is_drift:
        value = {**evaluation.metrics, **evaluation.distances}.get(rule.left)
        return value, evaluation.notes.get(rule.metric, "") if value is not None else NOT_MEASURED
    part = evaluation.of(rule.label)
    if rule.slice.startswith("number="):
        score = next((one for one in part.numbers if f"number={one.name}" == rule.slice), None)
        return (getattr(score, rule.metric), "") if score else (None, NOT_MEASURED)
    found = next((item for item in part.slices if item.name == rule.slice), None)
    if found is None or not found.decided:
        return None, f"{found.examples if found else 0:,} examples are too few"
    if rule.metric in SLICED_OF_QUANTILES and rule.metric not in found.metrics:
        return None, NOT_MEASURED
    return _of_slice(rule.metric, found, part), ""


def _worst(metric: str, evaluation: Evaluation) -> tuple[float | None, str]:
    classes = {f"class={name}" for name in evaluation.class_names}
    slices = [
        item
        for item in evaluation.slices
        if metric == MAIN[evaluation.kind] or item.name in classes or metric in item.metrics
    ]
    values = [(_of_slice(metric, item, evaluation), item.name) for item in slices if item.decided]
    if not slices and metric in SLICED_OF_QUANTILES:
        return None, NOT_MEASURED
    if not values:
        return None, "every slice has too few examples"
    value, name = (max if metric in FALLING else min)(values)
    few = len(slices) - len(values)
    left_out = f"; {few:,} {'slice has' if few == 1 else 'slices have'} too few examples" if few else ""
    return value, name + left_out


def _of_slice(metric: str, item: Slice, evaluation: Evaluation) -> float:
    if metric in item.metrics:
        return item.metrics[metric]
    if metric == MAIN[evaluation.kind] and not item.name.startswith("label="):
        return item.value
    name = item.name.partition("=")[2]
    score = next(score for score in evaluation.classes if score.name == name)
    # Of one label alone the mean over the labels is its own.
    return float(score.f1 if metric == MAIN[evaluation.kind] else getattr(score, metric))


def interval_of_left(rule: Rule, evaluation: Evaluation) -> Interval | None:
    """Returns the 95 % interval of a rule's left side; None where there is none."""
    if rule.format and rule.metric in MAIN.values():
        return next((item.interval for item in evaluation.formats if item.name == rule.format), None)
    part = evaluation.of(rule.label)
    item = next((item for item in part.slices if rule.slice == item.name), None)
    if item and rule.metric in item.intervals:
        return item.intervals[rule.metric]
    found = item.interval if item else None
    return found if rule.slice and rule.metric == MAIN.get(part.kind) else evaluation.intervals.get(rule.left)
