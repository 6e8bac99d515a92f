"""Saved models: which parts of an untrusted file are read, and what is never run."""

import json
import sys
from pathlib import Path

import keras
import pytest

from shardline.trainer.base.errors import ModelError
from shardline.trainer.models.saving import load_model


@pytest.fixture
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model file with a settings.json next to it that names a module which can be imported."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.save(tmp_path / "model.keras")
    (tmp_path / "settings.json").write_text(json.dumps({"model": "downloaded_code:build"}))
    (tmp_path / "downloaded_code.py").write_text("def build(dataset): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "downloaded_code", raising=False)
    return tmp_path / "model.keras"


def test_a_module_that_a_file_names_is_not_imported(downloaded: Path) -> None:
    assert load_model(downloaded).output_shape == (None, 1)
    assert "downloaded_code" not in sys.modules


def test_a_named_model_function_is_imported(downloaded: Path) -> None:
    load_model(downloaded, function="downloaded_code:build")
    assert "downloaded_code" in sys.modules


def test_the_error_for_a_file_that_may_need_code_names_the_option(downloaded: Path) -> None:
    downloaded.write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"cannot load .*--model-function downloaded_code:build"):
        load_model(downloaded)
    with pytest.raises(ModelError, match=r"cannot load [^;]*$"):
        load_model(downloaded, function="downloaded_code:build")
