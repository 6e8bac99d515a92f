"""A model that could not be saved, loaded again or exported is refused before the first step."""

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
        ("lambda_layer", "has a Lambda layer, whose code is not run from a file; make it a layer of its own"),
        (
            "own_function",
            r"cannot be loaded once it is saved: .*activation function identifier.*@keras.saving.register",
        ),
        (
            "unregistered",
            r"cannot be loaded once it is saved: .*Unregistered.*; .*register_keras_serializable",
        ),
        ("unconfigured", r"cannot be saved: .*Unconfigured.* get_config\(\)"),
        ("forgetful", r"has other outputs after it is saved and loaded: some of its weights are not saved"),
        ("called", r"calls Python while it predicts \(PyFunc\)"),
        ("eager", r"cannot be traced for an export: .*for any number of examples"),
        ("two_inputs", r"the model has 2 inputs; an exported model takes one, the image"),
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
