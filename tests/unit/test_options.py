"""Options of our pipelines by their own names: encoding=jpeg, not data_options={"encoding": "jpeg"}."""

from __future__ import annotations

from typing import Any

import pytest

from shardline.pipelines.check import check_run
from shardline.pipelines.parameters import check_parameters
from shardline.pipelines.spec import load_pipeline
from shardline.trainer.base.errors import ShardlineError
from tests.helpers.markdown import ROOT

SPEC = load_pipeline(ROOT / "compiled" / "retrain.yaml")


def test_an_option_is_put_into_the_parameter_that_holds_it() -> None:
    """Given beside the parameter itself, it wins."""
    given = {"data_options": '{"encoding": "jpeg", "shards": 3}', "encoding": "png", "early_stopping": "loss"}

    weights = {"class_weights": "balanced"}
    assert check_parameters(SPEC, weights) == {"train_options": weights}
    weights = {"class_weights": '{"a": 2}'}
    assert check_parameters(SPEC, weights) == {"train_options": {"class_weights": {"a": 2}}}
    assert check_parameters(SPEC, given | {"formats": '["onnx"]', "undecided": "block"}) == {
        "data_options": {"encoding": "png", "shards": 3},
        "train_options": {"early_stopping": "loss"},
        "gate_options": {"formats": ["onnx"], "undecided": "block"},
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"encodng": "jpeg"}, "the pipeline has no parameter 'encodng'; did you mean encoding?"),
        ({"checkpoint_steps": "1.0"}, "the parameter checkpoint_steps is declared as int, got '1.0'"),
        (
            {"formats": "onnx"},
            "the parameter formats is declared as a JSON array, got 'onnx' (it is not JSON",
        ),
        ({"encoding": "webp"}, "encoding must be 'keep', 'jpeg', 'png' or 'raw', got 'webp'"),
        ({"data_options": {"encodng": "jpeg"}}, "unknown key data_options.encodng; did you mean"),
        # The pipeline itself says how many replicas train.
        ({"readers": "3"}, "the pipeline has no parameter 'readers'"),
        ({"data_options": {"readers": 3}}, "data_options has readers, which has a value of its own"),
        ({"train_options": {"epochs": 3}}, "train_options has epochs, which has a value of its own"),
    ],
)
def test_a_wrong_option_is_refused_before_a_run(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardlineError) as failure:
        check_run(SPEC, given, here=True)

    assert message in str(failure.value)
