"""Settings of a training run and of an environment, where outputs go, and what is refused."""

from pathlib import Path

import pytest

from shardline.pipelines import settings as environments
from shardline.trainer.base.deserialize import restore_integers
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.base.settings import TrainSettings, output_dirs
from shardline.trainer.task import parse

KINDS = {"MODEL": "model", "CHECKPOINT": "checkpoints", "TENSORBOARD_LOG": "logs"}
AIP = {f"AIP_{kind}_DIR": f"gs://bucket/job/{name}/" for kind, name in KINDS.items()}


def settings(**changes):
    return TrainSettings(**{"dataset": "data", "model": "mnist_cnn", **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"keep_checkpoints": 0}, "keep_checkpoints must be at least 1"),
        ({"learning_rate": -1.0}, "learning_rate must be at least 0, got -1.0"),
        ({"seed": -1}, "seed must be 0 to 4,294,967,294, got -1"),
        ({"seed": 2**32 - 1}, "seed must be 0 to 4,294,967,294, got 4294967295"),
        (
            {"strategy": "magic"},
            "strategy must be 'auto', 'one_device', .* or 'parameter_server', got 'magic'",
        ),
        ({"model": ""}, "model is empty"),
    ],
)
def test_a_value_out_of_range_is_refused(changes, message):
    with pytest.raises(SettingsError, match=message):
        settings(**changes)


def test_learning_rate_zero_keeps_the_default_of_the_model():
    assert settings(hparams={"units": 3}).model_arguments == {"units": 3}
    assert settings(learning_rate=0.1).model_arguments == {"learning_rate": 0.1}
    # A pipeline's parameter 1.0 arrives as 1, which Keras' optimizers refuse.
    assert isinstance(settings(learning_rate=1).model_arguments["learning_rate"], float)


def test_a_job_dir_holds_what_the_platforms_base_directory_holds():
    """As the platform's own samples give it: above AIP_*, below the flag of each directory."""
    arguments = ["--dataset", "d", "--model", "m", "--job-dir", "gs://bucket/runs/7/"]
    given = output_dirs(parse([*arguments, "--tensorboard-log-dir", "/tb"]), AIP)

    assert given.model == Path("/gcs/bucket/runs/7/model")
    assert given.checkpoints == Path("/gcs/bucket/runs/7/checkpoints")
    assert given.logs == Path("/tb")


def test_flags_win_over_the_platform_and_the_platform_over_defaults():
    given = output_dirs(settings(model_dir="/out", tensorboard_log_dir="/tb"), AIP)
    assert given.model == Path("/out")
    assert given.checkpoints == Path("/gcs/bucket/job/checkpoints")
    assert given.logs == Path("/tb")

    assert output_dirs(settings(), AIP).model == Path("/gcs/bucket/job/model")
    assert output_dirs(settings(model_dir="/out"), {}).checkpoints == Path("/out/checkpoints")
    with pytest.raises(SettingsError, match="AIP_MODEL_DIR"):
        output_dirs(settings(), {})


def test_the_command_line_and_the_settings_have_the_same_defaults():
    assert parse(["--dataset", "data", "--model", "mnist_cnn"]) == settings(
        model_dir=parse(["--dataset", "data", "--model", "mnist_cnn"]).model_dir
    )
    assert parse(["--dataset", "d", "--model", "m", "--hparams", '{"a": 1}']).hparams == {"a": 1}


def test_hyperparameters_get_their_integers_back():
    given = {"units": 64.0, "rate": 0.5, "deep": {"layers": [2.0, 1.5]}, "on": True}
    assert repr(restore_integers(given)) == repr({**given, "units": 64, "deep": {"layers": [2, 1.5]}})


GOOD = 'image = "i:1"\n[train]\nreplica_count = 3\nmachine_type = "n1-standard-4"\n'


def test_a_settings_file_is_read(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text(GOOD)

    found = environments.load_settings(path)

    assert (found.image, found.train.cluster.replica_count) == ("i:1", 3)
    assert found.train.cluster.chief.machine_type == "n1-standard-4"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("replica_count = 3", "replica_count = 0", "replica_count must be at least 1, got 0"),
        ("replica_count = 3", "replica_count = '3'", "train.replica_count must be a whole number, got '3'"),
        ("replica_count", "replica_cuont", "unknown key train.replica_cuont; did you mean"),
        ('machine_type = "n1-standard-4"', "", "train.machine_type is missing"),
        ('image = "i:1"', "", "image is missing"),
        ("[train]", "[train", "s.toml is not TOML"),
        ("[train]", "accelerator_count = 1\n[train]", "unknown key accelerator_count"),
    ],
)
def test_a_wrong_settings_file_is_explained(tmp_path, old, new, message):
    path = tmp_path / "s.toml"
    path.write_text(GOOD.replace(old, new))

    with pytest.raises(SettingsError, match=message) as error:
        environments.load_settings(path)
    assert str(path) in str(error.value)


def test_a_missing_settings_file_is_named(tmp_path):
    (tmp_path / "vertex.toml.example").touch()
    with pytest.raises(SettingsError, match=r"no settings file .*; copy .*vertex\.toml\.example to it"):
        environments.load_settings(tmp_path / "vertex.toml")
    with pytest.raises(SettingsError, match="no settings file"):
        environments.load_settings(tmp_path / "none.toml")
