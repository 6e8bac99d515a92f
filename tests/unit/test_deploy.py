"""The settings of a deployment."""

from dataclasses import fields
from pathlib import Path

import pytest

from shardline.components.register import Deploy
from shardline.pipelines import settings
from shardline.trainer.base.errors import SettingsError

ENDPOINT = "projects/my-project/locations/europe-west4/endpoints/9"
BASE = 'image = "i:1"\n[train]\nreplica_count = 1\nmachine_type = "n1-standard-8"\n'
UPLOAD = '[model_upload]\ndisplay_name = "digits"\nserving_image_uri = "s:1"\n'
DEPLOY = f'[deploy]\nendpoint = "{ENDPOINT}"\nmachine_type = "n1-standard-2"\n'


def load(directory: Path, text: str) -> settings.Settings:
    (directory / "s.toml").write_text(BASE + text)
    return settings.load_settings(directory / "s.toml")


def test_the_tables_are_read(tmp_path: Path) -> None:
    loaded = load(tmp_path, UPLOAD + DEPLOY + "max_replica_count = 3\n")

    assert loaded.deploy == Deploy(endpoint=ENDPOINT, machine_type="n1-standard-2", max_replica_count=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DEPLOY, r"deploy needs a model in the Model Registry; add a table \[model_upload\]"),
        (UPLOAD + '[deploy]\nendpoint = "e"\n', "deploy.machine_type is missing"),
        (UPLOAD + DEPLOY + "min_replica_count = true\n", "deploy.min_replica_count must be"),
        (UPLOAD + DEPLOY + "min_replica_count = 5\n", "deploy.min_replica_count is 1 to max_replica_count"),
        (UPLOAD + DEPLOY.replace(ENDPOINT, "123"), "deploy.endpoint must be projects/.*, got '123'"),
        (UPLOAD + DEPLOY.replace("n1-standard-2", ""), "deploy.machine_type must be a text .*, got ''"),
        (UPLOAD + DEPLOY + 'accelerator_type = "NVIDIA_L4"\n', "deploy.accelerator_type and"),
        (UPLOAD + DEPLOY + "accelerator_count = 1\n", "deploy.accelerator_type and accelerator_count go"),
        (UPLOAD.replace('"digits"', "'the \"best\"'"), "model_upload.display_name must be a text without"),
        (
            UPLOAD + 'tags = { Team = "a" }\n',
            "model_upload.tags must be names and values of lower-case letters.*'Team': 'a'",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(tmp_path, text)


def test_the_example_shows_every_key() -> None:
    """Uncommented, it is loaded by a test of the compiler."""
    example = (Path(__file__).resolve().parents[2] / "settings" / "vertex.toml.example").read_text()
    text = example[example.index("# [deploy]") :]

    assert not {item.name for item in fields(Deploy) if item.name not in text}
