"""Splits, shard counts and dealing, as tables with the odd cases named."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from shardline.components.preprocess.plan import (
    SplitCodes,
    choose_split,
    deal,
    digests,
    refuse_empty_splits,
    shard_count,
    shard_name,
    shards_for_size,
)
from shardline.trainer.errors import SourceError

SHARES = {"train": 0.8, "validation": 0.1, "test": 0.1}
KEYS = [f"digits/{index:04d}".encode() for index in range(2000)]
POINTS = digests(KEYS, seed=0)[1]
EVERY = ("train", "validation", "test")


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


def test_shard_count_leaves_no_shard_empty_and_stays_a_multiple() -> None:
    for records in range(1, 70):
        for readers in range(1, 12):
            count = shard_count(records, 60, readers=readers, shards=8)
            assert 1 <= count <= records
            assert count % readers == 0 or records < readers


@pytest.mark.parametrize(
    ("size", "expected"), [(0, 1), (1, 1), (191 << 20, 1), (193 << 20, 2), (1 << 40, 8192)]
)
def test_shards_for_size(size: int, expected: int) -> None:
    assert shards_for_size(size, 128) == expected


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("parts", [[10], [3, 0, 1, 6], [1] * 10, [0, 10]])
def test_deal_is_round_robin_over_all_parts(count: int, parts: list[int]) -> None:
    shards: list[list[int]] = [[] for _ in range(count)]
    first = 0
    for size in parts:
        for shard, members in zip(shards, deal(np.arange(first, first + size), first, count), strict=True):
            shard += members.tolist()
        first += size
    assert [shards[place % count][place // count] for place in range(10)] == list(range(10))
    sizes = [len(shard) for shard in shards]
    assert sizes == sorted(sizes, reverse=True)


def test_shard_name() -> None:
    assert shard_name("train", 3, 16) == "train-00003-of-00016.tfrecord"


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


def test_examples_with_and_without_a_split_have_codes_of_their_own() -> None:
    codes, own = SplitCodes(SHARES), [None, *EVERY] * 50
    together = codes.codes(POINTS[:200], own).tolist()
    assert together == [int(codes.codes(POINTS[i : i + 1], own[i : i + 1])[0]) for i in range(200)]


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


def test_an_empty_split_is_refused_with_the_counts() -> None:
    with pytest.raises(
        SourceError, match=r"no example for validation and test \(train 3, validation 0, test 0\)"
    ):
        refuse_empty_splits({"train": 3, "validation": 0, "test": 0}, SHARES)
    refuse_empty_splits({"train": 3, "validation": 0, "test": 0}, {"train": 1.0})
