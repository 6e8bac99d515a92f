"""Names in MLflow's registry, and the files that make a model of MLflow of an export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardline.components.model_store import Export
from shardline.components.model_store.catalog import open_store
from shardline.components.model_store.mlflow_registry import log_model, mirror_champion, model_files
from shardline.components.model_store.mlflow_registry import registered_name as name_of
from shardline.trainer.base.errors import SettingsError
from tests.helpers.exports import publish_next, write_export

OUTPUTS = {"label": {"dtype": "int64", "shape": [None]}, "label_name": {"dtype": "string", "shape": [None]}}
VERSIONS = {"python": "3.11.7", "numpy": "2.4.6", "tensorflow": "2.21.0", "keras": "3.15.1"}


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("gs://bucket/models/digits", "digits"),
        ("gs://bucket/models/digits/", "digits"),
        ("gs://bucket", "bucket"),
        ("/srv/champions", "champions"),
        # Neither ":" nor a name that is a path, which MLflow refuses; no quote, which its filters end at.
        ("/srv/it's: new", "it-s-new"),
        ("/srv/..digits", "digits"),
        ("/srv/größe_2.1", "größe_2.1"),
        ("/", "model"),
    ],
)
def test_a_registered_model_is_named_like_the_last_part_of_the_store(location: str, name: str) -> None:
    assert name_of(location) == name


def _described(export: Export) -> tuple[dict[str, object], dict[str, list[dict[str, object]]], object]:
    made = model_files(export, "3.17.2")
    model = json.loads(made["MLmodel"])
    signature = {side: json.loads(schema) for side, schema in (model["signature"] or {}).items()}
    return model, signature, json.loads(made["input_example.json"])


def test_the_columns_of_a_table_are_tensors_and_texts_are_objects() -> None:
    inputs = {"city": {"dtype": "string", "shape": [None]}, "sizes": {"dtype": "float32", "shape": [None, 2]}}
    rows = [{"sizes": [1.5, None], "city": "Ulm"}, {"sizes": [0.0, 2.0], "city": "Rom"}]
    export = Export(
        inputs={"city": {}, "sizes": {}},
        signatures={"serving_default": {"inputs": inputs, "outputs": OUTPUTS}},
        golden={"signature_name": "serving_default", "instances": rows, "predictions": []},
        versions=VERSIONS,
    )
    model, signature, example = _described(export)
    assert signature["inputs"] == [
        {"type": "tensor", "name": "city", "tensor-spec": {"dtype": "object", "shape": [-1]}},
        {"type": "tensor", "name": "sizes", "tensor-spec": {"dtype": "float32", "shape": [-1, 2]}},
    ]
    assert [item["name"] for item in signature["outputs"]] == ["label", "label_name"]
    assert example == {"city": ["Ulm", "Rom"], "sizes": [[1.5, None], [0.0, 2.0]]}
    assert model_files(export, "3.17.2")["requirements.txt"].split() == [
        "mlflow==3.17.2",
        "tensorflow==2.21.0",
        "keras==3.15.1",
    ]
    assert model["saved_input_example_info"] == {"artifact_path": "input_example.json", "type": "ndarray"}


def test_encoded_images_are_a_column_of_bytes() -> None:
    images = {"images": {"dtype": "string", "shape": [None]}}
    export = Export(
        inputs={"image": {}},
        signatures={"serving_default": {"inputs": images, "outputs": OUTPUTS}},
        golden={"signature_name": "serving_default", "instances": [{"b64": "aGk="}], "predictions": []},
    )
    _, signature, example = _described(export)
    assert signature["inputs"] == [{"type": "binary", "name": "images"}]
    assert example == {"columns": ["images"], "data": [["aGk="]]}


def test_an_export_of_an_earlier_release_has_neither_signature_nor_example() -> None:
    model, _, _ = _described(Export())
    assert (model["signature"], model["saved_input_example_info"]) == (None, None)


def test_without_a_server_nothing_is_logged_or_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    exported = write_export(tmp_path / "out")
    publish_next(exported, tmp_path / "champions")
    mirror_champion(str(tmp_path / "champions"))
    log_model(exported, "job")
    assert capsys.readouterr() == ("", "")


def test_a_name_of_mlflow_is_no_model_store() -> None:
    with pytest.raises(
        SettingsError,
        match="models:/digits: MLflow's registry is a copy of a model store; give its directory",
    ):
        open_store("models:/digits")
