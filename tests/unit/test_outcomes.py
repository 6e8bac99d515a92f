"""Regression and multilabel outcomes: metrics as scikit-learn has them, directions, and verdicts."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics

from shardline.components.validate.gate import judge
from shardline.components.validate.gate.verdict import JudgedRule
from shardline.components.validate.metrics import MAIN
from shardline.components.validate.metrics.evaluation import BestLead, Evaluation
from shardline.components.validate.metrics.intervals import share_interval
from shardline.components.validate.metrics.outcomes import (
    ClassOutcomes,
    MultilabelOutcomes,
    RegressionOutcomes,
)
from shardline.components.validate.rules import Gate
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.manifest import CLASS, MULTILABEL, REGRESSION, Label, Spread, Tally
from tests.helpers.labels import class_label

PRICE = Label("label", REGRESSION, ("price",))
POSITION = Label("label", REGRESSION, ("x", "y"), ("m", "m"))
TAGS = Label("label", MULTILABEL, ("a", "b", "c"))
KIND = Label("kind", CLASS, ("no", "yes"))
RATING = Label("rating", REGRESSION, ("rating",))
N = 400
SOUND = {
    "examples": N, "never_predicted": 0, "max_difference": 0.0, "golden_difference": 0.0, "non_finite": 0,
    "batch_difference": 0.0, "constant_labels": 0,
}  # fmt: skip


def numbers(noise: float, label: Label = PRICE, **columns: Any) -> RegressionOutcomes:
    true = np.random.default_rng(0).normal(100, 20, (N, len(label.outputs)))
    wrong = np.random.default_rng(1).normal(0, noise, true.shape)
    outputs = true + wrong if noise else np.full_like(true, 100.0)
    return RegressionOutcomes(label, true, outputs, columns)


def tags(right: float) -> MultilabelOutcomes:
    true = (np.random.default_rng(0).random((N, 3)) < (0.5, 0.3, 0.1)).astype(np.int64)
    flip = np.random.default_rng(1).random(true.shape) > right
    noise = np.random.default_rng(2).uniform(0.01, 0.49, true.shape)
    outputs = np.where(np.where(flip, 1 - true, true) == 1, 1 - noise, noise).astype(np.float32)
    return multilabel(true, outputs)


def multilabel(true: Any, outputs: Any, **columns: Any) -> MultilabelOutcomes:
    return MultilabelOutcomes(TAGS, true, outputs, columns, predicted=(outputs >= 0.5).astype(np.int64))


def classes(right: float) -> ClassOutcomes:
    random = np.random.default_rng(0)
    labels, outputs = random.integers(6, size=N), random.random((N, 6))
    outputs[np.arange(N), np.where(random.random(N) < right, labels, (labels + 1) % 6)] += 3
    shares = (outputs / outputs.sum(axis=1, keepdims=True)).astype(np.float32)
    return ClassOutcomes(class_label("abcdef"), labels, shares, {}, predicted=outputs.argmax(axis=1))


MAKE: dict[str, Any] = {"numbers": numbers, "tags": tags, "classes": classes}
MAIN_METRICS = {"numbers": "rmse", "tags": "macro_f1", "classes": "accuracy"}


def evaluated(outcomes: RegressionOutcomes | MultilabelOutcomes, trained: Tally | None = None) -> Evaluation:
    fields = outcomes.summarize(10)
    fields["metrics"] |= SOUND
    label = outcomes.label
    return Evaluation(
        fingerprint="sha256:0", split="test", label=label.name, kind=label.kind, outputs=label.outputs,
        baseline=outcomes.baseline(trained), **fields,
    )  # fmt: skip


def compare_with(ours: Any, theirs: Any) -> Evaluation:
    best = dict.fromkeys(MAIN.values(), BestLead())  # there is no other champion
    return replace(evaluated(ours), champion=evaluated(theirs), leads=ours.leads(theirs), best=best)


def verdicts(evaluation: Evaluation, *rules: str) -> dict[str, JudgedRule]:
    label = Label("label", evaluation.kind, evaluation.outputs)
    gate = Gate(rules=rules).for_labels([label])
    return {rule.name or rule.rule: rule for rule in judge(evaluation, gate, champion="v1").rules}


def test_the_gate_asks_of_numbers_alone_nothing_about_classes() -> None:
    def names(*labels: Label) -> set[str]:
        return {rule.name for rule in Gate().for_labels(labels)}

    assert "classes" in names(KIND) & names(TAGS) & names(KIND, RATING)
    assert "classes" not in names(PRICE)
    assert "classes" not in names(PRICE, RATING)


@pytest.mark.parametrize("label", [PRICE, POSITION], ids=["one", "two"])
def test_numbers_are_measured_as_scikit_learn_does(label: Label) -> None:
    outcomes = numbers(10, label)
    true, outputs = outcomes.true, outcomes.outputs
    expected = {
        "rmse": metrics.root_mean_squared_error(true, outputs),
        "mae": metrics.mean_absolute_error(true, outputs),
        "median_absolute_error": metrics.median_absolute_error(true, outputs),
        "mape": metrics.mean_absolute_percentage_error(true, outputs),
        "r2": metrics.r2_score(true, outputs),
    }
    found = outcomes.score()
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-9)
    assert outcomes.intervals().keys() >= {"rmse", "mae", "mape", "r2"}
    assert outcomes.leads(numbers(15, label)).keys() >= {"rmse", "mae", "mape", "r2"}
    for name, (lower, upper) in outcomes.intervals().items():
        assert lower < found.get(name.partition("[")[0], (lower + upper) / 2) < upper or "[" in name


@pytest.mark.parametrize("kind", ["numbers", "tags", "classes"])
def test_copies_of_examples_narrow_no_interval(kind: str) -> None:
    """Eight copies of each example: the same values and intervals, which had been narrower by 2.8."""
    one = MAKE[kind](0.9)
    eightfold = np.tile(np.arange(N), 8)
    rows = {"true": one.true, "outputs": one.outputs}
    rows |= {"predicted": one.predicted} if kind != "numbers" else {}
    copied = replace(one, copies=eightfold, **{name: row[eightfold] for name, row in rows.items()})
    alone, found, uncounted = (each.summarize(10) for each in (one, copied, replace(copied, copies=None)))
    assert found["metrics"] == pytest.approx(alone["metrics"])

    def widths(intervals: dict[str, Any]) -> dict[str, float]:
        return {name: upper - lower for name, (lower, upper) in intervals.items()}

    assert widths(found["intervals"]) == pytest.approx(widths(alone["intervals"]), rel=0.2)
    assert widths(uncounted["intervals"]) != pytest.approx(widths(alone["intervals"]), rel=0.2)
    leads = [them.baseline(None).leads for them in (one, copied)]
    first, second = (widths({name: lead.interval for name, lead in each.items()}) for each in leads)
    assert first == pytest.approx(second, rel=0.2)


@pytest.mark.parametrize("kind", ["numbers", "tags", "classes"])
def test_each_decided_slice_has_a_lead_in_the_main_metric(kind: str) -> None:
    make, name = MAKE[kind], MAIN_METRICS[kind]
    columns = {"camera": np.array(["left", "right"] * 196 + ["rare"] * 8)}
    ours, theirs = (replace(make(right), columns=columns) for right in (0.9, 0.8))
    leads = ours.leads(theirs, 10)
    for one, other in zip(ours.slices(10), theirs.slices(10), strict=True):
        assert one.decided == (f"{name}[{one.name}]" in leads) == (one.name != "camera=rare")
        if one.decided:
            assert leads[f"{name}[{one.name}]"].difference == pytest.approx(one.value - other.value)
            assert one.effective == one.examples
    if kind != "numbers":
        part = "label=a" if kind == "tags" else "class=a"
        assert leads[f"{name}[{part}]"] == leads[f"{'f1' if kind == 'tags' else 'recall'}[{part}]"]


@pytest.mark.parametrize("kind", ["numbers", "tags", "classes"])
def test_groups_of_unlike_examples_widen_intervals_by_what_they_have_in_common(kind: str) -> None:
    main, alone, other = MAIN_METRICS[kind], MAKE[kind](0.9), MAKE[kind](0.8)
    # Groups of equally good answers: the right ones of an order have a group, and the wrong ones.
    off = np.abs(alone.outputs - alone.true) if kind == "numbers" else alone.predicted != alone.true
    order = np.argsort(off.reshape(N, -1).sum(axis=1), kind="stable")
    groups = np.empty(N, np.int64)
    groups[order] = np.arange(N) // 10
    at_random = np.random.default_rng(0).permutation(N) // 10

    def width(groups: Any) -> Any:
        grouped = replace(alone, groups=groups)
        lower, upper = grouped.intervals()[main]
        first, last = grouped.leads(other)[main].interval
        return np.array([upper - lower, last - first])

    assert (width(groups) > np.array([1.3, 1.0]) * width(None)).all()
    assert width(at_random) == pytest.approx(width(None), rel=0.35)


@pytest.mark.parametrize(("right", "examples"), [(106, 106), (105, 106), (0, 10), (7, 9)])
def test_the_interval_of_a_share_is_that_of_wilson(right: int, examples: int) -> None:
    expected = stats.binomtest(right, examples).proportion_ci(method="wilson")
    mask = np.arange(examples) < right
    assert share_interval(mask, None) == pytest.approx(expected)
    assert share_interval(np.repeat(mask, 2), np.arange(2 * examples) // 2) == pytest.approx(expected)


def test_without_mistakes_a_share_has_an_interval_and_other_metrics_have_none() -> None:
    found = evaluated(classes(1.0))
    assert found.intervals["accuracy"] == pytest.approx((0.990488, 1.0), abs=1e-6)
    assert not {"macro_f1", "roc_auc", "f1[class=a]"} & {*found.intervals}
    of_a = next(item for item in found.slices if item.name == "class=a")
    assert found.intervals["recall[class=a]"] == of_a.interval == found.intervals["precision[class=a]"]
    judged = verdicts(found, "accuracy >= 0.995")["accuracy >= 0.995"]
    assert (judged.verdict, judged.note) == ("passed", "may be below: the interval begins at 0.9905")
    assert {*evaluated(tags(1.1)).intervals} >= {"subset_accuracy", "recall[label=a]", "log_loss"}


@pytest.mark.parametrize("kind", ["tags", "classes"])
def test_the_baseline_has_probabilities_and_is_measured_as_scikit_learn_does(kind: str) -> None:
    model = MAKE[kind](0.6)
    label = model.label if kind == "tags" else class_label("abcdef")
    counts = (70, 10, 5, 5, 5, 5) if kind == "classes" else (9, 9, 9)
    shares = model.true.mean(axis=0) if kind == "tags" else np.array(counts) / 100
    outputs = np.tile(shares, (N, 1))
    rows = [(model.true[:, i], outputs[:, i]) for i in range(len(label.outputs))] if kind == "tags" else []
    precision = "mean_average_precision" if kind == "tags" else "pr_auc"
    expected = {
        "log_loss": np.mean([metrics.log_loss(*row) for row in rows])
        if rows
        else metrics.log_loss(model.true, outputs),
        "roc_auc": 0.5,
        precision: metrics.average_precision_score(
            model.true if rows else np.eye(6)[model.true], outputs, average="macro"
        ),
    }

    found = replace(model, label=label).baseline(Tally(counts))

    assert {name: found.metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    constant = replace(model, outputs=outputs.astype(np.float32))
    for name in expected:
        lead = found.leads[name]
        assert lead.difference == pytest.approx(model.score()[name] - expected[name], abs=1e-6)
        assert lead.interval[0] < lead.difference < lead.interval[1]
        assert (lead.p < 0.5) == ((lead.difference < 0) == (name == "log_loss"))
        assert constant.baseline(Tally(counts)).leads[name].p == pytest.approx(0.5, abs=1e-6)


def test_of_a_truth_of_zero_there_is_no_share() -> None:
    outcomes = numbers(10, POSITION)
    outcomes.true[7, 1] = 0.0
    for found in (outcomes.score(), outcomes.intervals(), outcomes.leads(numbers(15, POSITION))):
        assert "mape" not in found
        assert {"rmse", "mae"} <= found.keys()


def test_multilabel_predictions_are_measured_as_scikit_learn_does() -> None:
    outcomes = tags(0.9)
    true, predicted, outputs = outcomes.true, outcomes.predicted, outcomes.outputs.astype(np.float64)
    expected = {
        "macro_f1": metrics.f1_score(true, predicted, average="macro"),
        "micro_f1": metrics.f1_score(true, predicted, average="micro"),
        "macro_precision": metrics.precision_score(true, predicted, average="macro"),
        "macro_recall": metrics.recall_score(true, predicted, average="macro"),
        "hamming_loss": metrics.hamming_loss(true, predicted),
        "subset_accuracy": metrics.accuracy_score(true, predicted),
        "mean_average_precision": metrics.average_precision_score(true, outputs, average="macro"),
        "roc_auc": metrics.roc_auc_score(true, outputs, average="macro"),
        "log_loss": np.mean([metrics.log_loss(true[:, i], outputs[:, i]) for i in range(3)]),
    }
    found = outcomes.score()
    assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("better", "worse"), [(numbers(5), numbers(15)), (tags(0.97), tags(0.8))])
def test_a_worse_challenger_is_blocked_and_a_better_one_is_not(better: Any, worse: Any) -> None:
    assert verdicts(compare_with(better, worse))["champion"].verdict == "passed"
    assert verdicts(compare_with(worse, better))["champion"].verdict == "failed"


@pytest.mark.parametrize("constant", [numbers(0), multilabel(tags(1.0).true, np.ones((N, 3), np.float32))])
def test_a_constant_model_is_blocked(constant: Any) -> None:
    assert verdicts(evaluated(constant))["baseline"].verdict == "failed"


def test_rules_know_that_less_error_is_better() -> None:
    found = compare_with(numbers(5), numbers(15))
    rules = "rmse <= 6", "rmse <= champion * 0.5", "rmse < champion (p < 0.05)", "r2 > champion (p < 0.05)"
    judged = verdicts(found, *rules, "mae <= champion (within 1 %)")
    assert all(rule.verdict == "passed" for rule in judged.values()), judged
    assert verdicts(found, "rmse <= champion * 0.1")["rmse <= champion * 0.1"].verdict == "failed"
    assert verdicts(found, "rmse >= 60")["rmse >= 60"].verdict == "failed"


def test_rules_about_several_labels_look_at_each_and_at_probabilities() -> None:
    found = compare_with(tags(0.97), tags(0.8))
    judged = verdicts(
        found,
        "log_loss < champion (p < 0.05)",
        "roc_auc > champion (p < 0.05)",
        "mean_average_precision > champion (p < 0.05)",
        "hamming_loss < champion (p < 0.05)",
        "f1[label=a] > champion (p < 0.05)",
        "worst_slice(macro_f1) >= 0.5",
    )
    assert all(rule.verdict == "passed" for rule in judged.values()), judged
    worst = judged["worst_slice(macro_f1) >= 0.5"]
    assert worst.left == min(score.f1 for score in found.classes)
    for name in ("log_loss", "roc_auc", "mean_average_precision"):
        lower, upper = found.intervals[name]
        assert lower < found.metrics[name] < upper


def test_the_trivial_answer_is_the_mean_in_training() -> None:
    trained = Tally(spreads=(Spread(0.0, 200.0, 90.0, 20.0),))
    baseline = evaluated(numbers(5), trained).baseline
    assert baseline is not None
    assert baseline.answer == "90"
    error = numbers(5).true - 90
    assert baseline.metrics["rmse"] == pytest.approx(np.sqrt((error**2).mean()))


def test_a_label_that_does_not_occur_in_a_slice_does_not_make_it_weak() -> None:
    true = np.tile(np.array([[1, 0, 0], [1, 1, 1], [0, 0, 0]]), (20, 1))
    night = np.tile(["no label b", "all", "none"], 20)
    found = multilabel(true, np.where(true, 0.9, 0.1).astype(np.float32), part=night)
    assert {one.name: (one.value, one.interval) for one in found.summarize(10)["slices"]} == dict.fromkeys(
        [*(f"label={name}" for name in TAGS.outputs), "part=all", "part=no label b", "part=none"],
        (1.0, None),  # no resample has a mistake
    )
    missed = multilabel(true, np.full(true.shape, 0.9, np.float32), part=night)
    assert {one.name: one.value for one in missed.summarize(10)["slices"]}["part=no label b"] == 1 / 3


def test_slices_of_numbers_are_few_and_have_an_error() -> None:
    age = np.arange(N) % 97
    found = numbers(5, age=age, sex=np.array(["f", "m"] * (N // 2))).summarize(10)["slices"]
    assert [one.name.partition("=")[0] for one in found] == ["age"] * 4 + ["sex"] * 2
    assert all(one.interval[0] < one.value < one.interval[1] for one in found)
    worst = verdicts(evaluated(numbers(5, age=age)), "worst_slice(rmse) <= 9")["worst_slice(rmse) <= 9"]
    assert worst.left == max(one.value for one in numbers(5, age=age).summarize(10)["slices"])


@pytest.mark.parametrize(
    ("power", "verdict"), [(1.0, "undecided"), (0.95, "undecided"), (0.3, "failed"), (3.0, "undecided")]
)
@pytest.mark.parametrize("kind", ["tags", "classes"])
def test_where_the_answers_leave_it_open_the_log_loss_decides(kind: str, power: float, verdict: str) -> None:
    """Less sure of the same answers by more than a tolerance; surer ones are no reason to block."""
    champion = MAKE[kind](0.95).select(np.arange(N) < 150)
    outputs = champion.outputs**power
    rest = (1 - champion.outputs) ** power if kind == "tags" else 0.0
    total = outputs + rest if kind == "tags" else outputs.sum(axis=1, keepdims=True)
    found = compare_with(replace(champion, outputs=(outputs / total).astype(np.float32)), champion)
    gate = Gate().for_labels([champion.label])
    blessing = judge(found, gate, champion="v1")

    rule = next(rule for rule in blessing.rules if rule.name == "champion")
    assert rule.verdict == verdict
    assert ("but far less sure: log loss" in blessing.headline) == (verdict == "failed")
    assert blessing.blessed == (verdict == "undecided")
    removed = judge(found, Gate(rules=("champion: off",)).for_labels([champion.label]), champion="v1")
    assert removed.blessed


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("part", ["a slice", "all"])
def test_a_prediction_that_is_not_finite_ends_in_a_verdict(part: str, bad: float) -> None:
    """With rules on slices, which compare with values that no example has, for each of the two models."""
    shop = np.array(["near", "far"] * (N // 2))
    sound = numbers(5, shop=shop)
    mask = {"a slice": shop == "far", "all": np.full(N, True)}[part]
    broken = replace(sound, outputs=np.where(mask[:, None], bad, sound.outputs))
    rules = ("worst_slice(rmse) <= 9", "worst_slice(rmse) <= champion (within 2 %)")
    gate = Gate(rules=rules).for_labels([PRICE])
    for ours, theirs in ((broken, sound), (sound, broken)):
        blessing = judge(compare_with(ours, theirs), gate, champion="v1")
        assert json.dumps(asdict(blessing), allow_nan=False)


@pytest.mark.parametrize(
    ("labels", "rule", "message"),
    [
        ([PRICE], "accuracy >= 0.9", "regression, which has rmse, mae, .*; .*'rmse <= 10'$"),
        ([KIND], "rmse <= 3", "does not fit .* class, which has accuracy, .*, ece; a rule .*'accuracy >= "),
        ([KIND, RATING], "rmse <= 3", "does not say which label it is about; write .* kind.rmse <= 3"),
        ([KIND, RATING], "stars.rmse <= 3", "is about label 'stars'; the dataset has kind, rating"),
        ([PRICE], "price.rmse <= 3", "the dataset has one label: write its metrics without a name"),
        ([PRICE], "recall[class=no] >= 0.3", "does not fit a label of kind regression"),
    ],
)
def test_a_metric_that_does_not_fit_is_refused(labels: list[Label], rule: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Gate(rules=(rule,)).for_labels(labels)


def test_warnings_about_probabilities_name_the_label_of_several() -> None:
    champion = replace(evaluated(numbers(5)), metrics={"kind.log_loss": 0.2, "size_mb": 1.0})
    both = replace(
        evaluated(numbers(5)),
        champion=champion,
        metrics={"kind.ece": 0.3, "kind.log_loss": 2.0, "size_mb": 9.0},
        parts=(replace(evaluated(tags(0.9)), label="kind"),),
    )
    warnings = judge(both, [], champion="v1").warnings
    assert warnings == (
        "kind: Probabilities are off by 30.0 points on average (calibration error)",
        "The size on disk has grown to 9.0 times the champion's",
        "kind: The log loss, the price of being sure and wrong, has grown to 10.0 times the champion's",
    )


def test_several_labels_have_the_gates_own_rules_each() -> None:
    rules = Gate(rules=("champion: rating.rmse <= champion (within 5 %)",)).for_labels([KIND, RATING])
    assert [rule.text for rule in rules if rule.name in ("champion", "baseline")] == [
        "kind.accuracy >= champion (within 0.01)",
        "kind.accuracy > baseline (p < 0.025)",
        "rating.rmse < baseline (p < 0.025)",
        "rating.rmse <= champion (within 5 %)",
    ]
