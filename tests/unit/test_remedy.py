"""What a blocked run advises, for each cause, and that values, limits and p values are written plainly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardline.components.validate.gate import Blessing, TrainingRecord, judge
from shardline.components.validate.gate.judged import JudgedRule, format_p
from shardline.components.validate.gate.verdict import NoChampion
from shardline.components.validate.rules import DEFAULT_RULES, Gate
from shardline.pipelines.cli.main import main
from tests.unit.test_rules import UNCLEAR, WORSE, sound

FALLING = [1.0 / epoch for epoch in range(1, 13)]


def training(*losses: float, column: str = "val_loss", **options: Any) -> TrainingRecord:
    epochs = tuple(float(epoch) for epoch in range(1, len(losses) + 1))
    settings = {"model": "m", "settings": {"epochs": len(losses), **options}}
    return TrainingRecord(settings, {"epoch": epochs, column: losses})


def blocked(record: TrainingRecord | None = None, /, champion: Any = None, **measured: Any) -> Blessing:
    whole = sound(**{"accuracy": 0.9, "champion": 0.95, "lead": WORSE, **measured})
    blessing = judge(whole, DEFAULT_RULES, training=record, champion_training=champion)
    assert not blessing.blessed
    assert "override" not in blessing.remedy
    return blessing


@pytest.mark.parametrize(
    ("record", "words", "epochs"),
    [
        (training(0.6, 0.3, *[0.5] * 58), "val_loss was lowest in epoch 2 of 60: train for", 2),
        (
            training(0.6, 0.3, 0.4, 0.5, 0.6, early_stopping="val_loss"),
            "stopped early, as val_loss was",
            None,
        ),
        (training(0.6, 0.3, 0.4, 0.5, 0.6, epochs=60), "in epoch 2 of 5: more epochs will not help", None),
        (training(*FALLING), "val_loss was still falling: train longer, epochs=24", 24),
        (training(0.6), "after one epoch val_loss is not at its lowest: train longer, epochs=2", 2),
        (training(*FALLING, *[FALLING[-1] - 0.00001 * n for n in range(12)]), "hardly falls any more", None),
        (training(0.6, float("nan")), "train with a validation split", None),
        (training(0.6, 0.5, column="loss"), "train with a validation split", None),
    ],
)
def test_the_advice_follows_from_the_validation_loss(record: TrainingRecord, words: str, epochs: int) -> None:
    remedy = blocked(record).remedy

    assert words in remedy
    assert ("epochs=" in remedy) == ("train longer" in words)
    assert epochs is None or str(epochs) in remedy


@pytest.mark.parametrize(
    ("loss", "validation", "epoch"),
    [
        (FALLING, [0.9, 0.5, *[0.6] * 10], 2),
        (FALLING, FALLING, 0),
        ([1.0] * 12, [0.9, 0.5, *[0.6] * 10], 0),
        (FALLING, [0.9, *[0.501, 0.5] * 5, 0.7], 0),
        (FALLING, [], 0),
    ],
)
def test_curves_cross_where_only_the_training_loss_falls(
    loss: list[float], validation: list[float], epoch: int
) -> None:
    record = TrainingRecord(history={"loss": tuple(loss), "val_loss": tuple(validation)})

    assert record.crossing == epoch


@pytest.mark.parametrize(("weights", "advised"), [("", True), ("balanced", False)])
def test_a_rare_class_that_is_missed_is_named(weights: str, advised: bool) -> None:
    whole = sound(0.89, never_predicted=1)
    classes = [whole.classes[0], replace(whole.classes[1], recall=0.0)]

    remedy = judge(
        replace(whole, classes=tuple(classes)),
        DEFAULT_RULES,
        training=training(*FALLING, class_weights=weights),
    ).remedy

    assert remedy.startswith("'ill' is rare (10 of 180 test examples, 0 % of them found): add examples of it")
    assert ("class_weights" in remedy) == advised


def test_too_few_examples_are_counted() -> None:
    undecided = judge(sound(0.945, champion=0.95, lead=UNCLEAR), DEFAULT_RULES, Gate(undecided="block"))
    by_chance = judge(sound(0.91), DEFAULT_RULES)
    few = judge(sound(examples=30), DEFAULT_RULES, Gate(first_run="block"))

    assert undecided.remedy.startswith("add test examples: about ")
    assert "would find a loss of 2 points in 9 of 10 cases, 180 leave it open" in undecided.remedy
    assert "would show a difference as large as the one measured" in by_chance.remedy
    assert few.remedy == "add 20 test examples, or make the test split larger"
    surely_worse = blocked(accuracy=0.91)  # and perhaps no better than the baseline
    assert any(rule.is_by_chance for rule in surely_worse.rules)
    assert "test examples" not in surely_worse.remedy


def test_a_model_that_is_worse_is_compared_with_the_champions_training() -> None:
    theirs = {"model": "m", "settings": {"epochs": 30, "seed": 4, "model_dir": "/x"}}

    assert (
        "compare with the champion's training: epochs 12 (the champion: 30)"
        in blocked(training(*FALLING), theirs).remedy
    )
    assert (
        "settings and data are the champion's"
        in blocked(training(*FALLING), training(*FALLING, seed=3).settings).remedy
    )


@pytest.mark.parametrize("fault", ["max_difference", "golden_difference", "batch_difference", "non_finite"])
def test_a_fault_is_mended_before_a_model_is_trained_longer(fault: str) -> None:
    remedy = blocked(training(*FALLING), **{fault: 3}).remedy

    assert remedy
    assert "longer" not in remedy


def test_a_champion_that_cannot_be_measured_has_its_own_remedy() -> None:
    absence = NoChampion("the champion v1 has other labels; publish this model to another champion_uri")

    assert (
        judge(sound(), DEFAULT_RULES, missing=absence).remedy == "publish this model to another champion_uri"
    )


@pytest.mark.parametrize(
    ("left", "right", "texts"),
    [
        (0.994, 0.994012, ("0.99400", "0.99401")),
        (0.9, 0.9, ("0.9000", "0.9")),
        (0.9, 0.622222222222, ("0.9000", "0.6222")),
        (0.949999, 0.95, ("0.949999", "0.95")),
        (12, 50, ("12", "50")),
    ],
)
def test_value_and_limit_have_as_many_digits_as_tell_them_apart(
    left: float, right: float, texts: tuple[str, str]
) -> None:
    rule = JudgedRule("r", "accuracy", left, ">=", right, "failed")

    assert (rule.left_text, rule.right_text) == texts


def test_a_p_value_is_never_zero_nor_rounded_to_its_limit() -> None:
    assert format_p(1e-9, 0.025) == "p < 0.001"
    assert format_p(0.02502, 0.025) == "p = 0.02502"
    assert format_p(0.124, 0.05) == "p = 0.124"


def test_explain_alone_names_rule_and_remedy_of_the_last_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "today"
    outputs = run / "outputs" / "retrain-1" / "export-validate"
    outputs.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"pipeline": "retrain", "state": "succeeded"}))
    (run / "run.log").write_text("")
    metadata = {"blessed": False, "reason": "blocked by the rule champion", "remedy": "train longer"}
    artifact = {"artifacts": [{"metadata": metadata, "uri": "x"}]}
    (outputs / "executor_output.json").write_text(json.dumps({"artifacts": {"exported": artifact}}))
    (tmp_path / "runs" / "latest").symlink_to("today")
    monkeypatch.chdir(tmp_path)

    shown = CliRunner().invoke(main, ["explain"])

    assert shown.exit_code == 0
    assert "retrain succeeded: not blessed\n" in shown.stdout
    rows = dict(line.split(maxsplit=1) for line in shown.stdout.splitlines()[1:])
    assert rows["why"] == "blocked by the rule champion"
    assert rows["next"] == "step  train longer"
