"""Remedy of a model that the gate blocks: what to do, from its rules, its answers and its training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardline.components.text import enumerate_names
from shardline.components.validate.gate.gate import CHAMPION, EXAMPLES, SLIDE, VARIETY
from shardline.components.validate.gate.judged import JudgedRule
from shardline.components.validate.gate.power import PairedTest
from shardline.components.validate.gate.rules import DRIFT, parse_rule
from shardline.components.validate.gate.training import TrainingRecord
from shardline.components.validate.metrics.evaluation import Evaluation
from shardline.components.validate.metrics.metrics import QUALITY, SERVING
from shardline.trainer.base.settings import PATH_SETTINGS
from shardline.trainer.data.features import CLASS

# Faults of a model or its export; while there is one, its metrics say little about the training.
_FAULTS = {
    "finite": "find the inputs that give NaN or infinity (a logarithm or a division by 0), lower "
    "learning_rate or set the optimizer's clipnorm, and train again",
    "export": "look for layers that answer differently in each call or keep state (dropout or noise outside "
    "of training): the fault is in the model function, not in the training",
    "golden": "look for what the export needs from outside: files, py_function, ops of other packages",
    "batch": "look for layers that compute over the batch, such as a mean over axis 0 or BatchNormalization "
    "in training mode",
    VARIETY: "give the test split examples with other answers: another split_salt, or more data",
}
_SERVING = {metric.name for metric in SERVING}
_QUALITY = {metric.name for metric in QUALITY} | {"precision", "recall", "f1", "never_predicted"}
# A class with a smaller share of the examples is rare, or with half of an equal share among many classes.
_RARE = 0.2
# A rise or fall of the validation loss that counts, as a share of the loss.
_RISE, _FALL = 0.05, 0.01
_MOST_CHANGES = 4
_NO_CHANGES = (*PATH_SETTINGS, "seed")
# Quantiles of a finding in 9 of 10 cases by an interval of 95 %.
_Z, _Z_FOUND = 1.96, 1.96 + 1.28


def find_remedy(
    rules: Sequence[JudgedRule],
    evaluation: Evaluation,
    training: TrainingRecord,
    champion: Mapping[str, Any] | None = None,
) -> str:
    """Returns what may help a model that these rules block or leave undecided; "" for nothing known.

    `champion` is the record of the champion's training, as of `TrainingRecord.settings`.
    """
    faults = [text for rule in rules if (text := _FAULTS.get(rule.name)) and rule.verdict == "failed"]
    weak = [rule for rule in rules if _is_weak(rule)]
    # More examples do not help a model that is surely too weak.
    clear = [rule for rule in rules if not weak or not (rule.verdict == "undecided" or rule.is_by_chance)]
    found = faults or [text for rule in clear for text in _advise_rule(rule, evaluation)]
    if weak and not faults:
        found = [*_advise_rare_class(weak, evaluation, training), *found, _advise_training(training)]
        if any(rule.name == CHAMPION for rule in weak):
            found.append(_compare_trainings(training.settings, champion or {}))
    return "; ".join(dict.fromkeys(filter(None, found)))


def _is_weak(rule: JudgedRule) -> bool:
    metric = rule.metric.removeprefix("worst_slice(").partition("[")[0].rstrip(")").rpartition(".")[2]
    return (
        rule.verdict == "failed" and not rule.is_by_chance and rule.right is not None and metric in _QUALITY
    )


def _advise_rule(rule: JudgedRule, evaluation: Evaluation) -> Iterator[str]:
    metric = rule.metric.rpartition(".")[2].partition("[")[0]
    if rule.name == EXAMPLES and rule.left is not None and rule.right is not None:
        yield f"add {math.ceil(rule.right - rule.left):,} test examples, or make the test split larger"
    elif rule.verdict == "undecided" or rule.is_by_chance:
        yield _advise_examples(rule, evaluation)
    elif rule.name == CHAMPION and rule.right is None:
        yield rule.note.partition("; ")[2]
    elif rule.verdict == "failed" and rule.name == SLIDE:
        yield "small losses have added up: compare settings and data with those of that champion"
    elif rule.verdict == "failed" and metric in _SERVING:
        yield "use a smaller model: fewer or narrower layers, or smaller inputs"
    elif rule.verdict == "failed" and metric in (DRIFT, "drifted"):
        yield "find out why the data have changed: the report shows the features that moved"


def _advise_examples(rule: JudgedRule, evaluation: Evaluation) -> str:
    """Returns how many test examples would decide an open rule, where that can be computed."""
    compared = evaluation.champion_comparison
    n, needed, what = compared.examples, None, ""
    if rule.name == CHAMPION and (test := PairedTest.of(compared, parse_rule(rule.rule))):
        loss = 2 * test.within
        needed, what = test.examples_needed(loss), f"find a loss of {test.text(loss)}"
    elif rule.difference and rule.left is not None and rule.right is not None and rule.left != rule.right:
        error = (rule.difference[1] - rule.difference[0]) / (2 * _Z)
        needed = math.ceil(n * (_Z_FOUND * error / (rule.left - rule.right)) ** 2)
        what = "show a difference as large as the one measured"
    if needed is None or needed <= n:
        return f"add test examples: {n:,} leave it open"
    return f"add test examples: about {needed:,} would {what} in 9 of 10 cases, {n:,} leave it open"


def _advise_rare_class(
    weak: Sequence[JudgedRule], evaluation: Evaluation, training: TrainingRecord
) -> Iterator[str]:
    """Yields what helps the worst rare class of those that a rule names or that are mostly missed."""
    named = {rule.metric.partition("=")[2].rstrip("]") for rule in weak if "[" in rule.metric}
    named |= {*evaluation.blind_to} if any(rule.name == "classes" for rule in weak) else set()
    for part in evaluation.each:
        total = sum(score.examples for score in part.classes)
        most = total * min(_RARE, 0.5 / max(1, len(part.classes)))
        rare = [score for score in part.classes if 0 < score.examples < most]
        rare = [score for score in rare if score.recall < 0.5 or score.name in named]
        if rare:
            score = min(rare, key=lambda each: each.recall)
            advice = "add examples of it"
            if part.kind == CLASS and not training.options.get("class_weights"):
                advice += ', or train with train_options={"class_weights": "balanced"}'
            found = f"{score.examples:,} of {total:,} test examples, {100 * score.recall:.0f} % of them found"
            yield f"{score.name!r} is rare ({found}): {advice}"


def _advise_training(training: TrainingRecord) -> str:
    """Returns what the course of the validation loss advises; "" where no history is known."""
    losses = training.history.get("val_loss", ())
    if not training.history:
        return ""
    if not losses or not all(map(math.isfinite, losses)):
        return (
            "train with a validation split: its val_loss shows whether there are too many or too few epochs"
        )
    epochs = [int(epoch) for epoch in training.history.get("epoch", range(1, len(losses) + 1))]
    best, last = min(range(len(losses)), key=losses.__getitem__), epochs[-1]
    after, lowest = len(losses) - 1 - best, losses[best]
    at = f"val_loss was lowest in epoch {epochs[best]} of {last}"
    end, planned = losses[-3:], training.options.get("epochs")
    before = losses[max(0, best - max(1, len(losses) // 4))]
    falls = before - lowest > _FALL * abs(before) or len(losses) == 1
    if after and (training.options.get("early_stopping") or (isinstance(planned, int) and last < planned)):
        return f"training stopped early, as {at}: more epochs will not help; {_MORE}"
    if after >= max(2, len(losses) // 4) and sum(end) / len(end) - lowest > _RISE * abs(lowest):
        return (
            f"the model is overfitted, {at}: train for about {epochs[best]} epochs or with "
            'train_options={"early_stopping": "val_loss"}; more data, augmentation or dropout help too'
        )
    if after <= len(losses) // 10 and falls:
        still = "after one epoch val_loss is not at its lowest" if last == 1 else "val_loss was still falling"
        return f"{still}: train longer, epochs={2 * last}"
    if not after:
        return "val_loss hardly falls any more: raise learning_rate or change the model, epochs help little"
    return f"val_loss no longer falls ({at}): more epochs will not help; {_MORE}"


_MORE = "add training data, or change the model or learning_rate"


def _compare_trainings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Returns what differs between a model's training and the champion's; "" where nothing is known."""
    if not ours or not theirs:
        return ""
    pairs = [(record.get("settings") or {}, record) for record in (ours, theirs)]
    mine, other = (
        {"model": record.get("model"), "data": record.get("fingerprint"), **options}
        for options, record in pairs
    )
    names = [name for name in {**mine, **other} if name not in _NO_CHANGES]
    changes = [
        "other data"
        if name == "data"
        else f"{name} {mine.get(name) or 'unset'} (the champion: {other.get(name) or 'unset'})"
        for name in names
        if mine.get(name) != other.get(name)
    ]
    if not changes:
        return "settings and data are the champion's: a model with another seed may differ as much"
    return f"compare with the champion's training: {enumerate_names(changes, _MOST_CHANGES)}"
