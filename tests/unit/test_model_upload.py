"""The upload to the Model Registry: its settings, the directory that is served, the evaluation."""

import json
from pathlib import Path

import pytest

from shardline.components.model_store import Measured
from shardline.components.register.registry import (
    describe,
    describe_evaluation,
    import_evaluation,
    lay_out,
)
from shardline.components.register.settings import ModelUpload
from shardline.pipelines import settings
from shardline.trainer import progress
from shardline.trainer.errors import ModelError, RunError, SettingsError
from shardline.trainer.records import restore
from tests.helpers.evaluations import EVALUATION
from tests.helpers.exports import contents, write_export

PARENT = "projects/my-project/locations/europe-west4/models/7"
BASE = 'image = "i:1"\n[train]\nreplica_count = 1\nmachine_type = "n1-standard-8"\n'
TABLE = '[model_upload]\ndisplay_name = "digits"\nserving_image_uri = "s:1"\n'


def load(tmp_path: Path, text: str) -> ModelUpload | None:
    (tmp_path / "s.toml").write_text(BASE + text)
    return settings.load(tmp_path / "s.toml").model_upload


def test_all_keys_are_read(tmp_path):
    more = f'parent_model = "{PARENT}"\nversion_aliases = ["candidate"]\nlabels = {{ team = "vision" }}\n'

    assert load(tmp_path, TABLE) == ModelUpload(display_name="digits", serving_image_uri="s:1")
    assert load(tmp_path, TABLE + more) == ModelUpload(
        display_name="digits",
        serving_image_uri="s:1",
        parent_model=PARENT,
        version_aliases=("candidate",),
        labels={"team": "vision"},
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('[model_upload]\ndisplay_name = "a"\n', "model_upload.serving_image_uri is missing"),
        (TABLE + 'parent = "a"\n', "unknown key model_upload.parent; did you mean model_upload.parent_model"),
        (TABLE + "labels = 1\n", "model_upload.labels must be a mapping of texts, got 1"),
        (TABLE + 'parent_model = "7"\n', "model_upload.parent_model must be projects/P/locations/L/models"),
        (TABLE + f'parent_model = "{PARENT}@2"\n', "without a version, got"),
        (TABLE + 'version_aliases = ["v1", "2"]\n', "an alias is .*, got '2'"),
        (TABLE + 'labels = { Team = "a" }\n', "model_upload.labels: a key is .*, got 'Team'"),
        (TABLE.replace('"digits"', "'a\"b'"), "model_upload.display_name holds '\"', which breaks"),
        (TABLE.replace("digits", "d" * 129), "must have 1 to 128 characters, got 129"),
        (TABLE.replace("s:1", ""), "model_upload.serving_image_uri is empty"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, table, message):
    with pytest.raises(SettingsError, match=message):
        load(tmp_path, table)


def test_the_model_is_the_first_version_of_its_base_path(tmp_path):
    exported = write_export(tmp_path / "exported")
    lay_out(exported, tmp_path / "serving")
    lay_out(exported, tmp_path / "serving")  # the task is tried again

    assert [path.name for path in (tmp_path / "serving").iterdir()] == ["1"]
    assert contents(tmp_path / "serving" / "1") == contents(exported / "saved_model")


@pytest.mark.parametrize("missing", ["export.json", "saved_model"])
def test_half_an_export_is_not_uploaded(tmp_path, missing):
    exported = write_export(tmp_path / "exported")
    (exported / missing).rename(tmp_path / "elsewhere")

    with pytest.raises(ModelError, match=f"no {missing} in .*; validate the model again"):
        lay_out(exported, tmp_path / "serving")
    assert not (tmp_path / "serving").exists()


def test_a_place_that_cannot_be_written_to_is_said(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(RunError, match=r"cannot copy to .*: Not a directory; upload the model again"):
        lay_out(write_export(tmp_path / "exported"), tmp_path / "file" / "serving")


def test_the_description_says_what_was_measured_and_can_be_pasted_into_json(tmp_path):
    exported = write_export(tmp_path / "exported")
    (exported / "export.json").write_text('{"fingerprint": "sha256:abc", "parameters": 12345}')

    description = describe(exported, 'recall of "\\☃" 0.97')
    assert json.loads(f'"{description}"') == 'recall of "\\☃" 0.97, 12,345 parameters, dataset sha256:abc'


CONFUSION = {
    "annotationSpecs": [{"id": "0", "displayName": "healthy"}, {"id": "1", "displayName": "sick"}],
    "rows": [[5, 1], [0, 4]],
}
AT_ONE = {
    "confidenceMetrics": [
        {"confidenceThreshold": 0.0, "maxPredictions": 1}
        | dict.fromkeys(("precisionAt1", "recallAt1", "f1ScoreAt1"), 0.9)
    ]
}
SEVERAL = {"kind": "multilabel", "accuracy": None, "confusion": [], "log_loss": None}
NUMBERS = {"kind": "regression", "accuracy": None, "confusion": [], "log_loss": None}


@pytest.mark.parametrize(
    ("changes", "schema", "metrics"),
    [
        (
            {},
            "classification",
            {**AT_ONE, "confusionMatrix": CONFUSION, "logLoss": 0.25},
        ),
        (
            {"log_loss": None, "class_names": [f"class {label}" for label in range(1000)]},
            "classification",
            AT_ONE,
        ),
        (
            {**SEVERAL, "metrics": {"macro_f1": 0.7, "micro_f1": 0.8}},
            "classification",
            {"confidenceMetrics": [{"confidenceThreshold": 0.5, "f1ScoreMicro": 0.8, "f1ScoreMacro": 0.7}]},
        ),
        (
            {**NUMBERS, "metrics": {"rmse": 53.2, "mae": 41.0, "mape": 0.25, "r2": 0.48, "examples": 44}},
            "regression",
            {
                "rootMeanSquaredError": 53.2,
                "meanAbsoluteError": 41.0,
                "meanAbsolutePercentageError": 25.0,
                "rSquared": 0.48,
            },
        ),
    ],
    ids=["classes", "many classes", "several labels", "numbers"],
)
def test_the_evaluation_is_in_the_registrys_words(changes, schema, metrics):
    measured = restore(Measured, {**EVALUATION, **changes}, "it", ModelError)

    content = describe_evaluation(measured, "test split")

    assert content["metrics_schema_uri"].endswith(f"/modelevaluation/{schema}_metrics_1.0.0.yaml")
    assert content["metrics"] == metrics


def test_where_nothing_was_uploaded_no_evaluation_is_imported(tmp_path):
    (tmp_path / "evaluation.json").write_text(json.dumps(EVALUATION))
    seen = []
    with progress.sink(seen.append):
        assert import_evaluation(tmp_path, "") == ""

    assert [event.text for event in seen] == ["nothing was uploaded: the evaluation is not imported"]
