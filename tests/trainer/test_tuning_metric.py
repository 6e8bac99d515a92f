"""The metric of a tuning job: reported after each validation, and checked before the first step."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from shardline.trainer import task
from shardline.trainer.errors import SettingsError
from shardline.trainer.measurements import read_measurements
from shardline.trainer.reports import Counters, TuningMetric
from shardline.trainer.settings import TrainSettings
from tests.helpers.datasets import write_table


def settings(directory: Path, metric: str) -> TrainSettings:
    return TrainSettings(
        dataset=str(directory / "data"),
        model="mlp",
        model_dir=str(directory / "model"),
        epochs=2,
        tuning_metric=metric,
    )


def test_it_is_reported_after_each_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics" / "output.metrics"
    monkeypatch.setenv("CLOUD_ML_HP_METRIC_FILE", str(path))
    write_table(tmp_path / "data")

    last = task.run(settings(tmp_path, "val_loss"))

    measured = read_measurements(path, "val_loss")
    assert [step for step, _, _ in measured] == [6, 12]
    assert measured[-1][1] == last["val_loss"]


def test_a_metric_that_there_is_not_is_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "data", records={"train": 32})

    with pytest.raises(SettingsError, match="tuning_metric: no metric 'val_loss'; there are accuracy, loss"):
        task.run(settings(tmp_path, "val_loss"))


@pytest.mark.parametrize("logs", [{"val_loss": math.nan}, {}])
def test_what_is_no_number_is_not_reported(
    tmp_path: Path, logs: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "output.metrics"
    callback = TuningMetric("val_loss", Counters(1, 1), {"CLOUD_ML_HP_METRIC_FILE": str(path)})

    callback.on_epoch_end(0, logs)

    assert not path.exists()
    assert "val_loss is not finite and is not reported" in capsys.readouterr().out
