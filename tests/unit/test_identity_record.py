"""Identity record: changes between a checkpoint and the run that resumes it, and what may not change."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.checkpoint.identity import IdentityRecord


def record(*rates: Any, replicas: int = 2, **changes: Any) -> IdentityRecord:
    settings = TrainSettings(**{"dataset": "data", "model": "mnist_cnn", "epochs": 4, **changes})
    return IdentityRecord.of(settings, replicas, list(rates or (0.001,)))


def scaled(factor: float, rate: float = 0.1) -> dict[str, Any]:
    return {
        "class_name": "ScaledWarmup",
        "config": {"learning_rate": rate, "factor": factor, "warmup_steps": 0},
    }


@pytest.mark.parametrize(
    ("before", "now", "line"),
    [
        (record(), record(), ""),
        (record(), record(dataset="elsewhere", model_dir="there"), ""),
        (
            record(),
            record(per_replica_batch_size=32),
            "per_replica_batch_size was 16, is 32 from step 121 on",
        ),
        (
            record(),
            record(augment="my.module:f", epochs=5),
            "epochs was 4, is 5, augment was not set, is my.module:f from step 121 on",
        ),
        (record(), record(replicas=3), "replicas was 2, is 3 from step 121 on"),
        # What the optimizer has counts, not the setting, of which 0 is the model's own.
        (record(), record(0.5, learning_rate=0.5), "learning_rate was 0.001, is 0.5 from step 121 on"),
        (record(0.1, 0.01), record(0.1, 0.02), "learning_rate was 0.01, is 0.02 from step 121 on"),
        (
            record({"class_name": "Decay", "config": {"rate": 0.1}}),
            record({"class_name": "Decay", "config": {"rate": 0.2}}),
            "learning_rate was Decay(rate=0.1), is Decay(rate=0.2) from step 121 on",
        ),
        (record(scaled(2.0)), record(scaled(3.0), replicas=3), "replicas was 2, is 3 from step 121 on"),
    ],
)
def test_changes_are_one_line_with_their_first_step(
    before: IdentityRecord, now: IdentityRecord, line: str
) -> None:
    assert now.continuing(before, 121)[1] == line


def test_changes_are_recorded_over_all_continuations() -> None:
    first, _ = record(cache="off").continuing(record(), 121)
    second, _ = record(cache="off", epochs=5).continuing(IdentityRecord(**asdict(first)), 241)

    assert second.changes == [
        {"step": 121, "setting": "cache", "was": "auto", "is": "off"},
        {"step": 241, "setting": "epochs", "was": 4, "is": 5},
    ]


def test_settings_added_or_removed_by_a_release_are_not_compared() -> None:
    older = {name: value for name, value in record().settings.items() if name != "seed"}
    assert record(seed=3).continuing(IdentityRecord({**older, "gone": 1}, 2, [0.001]), 121)[1] == ""


def test_settings_of_variables_and_example_order_are_identity() -> None:
    assert record(gradient_accumulation_steps=2, unfreeze_at_epoch=3, seed=5).fixed == {
        "fine_tuning_learning_rate": 0.0,
        "gradient_accumulation_steps": 2,
        "initial_model": "",
        "seed": 5,
        "unfreeze_at_epoch": 3,
        "learning_rate": "number",
    }
    assert record({"class_name": "Decay", "config": {}}, 0.1).fixed["learning_rate"] == "schedule, number"


def test_a_learning_rate_that_fine_tuning_replaces_is_identity_but_for_the_replicas() -> None:
    tuned = {"unfreeze_at_epoch": 1, "fine_tuning_learning_rate": 0.1, "scale_learning_rate": True}
    two, three = record(scaled(2.0), **tuned), record(scaled(3.0), replicas=3, **tuned)

    assert two.fixed == three.fixed
    assert two.fixed != record(scaled(2.0, rate=0.2), **tuned).fixed
