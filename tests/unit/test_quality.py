"""What a run or a version has reached, in words, whatever its labels are."""

import pytest

from shardline.components.shelf.version import Version
from shardline.components.text import quality

NAME = "20261122T020105-dfbfc13e"


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"accuracy": 0.98123, "macro_f1": 0.97, "recall[class=accuracy]": 0.5}, "accuracy 0.9812"),
        ({"macro_f1": 0.5, "subset_accuracy": 0.25}, "macro_f1 0.5000"),
        ({"mae": 41.0, "rmse": 53.2481}, "rmse 53.25"),
        ({"kind.accuracy": 0.97, "price.rmse": 3.14159}, "kind.accuracy 0.9700, price.rmse 3.142"),
        ({"accuracy": None}, ""),  # of a run that measured none
        ({}, ""),
    ],
)
def test_the_metric_that_counts_first_is_told(metrics, words):
    assert quality(metrics) == words


def test_a_version_of_an_earlier_release_has_an_accuracy_alone():
    version = {"version": NAME, "path": f"versions/{NAME}", "fingerprint": "sha256:a", "created": "2026"}

    assert Version(**version, accuracy=0.9).quality == "accuracy 0.9000"
    assert Version(**version, quality="rmse 53.2").quality == "rmse 53.2"
