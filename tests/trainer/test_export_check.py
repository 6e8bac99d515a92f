"""A model that could not be saved, loaded again or exported is refused: others are in `compiling`."""

import pytest

from shardline.trainer.base.errors import ModelError
from shardline.trainer.loop.build import build
from shardline.trainer.models.interface import check_export
from tests.helpers.datasets import write_dataset
from tests.helpers.heads import read_head


@pytest.fixture(scope="module")
def info(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("dataset"), records={"train": 6}).info()


def check(name, info):
    model = build(f"tests.helpers.unexportable:{name}", info, {})
    read_head(model, info)
    check_export(model, info)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "own_function",
            r"cannot be loaded once it is saved: .*activation function identifier.*@keras.saving.register",
        ),
        ("eager", r"cannot be traced for an export: .*for any number of examples"),
    ],
)
def test_what_would_fail_after_training_is_refused_before_it(info, model, message):
    with pytest.raises(ModelError, match=message) as error:
        check(model, info)
    assert "\n" not in str(error.value)


def test_what_cannot_be_loaded_but_is_not_to_be_exported_is_saved_only(info):
    check_export(build("tests.helpers.unexportable:lambda_layer", info, {}), info, exported=False)
    with pytest.raises(ModelError, match="the model cannot be saved"):
        check_export(build("tests.helpers.unexportable:unconfigured", info, {}), info, exported=False)


@pytest.mark.parametrize("model", ["scaled", "own_loss_and_metric"])
def test_what_can_be_loaded_without_its_compilation_is_let_through(info, model):
    check(model, info)


def test_layers_of_keras_need_no_trial(info, monkeypatch):
    model = build("tests.helpers.models:restless", info, {})
    monkeypatch.setattr(model, "save", lambda path: pytest.fail("it was saved"))

    check_export(model, info)
