"""What compiles in Keras trains and is validated: losses that no file can name, one output for two."""

import json

import numpy as np
import pytest

from shardline.components import model_store
from shardline.components.validate import validation
from shardline.components.validate.rules import Gate
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.models import load_model
from shardline.trainer.train import train
from tests.helpers.datasets import write_dataset
from tests.helpers.history import read_history

OWN = "tests.helpers.unexportable:own_loss_and_metric"


def trained(dataset, out, model, **changes):
    settings = TrainSettings(dataset=str(dataset), model_dir=str(out), model=model, **changes)
    return train(settings, {})


def validated(dataset, out):
    done = validation.validate(
        out / "model.keras", dataset, out / "validation", gate=Gate(rules=("accuracy >= 0.9",))
    )
    return done, json.loads((out / "validation" / model_store.EXPORT_FILE).read_text())


def test_a_loss_and_a_metric_that_no_file_can_name_train_and_are_validated(tmp_path, capsys):
    write_dataset(tmp_path / "data")
    logs = trained(tmp_path / "data", tmp_path, OWN, epochs=3)
    done, _ = validated(tmp_path / "data", tmp_path)

    assert "labels: one-hot, as the loss own_loss takes them" in capsys.readouterr().out
    assert logs["val_categorical_accuracy"] > 0.9
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert np.min(written["val_f1_score"]) > 0.9
    assert len(json.loads(read_history(tmp_path)[-1]["f1_score"])) == 3
    assert done.blessing.blessed
    assert done.evaluation.metrics["accuracy"] > 0.9
    # Of an older training, the loss would say what the outputs are, if it could be loaded.
    assert not load_model(tmp_path / "model.keras", compiled=True).compiled


def test_a_metric_of_a_number_for_each_class_cannot_stop_a_run(tmp_path):
    write_dataset(tmp_path / "data")
    with pytest.raises(SettingsError, match=r"val_f1_score has a value for each class; .*average"):
        trained(tmp_path / "data", tmp_path, OWN, early_stopping="val_f1_score")


@pytest.mark.parametrize(
    ("from_logits", "head"), [pytest.param(False, "probability", marks=pytest.mark.matrix), (True, "logit")]
)
def test_one_output_for_two_classes_is_served_as_two_probabilities(tmp_path, from_logits, head):
    data = tmp_path / "data"
    write_dataset(data, classes=2)
    logs = trained(
        data,
        tmp_path,
        "tests.helpers.unexportable:single",
        epochs=2,
        hparams={"from_logits": from_logits},
        class_weights="balanced",
    )
    done, export = validated(data, tmp_path)

    assert json.loads((tmp_path / "settings.json").read_text())["head"] == head
    assert logs["val_accuracy"] > 0.9
    assert done.blessing.blessed
    assert export["signatures"]["serving_default"]["outputs"]["probabilities"]["shape"] == [None, 2]
    assert export["max_difference"] < 1e-5
    assert export["softmax_added"] is False
