"""The upload to the Model Registry: its settings, the directory that is served."""

import json
from pathlib import Path

import pytest

from shardline.components.register import ModelUpload
from shardline.components.register.registration import copy_saved_model, describe_model
from shardline.pipelines import settings
from shardline.trainer.base.errors import ModelError, RunError, SettingsError
from tests.helpers.exports import contents, write_export

PARENT = "projects/my-project/locations/europe-west4/models/7"
BASE = 'image = "i:1"\n[train]\nreplica_count = 1\nmachine_type = "n1-standard-8"\n'
TABLE = '[model_upload]\ndisplay_name = "digits"\nserving_image_uri = "s:1"\n'


def load(tmp_path: Path, text: str) -> ModelUpload | None:
    (tmp_path / "s.toml").write_text(BASE + text)
    return settings.load_settings(tmp_path / "s.toml").model_upload


def test_all_keys_are_read(tmp_path):
    more = f'parent_model = "{PARENT}"\ntags = {{ team = "vision" }}\n'

    assert load(tmp_path, TABLE) == ModelUpload(display_name="digits", serving_image_uri="s:1")
    assert load(tmp_path, TABLE + more) == ModelUpload(
        display_name="digits", serving_image_uri="s:1", parent_model=PARENT, tags={"team": "vision"}
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('[model_upload]\ndisplay_name = "a"\n', "model_upload.serving_image_uri is missing"),
        (TABLE + 'parent = "a"\n', "unknown key model_upload.parent; did you mean model_upload.parent_model"),
        (TABLE + "tags = 1\n", "model_upload.tags must be a mapping of texts, got 1"),
        (TABLE + 'parent_model = "7"\n', "model_upload.parent_model must be projects/P/locations/L/models"),
        (TABLE + f'parent_model = "{PARENT}@2"\n', "without a version, got"),
        (TABLE.replace("s:1", ""), "model_upload.serving_image_uri must be a text"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, table, message):
    with pytest.raises(SettingsError, match=message):
        load(tmp_path, table)


def test_the_model_is_the_first_version_of_its_base_path(tmp_path):
    exported = write_export(tmp_path / "exported")
    copy_saved_model(exported, tmp_path / "serving")
    copy_saved_model(exported, tmp_path / "serving")  # the task is tried again

    assert [path.name for path in (tmp_path / "serving").iterdir()] == ["1"]
    assert contents(tmp_path / "serving" / "1") == contents(exported / "saved_model")


@pytest.mark.parametrize("missing", ["export.json", "saved_model"])
def test_half_an_export_is_not_uploaded(tmp_path, missing):
    exported = write_export(tmp_path / "exported")
    (exported / missing).rename(tmp_path / "elsewhere")

    with pytest.raises(ModelError, match=f"no {missing} in .*; validate the model again"):
        copy_saved_model(exported, tmp_path / "serving")
    assert not (tmp_path / "serving").exists()


def test_a_place_that_cannot_be_written_to_is_said(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(RunError, match=r"cannot copy to .*: Not a directory; upload the model again"):
        copy_saved_model(write_export(tmp_path / "exported"), tmp_path / "file" / "serving")


def test_the_description_says_what_was_measured_and_can_be_pasted_into_json(tmp_path):
    exported = write_export(tmp_path / "exported", **{'"\\☃".accuracy': 0.97})
    (exported / "export.json").write_text('{"fingerprint": "sha256:abc", "parameters": 12345}')

    description = describe_model(exported)
    assert json.loads(f'"{description}"') == '"\\☃".accuracy 0.9700, 12,345 parameters, dataset sha256:abc'
