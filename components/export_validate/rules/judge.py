"""The judgement: every rule of a gate over one evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardline.components.export_validate.evaluation import Evaluation, Slice
from shardline.components.export_validate.rules.blessing import Blessing, JudgedRule, Verdict
from shardline.components.export_validate.rules.gate import Gate
from shardline.components.export_validate.rules.operators import OPERATORS
from shardline.components.export_validate.rules.rule import Rule, parse_rule

_NON_FINITE = "examples with non-finite output"

# Kernels for other batch sizes round differently, in 16 bits by a percent; more is a model's own doing.
_BATCH = parse_rule("batch_difference <= 0.02")

_HARMLESS = {"jpeg_flips": "Encoding as JPEG", "shift_flips": "A shift by one pixel"}
_MOST_FLIPS = 0.1


def judge(
    evaluation: Evaluation, gate: Gate, *, no_champion: str = "", warnings: tuple[str, ...] = ()
) -> Blessing:
    """Judges an evaluation.

    Besides the gate's own rules there are two that always hold: every output is finite, and the size of a
    batch does not matter.

    Args:
        evaluation: Of the exported model.
        gate: Rules and policy.
        no_champion: Why there is no champion in the evaluation; "" where there is one or none is asked for.
        warnings: What else a person should know.
    """
    rules = tuple(_judge(rule, evaluation, gate, no_champion) for rule in gate.rules)
    rules += (_judge_finite(evaluation),)
    if _BATCH.metric in evaluation.metrics:
        rules += (_judge(_BATCH, evaluation, gate, no_champion),)
    blocking = [rule for rule in rules if _blocks(rule, gate)]
    shown = blocking or (rules[0], *(rule for rule in rules[1:] if rule.verdict in ("undecided", "skipped")))
    return Blessing(
        blessed=not blocking,
        rules=rules,
        reason="; ".join(map(str, shown)),
        warnings=(*warnings, *_flipping(evaluation)),
    )


def _judge_finite(evaluation: Evaluation) -> JudgedRule:
    return JudgedRule(
        rule=f"{_NON_FINITE} == 0",
        name=_NON_FINITE,
        left=evaluation.non_finite,
        operator="==",
        right=0,
        verdict="passed" if evaluation.non_finite == 0 else "failed",
    )


def _blocks(rule: JudgedRule, gate: Gate) -> bool:
    return rule.verdict == "failed" or (rule.verdict == "undecided" and not gate.allow_undecided)


def _judge(rule: Rule, evaluation: Evaluation, gate: Gate, no_champion: str) -> JudgedRule:
    left, note = _measure(rule, evaluation)
    limit: float | None = rule.limit
    judged = JudgedRule(
        rule=rule.text,
        name=rule.name,
        left=left,
        operator=rule.operator,
        right=limit,
        verdict="undecided",
        interval=_interval(rule, evaluation),
        note=note,
    )
    if rule.champion:
        if evaluation.champion is None:
            # A policy of its own: allow_undecided is about slices and metrics.
            verdict: Verdict = "skipped" if gate.first_run == "bless" else "failed"
            note = f"{no_champion or 'there is no champion'}; first_run is {gate.first_run}"
            return replace(judged, right=None, verdict=verdict, note=note)
        theirs, theirs_note = _measure(rule, evaluation.champion)
        limit = None if theirs is None else theirs + rule.limit
        lead = evaluation.leads.get(rule.name)
        judged = replace(
            judged,
            right=limit,
            champion=theirs,
            difference=lead.interval if lead else None,
            p=lead.p if lead and rule.p is not None else None,
            note=note or (f"of the champion {theirs_note}" if theirs is None else ""),
        )
    if left is None or limit is None or (rule.p is not None and judged.p is None):
        return judged
    passed = OPERATORS[rule.operator](left, limit) and (rule.p is None or (judged.p or 0.0) < rule.p)
    return replace(
        judged,
        verdict="passed" if passed else "failed",
        note=judged.note if judged.p is None else f"p = {judged.p:.3f}, must be below {rule.p:g}",
    )


def _measure(rule: Rule, evaluation: Evaluation) -> tuple[float | None, str]:
    """Returns the value of a rule's left side, if it can be told, and a note."""
    if rule.worst:
        return _worst(rule.metric, evaluation)
    if not rule.slice:
        value = evaluation.metrics.get(rule.metric)
        return value, "" if value is not None else "it was not measured"
    found = next((item for item in evaluation.slices if item.name == rule.slice), None)
    if found is None or not found.decided:
        examples = found.examples if found else 0
        return None, f"{examples:,} examples are too few"
    return _of_slice(rule.metric, found, evaluation), ""


def _worst(metric: str, evaluation: Evaluation) -> tuple[float | None, str]:
    slices = [item for item in evaluation.slices if metric == "accuracy" or item.name.startswith("class=")]
    values = [(_of_slice(metric, item, evaluation), item.name) for item in slices if item.decided]
    if not values:
        return None, "every slice has too few examples"
    value, name = min(values)
    few = len(slices) - len(values)
    left_out = f"; {few:,} {'slice has' if few == 1 else 'slices have'} too few examples" if few else ""
    return value, name + left_out


def _of_slice(metric: str, item: Slice, evaluation: Evaluation) -> float:
    if metric == "accuracy":
        return item.accuracy
    name = item.name.removeprefix("class=")
    score = next(score for score in evaluation.classes if score.name == name)
    return float(getattr(score, metric))


def _interval(rule: Rule, evaluation: Evaluation) -> tuple[float, float] | None:
    if rule.slice and rule.metric == "accuracy":
        return next((item.interval for item in evaluation.slices if item.name == rule.slice), None)
    return evaluation.intervals.get(rule.name)


def _flipping(evaluation: Evaluation) -> Iterator[str]:
    for metric, change in _HARMLESS.items():
        if (share := evaluation.metrics.get(metric, 0.0)) > _MOST_FLIPS:
            yield f"{change} changes the predicted class of {share:.0%} of the images that were tried"
