"""Splits, strata, shard counts and dealing, as tables with the odd cases named."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from shardline.components.preprocess.plan.plan import shard_count, split_among_shards
from shardline.components.preprocess.plan.records import (
    Numbers,
    SplitCodes,
    StratifiedSplit,
    assign_splits,
    choose_split,
    digests,
)
from shardline.trainer.manifest import SPLITS

SHARES = {"train": 0.8, "validation": 0.1, "test": 0.1}
KEYS = [f"digits/{index:04d}".encode() for index in range(2000)]
POINTS = digests(KEYS, seed=0)[1]
EVERY = SPLITS


@pytest.mark.parametrize(
    ("records", "training_records", "readers", "shards", "expected"),
    [
        pytest.param(1437, 1437, 1, 8, 8, id="training split"),
        pytest.param(180, 1437, 1, 8, 1, id="small split gets fewer"),
        pytest.param(180, 1437, 2, 8, 2, id="but a multiple of the readers"),
        pytest.param(1437, 1437, 3, 8, 9, id="rounded up to a multiple"),
        pytest.param(5000, 1000, 1, 8, 8, id="a test split larger than the training split"),
        pytest.param(5, 5, 1, 8, 5, id="no empty shard"),
        pytest.param(7, 7, 2, 8, 6, id="no empty shard, and a multiple"),
        pytest.param(3, 1000, 4, 8, 3, id="fewer records than readers"),
        pytest.param(1, 1, 1, 1, 1, id="one record"),
        pytest.param(100, 100, 16, 8, 16, id="more readers than shards were asked for"),
        pytest.param(17, 17, 16, 8, 16, id="one reader gets two"),
        pytest.param(10, 0, 1, 8, 8, id="no training split"),
    ],
)
def test_shard_count(records: int, training_records: int, readers: int, shards: int, expected: int) -> None:
    assert shard_count(records, training_records, readers=readers, shards=shards) == expected


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("parts", [[10], [3, 0, 1, 6], [1] * 10, [0, 10]])
def test_deal_is_round_robin_over_all_parts(count: int, parts: list[int]) -> None:
    shards: list[list[int]] = [[] for _ in range(count)]
    first = 0
    for size in parts:
        for shard, members in zip(
            shards, split_among_shards(np.arange(first, first + size), first, count), strict=True
        ):
            shard += members.tolist()
        first += size
    assert [shards[place % count][place // count] for place in range(10)] == list(range(10))
    sizes = [len(shard) for shard in shards]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("own", "existing", "possible"),
    [
        pytest.param("test", {"train", "test"}, {"test"}, id="a split of the source stays"),
        pytest.param("validation", {"train", "validation"}, {"validation"}, id="validation too"),
        pytest.param("train", set(EVERY), {"train"}, id="nothing is missing"),
        pytest.param("train", {"train", "test"}, {"train", "validation"}, id="validation is carved out"),
        pytest.param("train", {"train", "validation"}, {"train", "test"}, id="test is carved out"),
        pytest.param("train", {"train"}, set(EVERY), id="both are carved out"),
        pytest.param(None, {"train", "test"}, set(EVERY), id="an example without one"),
    ],
)
def test_own_splits(own: str | None, existing: set[str], possible: set[str]) -> None:
    assert {choose_split(point / 100, own, existing, SHARES) for point in range(100)} == possible


@pytest.mark.parametrize(
    "shares",
    [SHARES, {"train": 0.6, "test": 0.4}, {"train": 1.0}, {"train": 0.5, "validation": 0.25, "test": 0.25}],
)
@pytest.mark.parametrize(
    "existing", [set(), {"train"}, {"train", "test"}, {"train", "validation"}, set(EVERY)]
)
@pytest.mark.parametrize("own", [None, *EVERY])
def test_codes_stand_for_what_is_chosen(
    own: str | None, existing: set[str], shares: dict[str, float]
) -> None:
    codes = SplitCodes(shares)
    splits = codes.splits(existing)
    points = POINTS[:200]
    chosen = [choose_split(float(point) / 2**64, own, existing, shares) for point in points]
    assert [splits[code] for code in codes.codes(points, [own] * len(points))] == chosen
    assert len(splits) == codes.count


@pytest.mark.parametrize(("own", "existing"), [(None, set[str]()), ("train", {"train"})])
def test_splits_have_about_their_shares(own: str | None, existing: set[str]) -> None:
    codes = SplitCodes(SHARES)
    splits = Counter(codes.splits(existing)[code] for code in codes.codes(POINTS, [own] * len(POINTS)))
    for split, share in SHARES.items():
        # Binomial: three standard deviations of 2,000 draws are 0.027 at most.
        assert splits[split] / len(POINTS) == pytest.approx(share, abs=0.027)


def test_the_order_is_independent_of_the_split() -> None:
    first_half = POINTS[np.argsort(digests(KEYS, seed=0)[0])][: len(POINTS) // 2]
    codes = SplitCodes(SHARES)
    splits = Counter(codes.splits(())[code] for code in codes.codes(first_half, [None] * len(first_half)))
    assert splits["train"] / len(first_half) == pytest.approx(SHARES["train"], abs=0.04)


def test_the_seed_changes_everything() -> None:
    # Of two independent orders, a first half has half of the other's.
    middle = np.uint64(2**63)
    first, other = (digests(KEYS, seed)[0] < middle for seed in (0, 2**64 + 1))
    assert (first & other).sum() / len(KEYS) == pytest.approx(0.25, abs=0.03)


def counts(sizes: list[int], shares: dict[str, float]) -> list[int]:
    return np.bincount(assign_splits(np.array(sizes), shares), sizes, len(SPLITS)).astype(int).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("sizes", "shares", "expected"),
    [
        pytest.param([1] * 1000, SHARES, [800, 100, 100], id="shares"),
        pytest.param([1] * 10, SHARES, [8, 1, 1], id="ten"),
        pytest.param([1] * 3, SHARES, [1, 1, 1], id="one for each split"),
        pytest.param([1] * 2, SHARES, [2, 0, 0], id="too few for each: training has them"),
        pytest.param(
            [1], {"train": 0.2, "validation": 0.4, "test": 0.4}, [1, 0, 0], id="even of a small share"
        ),
        pytest.param([1] * 4, {"train": 0.1, "test": 0.9}, [1, 0, 3], id="two splits"),
        pytest.param([1] * 2, {"train": 0.5, "validation": 0.5}, [1, 1, 0], id="without a test split"),
        pytest.param([1] * 5, {"train": 1.0}, [5, 0, 0], id="training alone"),
        pytest.param([5, 1, 1, 1, 1, 1], SHARES, [4, 5, 1], id="duplicates first are together"),
        pytest.param([1, 1, 8], SHARES, [8, 1, 1], id="duplicates last"),
        pytest.param([9], SHARES, [9, 0, 0], id="nothing else"),
    ],
)
def test_examples_of_a_class_are_allotted(
    sizes: list[int], shares: dict[str, float], expected: list[int]
) -> None:
    assert counts(sizes, shares) == expected


def _some(number: int, seed: int = 0) -> tuple[Numbers, Numbers]:
    random = np.random.default_rng(seed)
    return random.integers(0, 2**64, number, np.uint64), random.choice(3, number, p=[0.9, 0.09, 0.01])


def test_duplicates_of_two_classes_are_in_one_split() -> None:
    points, labels = _some(1000)
    points[::2] = points[1::2]
    found = StratifiedSplit(points, labels, SHARES).codes(points)
    assert (found[::2] == found[1::2]).all()
    assert set(found.tolist()) == {0, 1, 2}
