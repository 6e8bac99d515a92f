"""Identity record: changes between a checkpoint and the run that resumes it, and what may not change."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.checkpoint.store import IdentityRecord


def record(*rates: Any, replicas: int = 2, **changes: Any) -> IdentityRecord:
    settings = TrainSettings(**{"dataset": "data", "model": "mnist_cnn", "epochs": 4, **changes})
    return IdentityRecord.of(settings, replicas, list(rates or (0.001,)))


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


def test_settings_of_variables_and_example_order_are_identity() -> None:
    assert record(gradient_accumulation_steps=2, seed=5).fixed == {
        "gradient_accumulation_steps": 2,
        "initial_model": "",
        "seed": 5,
        "learning_rate": "number",
    }
    assert record({"class_name": "Decay", "config": {}}, 0.1).fixed["learning_rate"] == "schedule, number"
