"""What may change between a checkpoint and the run that goes on from it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from shardline.trainer.checkpoint.changes import EFFECTS, Moment, Record
from shardline.trainer.errors import SettingsError
from shardline.trainer.settings import TrainSettings

BETWEEN = Moment(epoch=2, examples=0, steps=120)
WITHIN = Moment(epoch=2, examples=48, steps=126)
ENDED = Moment(epoch=4, examples=0, steps=240, ended="the run has done its 4 epochs")


def record(*rates: Any, replicas: int = 2, **changes: Any) -> Record:
    settings = TrainSettings(**{"dataset": "data", "model": "mnist_cnn", "epochs": 4, **changes})
    return Record.of(settings, replicas, list(rates or (0.001,)))


def lines(before: Record, now: Record, moment: Moment = BETWEEN) -> list[str]:
    return [str(change) for change in now.continuing(before, moment)[1]]


def test_what_stays_needs_no_line() -> None:
    assert lines(record(), record()) == []
    assert record().continuing(record(), ENDED)[0].json == {**record().json, "changes": []}


@pytest.mark.parametrize(
    ("before", "now", "line"),
    [
        (
            record(),
            record(per_replica_batch_size=32),
            "per_replica_batch_size was 16, is 32 from step 121 on",
        ),
        (record(), record(augment="my.module:f"), "augment was not given, is my.module:f from step 121 on"),
        (record(), record(replicas=3), "replicas was 2, is 3 from step 121 on"),
        (record(), record(seed=1), "seed was 0, is 1 from step 121 on"),
        # What the optimizer has counts, not the setting, of which 0 is the model's own.
        (record(), record(0.5, learning_rate=0.5), "learning_rate was 0.001, is 0.5 from step 121 on"),
        (record(0.1, 0.01), record(0.1, 0.02), "learning_rate was 0.01, is 0.02 from step 121 on"),
        (
            record({"class_name": "Decay", "config": {"rate": 0.1}}),
            record({"class_name": "Decay", "config": {"rate": 0.2}}),
            "learning_rate was Decay(rate=0.1), is Decay(rate=0.2) from step 121 on",
        ),
    ],
)
def test_what_changes_is_one_line_with_its_first_step(before: Record, now: Record, line: str) -> None:
    assert lines(before, now) == [line]


def test_changes_are_recorded_over_all_continuations_also_those_without_a_line() -> None:
    first, said = record(cache="off").continuing(record(), BETWEEN)
    assert said == []
    second, _ = record(cache="off", epochs=5).continuing(Record(**first.json), ENDED)

    assert second.changes == [
        {"step": 121, "setting": "cache", "was": "auto", "is": "off"},
        {"step": 241, "setting": "epochs", "was": 4, "is": 5},
    ]


@pytest.mark.parametrize(
    ("before", "now", "moment", "message"),
    [
        ({}, {"seed": 5}, WITHIN, "seed was 0, is 5, but the run goes on 48 examples into epoch 3"),
        (
            {},
            {"shard_policy": "off"},
            WITHIN,
            "shard_policy was auto, is off, but the run goes on 48 examples",
        ),
        ({"unfreeze_at_epoch": 2}, {"unfreeze_at_epoch": 4}, BETWEEN, "was 2, is 4, but epoch 2 has begun"),
        ({"unfreeze_at_epoch": 4}, {"unfreeze_at_epoch": 2}, BETWEEN, "was 4, is 2, but epoch 2 has begun"),
        ({"unfreeze_at_epoch": 4}, {"unfreeze_at_epoch": 3}, WITHIN, "was 4, is 3, but epoch 3 has begun"),
        (
            {"unfreeze_at_epoch": 1, "fine_tuning_learning_rate": 0.1},
            {"unfreeze_at_epoch": 1, "fine_tuning_learning_rate": 0.2},
            BETWEEN,
            "fine_tuning_learning_rate was 0.1, is 0.2, but epoch 1 has begun",
        ),
        ({}, {"label_smoothing": 0.1}, ENDED, "but nothing is left to train: the run has done its 4 epochs"),
    ],
)
def test_what_cannot_change_is_refused(
    before: dict[str, Any], now: dict[str, Any], moment: Moment, message: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        lines(record(**before), record(**now), moment)
    assert message in str(caught.value)


def test_a_learning_rate_that_fine_tuning_has_replaced_is_refused() -> None:
    tuned = {"unfreeze_at_epoch": 1, "fine_tuning_learning_rate": 0.1}
    with pytest.raises(SettingsError, match=r"learning_rate was 0.001, is 0.5, but epoch 1 has begun"):
        lines(record(**tuned), record(0.5, **tuned))
    assert lines(record(unfreeze_at_epoch=1), record(0.5, unfreeze_at_epoch=1))


def scaled(factor: float, rate: float = 0.1) -> dict[str, Any]:
    return {
        "class_name": "ScaledWarmup",
        "config": {"learning_rate": rate, "factor": factor, "warmup_steps": 0},
    }


@pytest.mark.parametrize("moment", [BETWEEN, ENDED])
def test_the_number_of_workers_may_differ_where_the_learning_rate_is_scaled_by_it(moment: Moment) -> None:
    tuned = {"unfreeze_at_epoch": 1, "fine_tuning_learning_rate": 0.1, "scale_learning_rate": True}
    before, now = record(scaled(2.0), replicas=2, **tuned), record(scaled(3.0), replicas=3, **tuned)

    assert [change.setting for change in now.continuing(before, moment)[1]] == ["replicas"]
    with pytest.raises(SettingsError, match="learning_rate was ScaledWarmup"):
        lines(before, record(scaled(2.0, rate=0.2), **tuned), moment)


@pytest.mark.parametrize(
    ("changes", "moment"),
    [
        ({"seed": 5}, BETWEEN),
        ({"shard_policy": "data"}, WITHIN),
        ({"unfreeze_at_epoch": 3}, BETWEEN),
        ({"epochs": 3, "keep_checkpoints": 9, "replicas": 1}, ENDED),
    ],
)
def test_what_does_no_harm_may_change(changes: dict[str, Any], moment: Moment) -> None:
    before = record(unfreeze_at_epoch=4) if "unfreeze_at_epoch" in changes else record()
    lines(before, record(**changes), moment)


def test_effects_are_of_settings() -> None:
    assert EFFECTS.keys() - {"replicas"} <= {one.name for one in fields(TrainSettings)}


def test_settings_that_came_or_went_between_two_releases_are_not_compared() -> None:
    before = record()
    older = Record({**before.settings, "gone": 1} | {}, 2, [0.001])
    del older.settings["seed"]  # type: ignore[attr-defined]

    assert lines(older, record(seed=3)) == []


def test_what_decides_the_variables_is_fixed() -> None:
    fixed = record(gradient_accumulation_steps=2, unfreeze_at_epoch=3).fixed
    assert fixed == {
        "gradient_accumulation_steps": 2,
        "initial_model": "",
        "unfreeze_at_epoch": "an epoch",
        "learning_rate": "number",
    }
    assert record({"class_name": "Decay", "config": {}}, 0.1).fixed["learning_rate"] == "schedule, number"
