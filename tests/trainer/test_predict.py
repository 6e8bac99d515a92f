"""A trained model's answers, computed on one device or on several."""

import csv
import sys

import numpy as np
import pytest

from shardline.trainer.checkpoint.preemption import Preemption
from shardline.trainer.errors import ModelError
from shardline.trainer.predict import predict as predictions
from shardline.trainer.saving import load_model
from shardline.trainer.settings import TrainSettings
from shardline.trainer.train import train
from tests.helpers import programs
from tests.helpers.datasets import write_dataset
from tests.helpers.replicas import ROOT


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trained")
    write_dataset(directory / "data", records={"train": 96, "validation": 24, "test": 37})
    settings = TrainSettings(
        dataset=str(directory / "data"), model="mnist_cnn", model_dir=str(directory), epochs=3
    )
    train(settings, {}, Preemption(1))
    return directory


def predict(trained, name, *options):
    """Runs the command in a process of its own: a CPU can be divided only once."""
    command = [sys.executable, "-m", "shardline.trainer.predict", trained / "model.keras", trained / "data"]
    done = programs.run(
        [*map(str, command), str(trained / name), *options], cwd=ROOT, capture_output=True, text=True
    )
    return done, trained / name


def test_two_devices_give_the_same_answers_as_one(trained):
    done, one = predict(trained, "one.csv")
    assert "37 examples" in done.stdout
    _, two = predict(trained, "two.csv", "--cpu-devices", "2", "--batch-size", "4")

    with one.open(newline="") as first, two.open(newline="") as second:
        rows, others = list(csv.DictReader(first)), list(csv.DictReader(second))
    assert len(rows) == 37
    assert sum(row["label"] == row["predicted"] for row in rows) > 33
    for row, other in zip(rows, others, strict=True):
        assert (row["label"], row["predicted"]) == (other["label"], other["predicted"])
        assert float(row["top"]) == pytest.approx(float(other["top"]), abs=1e-5)


def test_a_model_that_answers_nan_is_refused(trained, tmp_path):
    model = load_model(trained / "model.keras")
    model.set_weights([np.full_like(weight, np.nan) for weight in model.get_weights()])
    model.save(tmp_path / "model.keras")

    with pytest.raises(ModelError, match=r"gives 37 of 37 examples of the test split an answer .*NaN"):
        predictions(tmp_path / "model.keras", trained / "data")


def test_a_split_that_is_not_there_is_named(trained):
    done, output = predict(trained, "none.csv", "--split", "holdout")

    assert done.returncode == 2
    assert "no holdout split, only ['test', 'train', 'validation']" in done.stderr
    assert not output.exists()
