"""The metric of a tuning job: reported after each validation, and checked before the first step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import keras
import pytest

from shardline.trainer import task
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.base.progress import read_measurements
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.loop.callbacks import Counters, TuningMetric
from shardline.trainer.manifest import DatasetInfo
from tests.helpers.datasets import write_dataset, write_table


@keras.saving.register_keras_serializable("tests")
class Objective(keras.Sequential):  # type: ignore[misc]  # keras has no types
    """Its evaluation returns one number, which is not a metric."""

    def test_step(self, data: Any) -> dict[str, Any]:
        return {"objective": 2 * super().test_step(data)["loss"]}


def objective(dataset: DatasetInfo) -> keras.Model:
    """A model of images."""
    layers = [keras.layers.Flatten(), keras.layers.Dense(dataset.num_classes, "softmax")]
    model = Objective([keras.Input(dataset.input_shape), *layers])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def settings(directory: Path, metric: str, model: str = "mlp", **changes: Any) -> TrainSettings:
    return TrainSettings(
        dataset=str(directory / "data"),
        model=model,
        model_dir=str(directory / "model"),
        epochs=2,
        tuning_metric=metric,
        **changes,
    )


def test_it_is_reported_after_each_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics" / "output.metrics"
    monkeypatch.setenv("CLOUD_ML_HP_METRIC_FILE", str(path))
    write_table(tmp_path / "data")

    last = task.run_replica(settings(tmp_path, "val_loss"))

    measured = read_measurements(path, "val_loss")
    assert [step for step, _, _ in measured] == [6, 12]
    assert measured[-1][1] == last["val_loss"]


def test_a_metric_that_there_is_not_is_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "data", records={"train": 32})

    with pytest.raises(SettingsError, match="tuning_metric: no metric 'val_loss'; there are accuracy, loss"):
        task.run_replica(settings(tmp_path, "val_loss"))


def test_what_an_evaluation_of_ones_own_returns_is_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics" / "output.metrics"
    monkeypatch.setenv("CLOUD_ML_HP_METRIC_FILE", str(path))
    write_dataset(tmp_path / "data")
    own = {"model": f"{__name__}:objective"}
    message = "no metric 'val_loss'; there are loss, val_objective"
    with pytest.raises(SettingsError, match=f"tuning_metric: {message}"):
        task.run_replica(settings(tmp_path, "val_loss", **own))
    with pytest.raises(SettingsError, match=f"early_stopping: {message}"):
        task.run_replica(settings(tmp_path, "", early_stopping="val_loss", **own))
    assert not (tmp_path / "model" / "settings.json").exists()

    last = task.run_replica(settings(tmp_path, "val_objective", **own))

    measured = read_measurements(path, "val_objective")
    assert [step for step, _, _ in measured] == [6, 12]
    assert measured[-1][1] == last["val_objective"]


@pytest.mark.parametrize("logs", [{"val_loss": math.nan}, {}])
def test_what_is_no_number_is_not_reported(
    tmp_path: Path, logs: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "output.metrics"
    callback = TuningMetric("val_loss", Counters(1), {"CLOUD_ML_HP_METRIC_FILE": str(path)})

    callback.on_epoch_end(0, logs)

    assert not path.read_text()
    assert "val_loss is not finite and is not reported" in capsys.readouterr().out
