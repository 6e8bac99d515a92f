"""Identity: which directories belong to which run."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardline.trainer.base.errors import SettingsError
from shardline.trainer.checkpoint.store import Identity, check_model_dir, claim

RUN = Identity(
    "mnist_cnn", "aa11", {"model/0000/dense/kernel": "float32 6x5", "model/0001/dense/bias": "float32 5"}
)


_claim = functools.partial(claim, allow_new_data=False, write=True)


def test_a_directory_is_claimed_once_by_the_writer_and_known_again(tmp_path: Path) -> None:
    _claim(tmp_path / "new", RUN, write=False)
    assert not (tmp_path / "new").exists()
    _claim(tmp_path / "new", RUN)
    _claim(tmp_path / "new", RUN)
    _claim(tmp_path / "new", RUN, write=False)

    assert json.loads((tmp_path / "new" / "run.json").read_text())["variables"] == RUN.variables


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format was 1, is 2"),
        ({"model": "resnet50"}, "model was 'mnist_cnn', is 'resnet50'"),
        ({"dataset": "bb22"}, "dataset was 'aa11', is 'bb22' (allow_new_data continues on the new one)"),
        (
            {"variables": {**RUN.variables, "model/0001/dense/bias": "float32 7"}},
            "variable model/0001/dense/bias was float32 5, is float32 7",
        ),
        (
            {"variables": {"model/0001/dense/bias": "float32 5"}},
            "variable model/0000/dense/kernel was float32 6x5, is absent",
        ),
    ],
)
@pytest.mark.parametrize("write", [True, False])
def test_another_run_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str, write: bool
) -> None:
    _claim(tmp_path, RUN)
    before = (tmp_path / "run.json").read_bytes()

    with pytest.raises(SettingsError) as caught:
        _claim(tmp_path, replace(RUN, **changes), write=write)  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"{tmp_path} holds checkpoints of another run: {message}; choose another directory or delete that one"
    )
    assert (tmp_path / "run.json").read_bytes() == before


def test_new_data_can_be_allowed_but_not_another_model(tmp_path: Path) -> None:
    _claim(tmp_path, RUN)
    _claim(tmp_path, replace(RUN, dataset="bb22"), allow_new_data=True)
    _claim(tmp_path, replace(RUN, dataset="bb22"))

    with pytest.raises(SettingsError, match="model was"):
        _claim(tmp_path, replace(RUN, model="resnet50"), allow_new_data=True)


def test_the_evaluator_compares_no_variables(tmp_path: Path) -> None:
    _claim(tmp_path, RUN)
    _claim(tmp_path, replace(RUN, variables={}), write=False)
    with pytest.raises(SettingsError, match="dataset was"):
        _claim(tmp_path, replace(RUN, variables={}, dataset="bb22"), write=False)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(SettingsError, match=r"/run.json is not JSON: .*; choose another directory"):
        _claim(tmp_path, RUN)


def test_a_model_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    check_model_dir(tmp_path, model="mnist_cnn", dataset="aa11", allow_new_data=False)
    (tmp_path / "settings.json").write_text(
        json.dumps({"model": "mnist_cnn", "fingerprint": "aa11", "seed": 0})
    )

    check_model_dir(tmp_path, model="mnist_cnn", dataset="aa11", allow_new_data=False)
    check_model_dir(tmp_path, model="mnist_cnn", dataset="bb22", allow_new_data=True)
    with pytest.raises(SettingsError, match="holds the model of another run: model was 'mnist_cnn', is 'x'"):
        check_model_dir(tmp_path, model="x", dataset="aa11", allow_new_data=False)
    with pytest.raises(SettingsError, match="dataset was 'aa11', is 'bb22'"):
        check_model_dir(tmp_path, model="mnist_cnn", dataset="bb22", allow_new_data=False)
