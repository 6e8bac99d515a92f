"""Verdicts on data split by group or by time: intervals are over the groups, and the report says so."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from shardline.components import model_store
from shardline.components.validate.metrics.evaluation import Grouping
from shardline.components.validate.rules import Gate
from shardline.components.validate.validation import Validation, validate
from shardline.trainer import manifest as manifests
from tests.helpers.exports import publish_next
from tests.helpers.preprocessing import run, stored

VISITS = 20


def write(path: Path, patients: int) -> str:
    """Writes visits of patients, of whom some are always diagnosed wrongly by the sign of the score."""
    random = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["patient", "day", "score", "label"])
        for number in range(patients * VISITS):
            patient, ill = number % patients, bool(random.random() < 0.5)
            score = random.uniform(0.5, 1.5) * (1 if ill != (patient % 5 == 0) else -1)
            writer.writerow([f"p{patient}", number // patients, f"{score:.9f}", "ill" if ill else "well"])
    return f"table:{path}"


def save_model(directory: Path, weight: float = 4.0) -> Path:
    """Saves a model that takes a positive score for ill."""
    score = keras.Input((), name="score", dtype="float32")
    dense = keras.layers.Dense(2, "softmax")
    model = keras.Model([score], dense(keras.ops.expand_dims(score, -1)))
    dense.set_weights([np.array([[weight, -weight]]), np.zeros(2)])
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.save(directory / "model.keras")
    return directory / "model.keras"


def judged(directory: Path, patients: int = 60, **split: Any) -> Validation:
    run(write(directory / "visits.csv", patients), directory / "data", label="label", **split)
    return validate(save_model(directory), directory / "data", directory / "out", gate=Gate())


def test_intervals_are_over_patients_and_every_page_says_so(tmp_path: Path) -> None:
    found = judged(tmp_path, group="patient", split={"train": 0.5, "test": 0.5}).evaluation
    tested = len({*stored(tmp_path / "data", "patient")["test"]})
    assert found.groups == Grouping("patient", by_time=False, count=tested)
    assert 20 < tested < 40
    share = found.metrics["accuracy"]
    rows = 2 * 1.96 * np.sqrt(share * (1 - share) / found.examples)
    lower, upper = found.intervals["accuracy"]
    assert upper - lower > 2.5 * rows
    pages = [tmp_path / "out" / name for name in (model_store.REPORT_FILE, model_store.CARD_TEXT_FILE)]
    assert all(f"over {tested} groups of " in page.read_text() for page in pages)

    publish_next(tmp_path / "out", tmp_path / "champions")
    model, data, out = tmp_path / "model.keras", tmp_path / "data", tmp_path / "again"
    again = validate(model, data, out, gate=Gate(champion_uri=str(tmp_path / "champions")))
    assert again.evaluation.champion_comparison.groups == found.groups
    (rule,) = (rule for rule in again.blessing.rules if rule.name == "examples")
    assert (rule.verdict, rule.note) == ("passed", f"in {tested} groups of 'patient'")


def test_a_split_by_time_is_judged_by_blocks_of_neighbours(tmp_path: Path) -> None:
    found = judged(tmp_path, split_by_time="day", split={"train": 0.5, "test": 0.5}).evaluation
    assert str(found.groups) == "10 blocks of time"  # the days of the test split
    assert "day" not in {item.name.partition("=")[0] for item in found.slices}


def test_groups_that_cannot_be_read_are_a_warning(tmp_path: Path) -> None:
    found = judged(tmp_path)
    assert not found.evaluation.groups
    assert not any("intervals" in warning for warning in found.blessing.warnings)
    manifest = manifests.load(tmp_path / "data")
    settings = {**manifest.settings, "group": "hospital"}
    manifests.save(dataclasses.replace(manifest, settings=settings), tmp_path / "data")
    again = validate(tmp_path / "model.keras", tmp_path / "data", tmp_path / "again", gate=Gate())
    (warning,) = (each for each in again.blessing.warnings if "intervals" in each)
    assert warning.startswith("The split is by 'hospital', but the gate cannot read its values")


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_one_group_shows_nothing_beyond_chance(tmp_path: Path) -> None:
    found = judged(tmp_path, patients=3, group="patient", split={"train": 0.5, "test": 0.5})
    assert str(found.evaluation.groups) == "1 group of 'patient'"
    lower, upper = found.evaluation.intervals["accuracy"]
    assert upper - lower > 0.7
    (rule,) = (rule for rule in found.blessing.rules if rule.name == "baseline")
    assert rule.verdict == "failed"
    assert " over 1 group of 'patient', must be below" in rule.note
    assert any("has only 1 group of 'patient'" in warning for warning in found.blessing.warnings)
