import dataclasses
import json

import pytest

from components.export_validate.evaluation import Evaluation
from components.export_validate.gates import judge
from trainer.errors import SettingsError


def evaluation(accuracy=0.95, non_finite=0):
    return Evaluation(
        fingerprint="sha256:0",
        split="test",
        examples=180,
        accuracy=accuracy,
        log_loss=0.1,
        non_finite=non_finite,
        class_names=("a", "b"),
        classes=(),
        confusion=((90, 0), (0, 90)),
        mistakes=(),
    )


@pytest.mark.parametrize(
    ("accuracy", "non_finite", "min_accuracy", "blessed", "reason"),
    [
        (0.9778, 0, 0.95, True, "accuracy 0.9778 >= 0.95"),
        (0.95, 0, 0.95, True, "accuracy 0.9500 >= 0.95"),  # the limit itself is good enough
        (0.9, 0, 0.95, False, "accuracy 0.9000 is not >= 0.95"),
        # Rounded to four digits it would read "0.9500 is not >= 0.95".
        (0.949996, 0, 0.95, False, "accuracy 0.949996 is not >= 0.95"),
        (0.99, 3, 0.95, False, "examples with non-finite output 3 is not == 0"),
        (
            0.5,
            1800,
            0.95,
            False,
            "accuracy 0.5000 is not >= 0.95; examples with non-finite output 1,800 is not == 0",
        ),
        (0.0, 0, 0.0, True, "accuracy 0.0000 >= 0"),  # a threshold of zero lets everything through
        (1.0, 0, 1.0, True, "accuracy 1.0000 >= 1"),
    ],
)
def test_judge(accuracy, non_finite, min_accuracy, blessed, reason):
    verdict = judge(evaluation(accuracy, non_finite), min_accuracy)

    assert (verdict.blessed, verdict.reason) == (blessed, reason)


def test_every_rule_is_listed_with_both_sides_and_verdict():
    content = json.loads(json.dumps(judge(evaluation(0.9, non_finite=2), 0.95).to_json()))

    assert [tuple(rule.values()) for rule in content["rules"]] == [
        ("accuracy", 0.9, ">=", 0.95, "failed"),
        ("examples with non-finite output", 2, "==", 0, "failed"),
    ]
    assert content["blessed"] is False


@pytest.mark.parametrize("min_accuracy", [-0.01, 1.01, 95.0, float("nan")])
def test_min_accuracy_out_of_range_is_refused(min_accuracy):
    with pytest.raises(SettingsError, match=r"within 0\.\.1, got"):
        judge(evaluation(), min_accuracy)


def test_a_verdict_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        judge(evaluation(), 0.99).blessed = True
