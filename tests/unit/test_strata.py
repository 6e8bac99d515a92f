"""Allotment of a class's examples to splits, and what duplicates and newcomers change of it."""

from __future__ import annotations

import numpy as np
import pytest

from shardline.components.preprocess.rows import Numbers
from shardline.components.preprocess.strata import Strata, allot, points_of_known
from shardline.trainer.data.manifest import SPLITS

USUAL = {"train": 0.8, "validation": 0.1, "test": 0.1}


def counts(sizes: list[int], shares: dict[str, float]) -> list[int]:
    return np.bincount(allot(np.array(sizes), shares), sizes, len(SPLITS)).astype(int).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("sizes", "shares", "expected"),
    [
        pytest.param([1] * 1000, USUAL, [800, 100, 100], id="shares"),
        pytest.param([1] * 10, USUAL, [8, 1, 1], id="ten"),
        pytest.param([1] * 3, USUAL, [1, 1, 1], id="one for each split"),
        pytest.param([1] * 2, USUAL, [2, 0, 0], id="too few for each: training has them"),
        pytest.param(
            [1], {"train": 0.2, "validation": 0.4, "test": 0.4}, [1, 0, 0], id="even of a small share"
        ),
        pytest.param([1] * 4, {"train": 0.1, "test": 0.9}, [1, 0, 3], id="two splits"),
        pytest.param([1] * 2, {"train": 0.5, "validation": 0.5}, [1, 1, 0], id="without a test split"),
        pytest.param([1] * 5, {"train": 1.0}, [5, 0, 0], id="training alone"),
        pytest.param([5, 1, 1, 1, 1, 1], USUAL, [4, 5, 1], id="duplicates first are together"),
        pytest.param([1, 1, 8], USUAL, [8, 1, 1], id="duplicates last"),
        pytest.param([9], USUAL, [9, 0, 0], id="nothing else"),
    ],
)
def test_examples_of_a_class_are_allotted(
    sizes: list[int], shares: dict[str, float], expected: list[int]
) -> None:
    assert counts(sizes, shares) == expected


def test_no_split_is_an_example_away_from_its_share() -> None:
    for number in range(20, 500):
        found = counts([1] * number, USUAL)
        assert max(abs(found[SPLITS.index(name)] - number * share) for name, share in USUAL.items()) < 1


def _some(number: int, seed: int = 0) -> tuple[Numbers, Numbers]:
    random = np.random.default_rng(seed)
    return random.integers(0, 2**64, number, np.uint64), random.choice(3, number, p=[0.9, 0.09, 0.01])


def test_newcomers_move_few_others() -> None:
    points, labels = _some(11_000)
    before = Strata(points[:10_000], labels[:10_000], USUAL).codes(points[:10_000])
    after = Strata(points, labels, USUAL).codes(points)[:10_000]
    assert (before != after).mean() < 0.02


def test_the_order_of_examples_is_of_no_matter() -> None:
    points, labels = _some(1000)
    order = np.random.default_rng(1).permutation(1000)
    found = Strata(points, labels, USUAL).codes(points)
    assert (Strata(points[order], labels[order], USUAL).codes(points) == found).all()


def test_duplicates_of_two_classes_are_in_one_split() -> None:
    points, labels = _some(1000)
    points[::2] = points[1::2]
    found = Strata(points, labels, USUAL).codes(points)
    assert (found[::2] == found[1::2]).all()
    assert set(found.tolist()) == {0, 1, 2}


def test_points_of_what_is_known_follow_from_the_salt() -> None:
    known = bytes(range(16))
    assert len(points_of_known(known, 0)) == 2
    assert not set(points_of_known(known, 0).tolist()) & set(points_of_known(known, 1).tolist())
