"""One training run in one process: what it writes, how it resumes, what it refuses."""

import dataclasses
import json

import keras
import numpy as np
import pytest

from shardline.trainer import manifest as manifests
from shardline.trainer.base.errors import DatasetError, DivergedError, ModelError, RestartError, SettingsError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.manifest import Feature
from shardline.trainer.models.saving import load_model
from shardline.trainer.preemption import Preemption
from shardline.trainer.train import train
from tests.helpers.datasets import write_dataset
from tests.helpers.history import read_history


def run(dataset, out, **changes):
    changes = {"model": "mnist_cnn", "epochs": 2, **changes}
    settings = TrainSettings(dataset=str(dataset), model_dir=str(out), **changes)
    return train(settings, {})


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
    assert settings["learning_rates"] == [0.002]  # of mnist_cnn, as no learning_rate was set
    assert list(tmp_path.glob("logs/train/events.out.tfevents.*"))


def rows(out):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in read_history(out)]


def test_a_run_that_was_cut_short_within_an_epoch_ends_with_the_same_weights_and_history(dataset, tmp_path):
    """Dropout's random state, Adam's moments and the metrics of the epoch in hand are in the checkpoint."""
    model = "tests.helpers.models:dropout"
    run(dataset, tmp_path / "whole", model=model, epochs=3)
    for steps in (4, 9, 0):
        run(dataset, tmp_path / "parts", model=model, epochs=3, max_steps=steps)

    for whole, parts in zip(weights(tmp_path / "whole"), weights(tmp_path / "parts"), strict=True):
        np.testing.assert_array_equal(whole, parts)
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    assert [row["examples"] for row in rows(tmp_path / "parts")] == ["96"] * 3


def test_a_run_resumes_with_another_batch_size_within_an_epoch(dataset, tmp_path):
    run(dataset, tmp_path, epochs=1, max_steps=2)
    run(dataset, tmp_path, epochs=1, per_replica_batch_size=7)

    assert [row["examples"] for row in rows(tmp_path)] == ["96"]


def test_a_batch_size_of_0_is_16_or_what_a_worker_has(dataset, tmp_path):
    run(dataset, tmp_path, epochs=1, per_replica_batch_size=0)

    assert json.loads((tmp_path / "settings.json").read_text())["settings"]["per_replica_batch_size"] == 16


def test_a_run_that_was_stopped_between_the_last_step_and_the_end_of_an_epoch(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(Preemption, "requested", True)
    with pytest.raises(RestartError, match="a checkpoint was saved at step 6; start the same command again"):
        run(dataset, tmp_path, epochs=1, steps_per_execution=6)
    monkeypatch.undo()
    run(dataset, tmp_path, epochs=1)

    (row,) = rows(tmp_path)
    assert row["examples"] == "96"
    assert 0 < float(row["loss"]) < 1.2


def test_checkpoints_by_steps_are_kept_up_to_a_number(dataset, tmp_path):
    run(dataset, tmp_path, epochs=2, checkpoint_steps=2, keep_checkpoints=4)

    kept = sorted(int(path.stem.removeprefix("ckpt-")) for path in tmp_path.glob("checkpoints/*.index"))
    assert kept == [6, 8, 10, 12]


def test_checkpoints_by_time(dataset, tmp_path):
    run(dataset, tmp_path, epochs=1, checkpoint_minutes=1e-9, steps_per_execution=1, keep_checkpoints=9)

    assert len(list(tmp_path.glob("checkpoints/*.index"))) == 6


def test_max_time_ends_a_run_which_can_be_resumed(dataset, tmp_path, capsys):
    run(dataset, tmp_path, epochs=2, max_time=1e-9)
    assert "training ends after 1 steps: max_time" in capsys.readouterr().out
    assert (tmp_path / "model.keras").exists()
    run(dataset, tmp_path, epochs=2)

    assert [row["examples"] for row in rows(tmp_path)] == ["96", "96"]


def test_a_loss_that_is_not_finite_stops_the_run_with_step_and_shards(dataset, tmp_path):
    with pytest.raises(
        DivergedError, match=r"since step [2-9] \(epoch 1\).*train-00000-of-00002.*learning rate"
    ):
        run(dataset, tmp_path, model="tests.helpers.models:exploding", steps_per_execution=4)
    assert not (tmp_path / "model.keras").exists()


def test_other_data_is_refused_unless_it_is_allowed(dataset, tmp_path):
    run(dataset, tmp_path / "out", epochs=1)
    write_dataset(tmp_path / "other", seed=1)

    with pytest.raises(SettingsError, match=r"dataset was 'sha256:.*allow_new_data"):
        run(tmp_path / "other", tmp_path / "out", epochs=2)
    run(tmp_path / "other", tmp_path / "out", epochs=2, allow_new_data=True)
    assert [row["epoch"] for row in rows(tmp_path / "out")] == ["1", "2"]


@pytest.mark.parametrize(
    "changes",
    [
        {
            "precision": "bfloat16",
            "jit_compile": "on",
            "class_weights": "balanced",
            "augment": "tests.helpers.augmentations:brighten",
        },
        {"hparams": {"label_smoothing": 0.1}},
        {"precision": "float16"},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_a_model_learns_with_each_option(dataset, tmp_path, changes):
    assert run(dataset, tmp_path, epochs=4, **changes)["val_accuracy"] > 0.9


def test_checkpoints_of_another_run_are_refused(dataset, tmp_path):
    run(dataset, tmp_path, epochs=1)

    with pytest.raises(
        SettingsError, match=r"of another run: model was 'mnist_cnn', is 'tests.helpers.models"
    ):
        run(dataset, tmp_path, model="tests.helpers.models:synchronized")


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"model": "mnist_cn"}, ModelError, "mnist_cn.*mnist_cnn"),
        ({"model": "tests.helpers.models:dropuot"}, ModelError, "has no 'dropuot', it has dropout"),
        ({"model": "tests.helpers.nowhere:f"}, ModelError, "tests.helpers.nowhere"),
        ({"model": "tests.helpers.models:not_a_function"}, ModelError, "not a function but int"),
        ({"model": "tests.helpers.models:no_model"}, ModelError, "returned str, not a keras.Model"),
        ({"model": "tests.helpers.models:wrong_input"}, ModelError, r"takes images of shape \(5, 5, 1\)"),
        ({"hparams": {"depth": 3}}, ModelError, r"\['depth'\].*it takes \(dataset"),
        ({"model": "resnet50", "hparams": {"weights": "none.h5"}}, ModelError, "32 pixels"),
        ({"per_replica_batch_size": 97}, SettingsError, "97 is larger than the training split of 96"),
        ({"strategy": "one_device", "cpu_devices": 3}, SettingsError, "cpu_devices 3 divides the CPU"),
        ({"strategy": "parameter_server"}, SettingsError, "needs parameter servers"),
        ({"callbacks": ("tests.helpers.models:nothing",)}, SettingsError, "has no 'nothing'"),
        ({"class_weights": {"left": 2}}, SettingsError, "no class 'left'"),
        ({"class_weights": '{"left": 2}'}, SettingsError, r'such as {"No": 1, "Yes": 4}, no text'),
        ({"initial_model": "nowhere.keras"}, ModelError, "nowhere.keras"),
        (
            {
                "model": "tests.helpers.unexportable:unsaveable",
                "allow_unexportable": True,
                "transform": "tests.helpers.unexportable:floats",
            },
            ModelError,
            "the model cannot be saved: weights stay here",
        ),
        ({"cache": "disk"}, SettingsError, "cache must be 'auto', 'memory' or 'off', got 'disk'"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_written(dataset, tmp_path, changes, kind, message):
    with pytest.raises(kind, match=message):
        run(dataset, tmp_path / "out", **changes)
    assert not (tmp_path / "out" / "settings.json").exists()


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
