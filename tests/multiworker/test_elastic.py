"""Two processes, then three, then one, stopped within an epoch: every example once, and the same curve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import replicas
from tests.helpers.datasets import write_dataset
from tests.helpers.elastic import BATCH, EPOCHS
from tests.helpers.history import read_history

pytestmark = [pytest.mark.multiworker, pytest.mark.timeout(240)]

COUNT = 103
#: Processes, and the step after which they end, of five an epoch; 0 for the last.
STARTS = [(2, 3), (3, 7), (1, 0)]


def write(directory: Path) -> Path:
    """Fewer shards than three processes: then each reads all of them."""
    records = {"train": COUNT, "validation": 13}
    write_dataset(directory, records=records, shape=(4, 4, 1), encoding="raw", shards=2)
    return directory


def fit(out: Path, count: int, steps: int) -> dict[str, Any]:
    resumes = out.exists()
    out.mkdir(exist_ok=True)
    outputs = replicas.run(["-m", "tests.helpers.elastic", str(out), str(steps)], count)
    assert outputs[0].count("examples into epoch") == (5 if resumes else 0), outputs[0]
    found: dict[str, Any] = json.loads((out / ("alone.json" if count == 1 else "chief-0.json")).read_text())
    return found


def test_fit_continues_with_other_numbers_of_processes(tmp_path: Path) -> None:
    write(tmp_path / "data")
    whole = fit(tmp_path / "whole", 1, 0)
    found = [fit(tmp_path / "cut", count, steps) for count, steps in STARTS][-1]

    for name, run in found.items():
        count = 98 if name == "small_last_batch" else COUNT
        assert run["history"]["seen_once"] == [count] * EPOCHS, name
        if name in ("arrays", "tf_data", "directory"):
            for key, values in whole[name]["history"].items():
                np.testing.assert_allclose(run["history"][key], values, atol=1e-5, err_msg=f"{name} {key}")
            for one, other in zip(run["weights"], whole[name]["weights"], strict=True):
                np.testing.assert_allclose(one, other, atol=1e-5, err_msg=name)
    assert found["random"]["history"]["loss"] != whole["random"]["history"]["loss"]


def train(dataset: Path, out: Path, count: int, steps: int) -> list[dict[str, Any]]:
    """Trains with batches that together are as large on any number of processes."""
    arguments = ["--dataset", str(dataset), "--model-dir", str(out), "--epochs", str(EPOCHS)]
    arguments += ["--model", "tests.helpers.elastic:of_dataset", "--max-steps", str(steps)]
    arguments += ["--per-replica-batch-size", str(BATCH // count)]
    replicas.run(["-m", "shardline.trainer.task", *arguments], count)
    return read_history(out)


def test_the_trainer_continues_with_other_numbers_of_processes(tmp_path: Path) -> None:
    dataset = write(tmp_path / "data")
    whole = train(dataset, tmp_path / "whole", 1, 0)
    found = [train(dataset, tmp_path / "cut", count, steps) for count, steps in STARTS][-1]

    assert [float(row["seen_once"]) for row in found] == [COUNT] * EPOCHS
    for row, wanted in zip(found, whole, strict=True):
        for key in ("loss", "accuracy", "val_loss", "val_accuracy"):
            np.testing.assert_allclose(float(row[key]), float(wanted[key]), atol=1e-5, err_msg=key)
