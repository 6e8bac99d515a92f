"""What a run or a version has reached, in words, whatever its labels are."""

import pytest

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
