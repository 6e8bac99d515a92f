"""One training run in one process: what it writes, how it resumes, what it refuses."""

import dataclasses
import json
import shutil

import keras
import numpy as np
import pytest

from tests.helpers.datasets import write_dataset
from trainer.callbacks.history import read_history
from trainer.data import manifest as manifests
from trainer.data.manifest import Feature
from trainer.errors import DatasetError, ModelError, SettingsError
from trainer.saving import load_model
from trainer.settings import TrainSettings
from trainer.train import train


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dataset")
    write_dataset(directory)
    return directory


def run(dataset, out, **changes):
    changes = {"model": "mnist_cnn", "epochs": 2, **changes}
    return train(TrainSettings(dataset=str(dataset), model_dir=str(out), **changes), {})


def weights(out):
    return [w.copy() for w in load_model(out / "model.keras").get_weights()]


def test_a_run_writes_model_history_metrics_and_settings(dataset, tmp_path):
    logs = run(dataset, tmp_path, epochs=4)

    assert logs["val_accuracy"] > 0.9
    assert load_model(tmp_path / "model.keras").input_shape == (None, 12, 12, 3)
    assert [row["epoch"] for row in read_history(tmp_path)] == ["1", "2", "3", "4"]
    assert float(read_history(tmp_path)[-1]["val_loss"]) == logs["val_loss"]
    assert json.loads((tmp_path / "metrics.json").read_text())["loss"] == logs["loss"]
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["global_batch_size"] == 16
    assert settings["versions"]["keras"] == keras.__version__
    assert list(tmp_path.glob("logs/train/events.out.tfevents.*"))


def test_an_interrupted_run_ends_with_the_same_weights(dataset, tmp_path):
    """Dropout included: its random state is part of the checkpoint."""
    model = "tests.helpers.models:dropout"
    run(dataset, tmp_path / "whole", model=model, epochs=3)
    run(dataset, tmp_path / "parts", model=model, epochs=1)
    run(dataset, tmp_path / "parts", model=model, epochs=3)

    for whole, parts in zip(weights(tmp_path / "whole"), weights(tmp_path / "parts"), strict=True):
        np.testing.assert_array_equal(whole, parts)
    assert [row["epoch"] for row in read_history(tmp_path / "parts")] == ["1", "2", "3"]


def test_a_model_with_its_own_train_step_trains_and_loads_in_safe_mode(dataset, tmp_path):
    logs = run(dataset, tmp_path, model="tests.helpers.models:own_step", epochs=6)

    assert logs["accuracy"] > 0.6
    assert type(load_model(tmp_path / "model.keras")).__name__ == "OwnStep"


def test_checkpoints_of_another_run_are_refused(dataset, tmp_path):
    run(dataset, tmp_path, epochs=1)

    with pytest.raises(SettingsError, match=r"another run: model was 'mnist_cnn', is 'tests.helpers.models"):
        run(dataset, tmp_path, model="tests.helpers.models:synchronized")


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"model": "mnist_cn"}, ModelError, "mnist_cn.*mnist_cnn"),
        ({"model": "tests.helpers.models:dropuot"}, ModelError, "has no 'dropuot', it has dropout"),
        ({"model": "tests.helpers.nowhere:f"}, ModelError, "tests.helpers.nowhere"),
        ({"model": "tests.helpers.models:not_a_function"}, ModelError, "not a function but int"),
        ({"model": "tests.helpers.models:no_model"}, ModelError, "returned str, not a keras.Model"),
        ({"model": "tests.helpers.models:uncompiled"}, ModelError, "not compiled; call model.compile"),
        (
            {"model": "tests.helpers.models:wrong_classes"},
            ModelError,
            r"output is shape \(n, 7\), the dataset has 3 classes",
        ),
        ({"model": "tests.helpers.models:wrong_input"}, ModelError, r"takes images of shape \(5, 5, 1\)"),
        ({"model": "tests.helpers.models:undeclared_logits"}, ModelError, "not probabilities.*from_logits"),
        ({"hparams": {"depth": 3}}, ModelError, r"\['depth'\].*it takes \(dataset"),
        ({"model": "resnet50"}, ModelError, "at least 32 pixels a side"),
        ({"model": "resnet50", "hparams": {"weights": "none.h5"}}, ModelError, "32 pixels"),
        ({"per_replica_batch_size": 97}, SettingsError, "97 is larger than the training split of 96"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_written(dataset, tmp_path, changes, kind, message):
    with pytest.raises(kind, match=message):
        run(dataset, tmp_path / "out", **changes)
    assert not (tmp_path / "out" / "model.keras").exists()


def test_a_directory_without_a_manifest_is_refused(tmp_path):
    with pytest.raises(DatasetError, match=r"no manifest.json in .*shardline preprocess"):
        run(tmp_path, tmp_path / "out")


def test_a_dataset_without_a_train_split_is_refused(tmp_path):
    write_dataset(tmp_path, records={"train": 0, "validation": 8, "test": 8})

    with pytest.raises(DatasetError, match="no train split"):
        run(tmp_path, tmp_path / "out")


def test_images_that_differ_in_size_are_refused_at_once(tmp_path):
    manifest = write_dataset(tmp_path)
    features = (Feature("image", "uint8", (None, 12, 3), "jpeg"), *manifest.features[1:])
    manifests.save(dataclasses.replace(manifest, features=features), tmp_path)

    with pytest.raises(DatasetError, match="differ in size and cannot be batched"):
        run(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_resnet50_refuses_missing_weights(tmp_path):
    write_dataset(tmp_path, records={"train": 8, "validation": 4, "test": 4}, shape=(32, 32, 1))

    with pytest.raises(ModelError, match=r"no weights file 'none.h5'"):
        run(
            tmp_path,
            tmp_path / "out",
            model="resnet50",
            hparams={"weights": "none.h5"},
            per_replica_batch_size=4,
        )


def test_resnet50_takes_grey_images_and_weights_from_a_path(tmp_path):
    write_dataset(tmp_path / "data", records={"train": 8, "validation": 4, "test": 4}, shape=(32, 32, 1))
    path = tmp_path / "base.weights.h5"
    keras.applications.ResNet50(weights=None, include_top=False).save_weights(path)
    run(
        tmp_path / "data",
        tmp_path / "out",
        model="resnet50",
        epochs=1,
        per_replica_batch_size=4,
        hparams={"weights": str(path)},
    )

    trained = load_model(tmp_path / "out" / "model.keras")
    assert len(trained.trainable_variables) == 4  # the head: two dense layers
    shutil.rmtree(tmp_path / "out")


def test_a_damaged_model_file_is_named(tmp_path):
    with pytest.raises(ModelError, match="no model file"):
        load_model(tmp_path / "model.keras")
    (tmp_path / "model.keras").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="cannot load"):
        load_model(tmp_path / "model.keras")
