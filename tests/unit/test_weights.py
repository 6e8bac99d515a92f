"""What a file of tests costs, against what it is recorded to cost."""

from __future__ import annotations

from tests.helpers.weights import Weight, grown


def weights(**busy: float) -> dict[str, Weight]:
    return {name: (seconds, 0.0, 1) for name, seconds in busy.items()}


def test_a_file_that_grew_by_more_than_a_fifth_is_named() -> None:
    (line,) = grown(weights(a=100, b=100, c=100), weights(a=100, b=160, c=100, new=500))
    assert line.startswith("b took 160 s")


def test_a_slower_machine_is_no_growth() -> None:
    assert grown(weights(a=100, b=50), weights(a=300, b=150)) == []


def test_seconds_of_a_small_file_are_no_growth() -> None:
    assert grown(weights(a=100, b=1), weights(a=100, b=3)) == []
