"""Splits, shard counts and dealing, as tables with the odd cases named."""

from __future__ import annotations

from collections import Counter

import pytest

from components.preprocess.plan import SHARES, choose_split, deal, make_plan, shard_count, shard_name
from trainer.errors import SourceError

KEYS = [f"digits/{index:04d}" for index in range(2000)]
NO_SPLITS: list[str | None] = [None] * len(KEYS)


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
    ("members", "count", "sizes"),
    [
        pytest.param(6, 3, [2, 2, 2], id="even"),
        pytest.param(7, 3, [3, 2, 2], id="the longer one comes first"),
        pytest.param(8, 3, [3, 3, 2], id="two longer ones come first"),
        pytest.param(1, 1, [1], id="one record"),
    ],
)
def test_deal_is_round_robin(members: int, count: int, sizes: list[int]) -> None:
    ordered = [100 + place for place in range(members)]
    shards = deal("train", ordered, count)
    assert [len(shard.members) for shard in shards] == sizes
    assert [shards[place % count].members[place // count] for place in range(members)] == ordered


def test_shard_name() -> None:
    assert shard_name("train", 3, 16) == "train-00003-of-00016.tfrecord"


def test_splits_have_about_their_shares() -> None:
    splits = Counter(choose_split(key, None, set(), 0) for key in KEYS)
    for split, share in SHARES.items():
        # Binomial: three standard deviations of 2,000 draws are 0.027 at most.
        assert splits[split] / len(KEYS) == pytest.approx(share, abs=0.027)


@pytest.mark.parametrize(
    ("own", "existing", "possible"),
    [
        pytest.param("test", {"train", "test"}, {"test"}, id="a split of the source stays"),
        pytest.param("validation", {"train", "validation"}, {"validation"}, id="validation too"),
        pytest.param("train", {"train", "validation", "test"}, {"train"}, id="nothing is missing"),
        pytest.param("train", {"train", "test"}, {"train", "validation"}, id="validation is carved out"),
        pytest.param("train", {"train", "validation"}, {"train", "test"}, id="test is carved out"),
        pytest.param("train", {"train"}, {"train", "validation", "test"}, id="both are carved out"),
        pytest.param(None, {"train", "test"}, {"train", "validation", "test"}, id="an example without one"),
    ],
)
def test_own_splits(own: str | None, existing: set[str], possible: set[str]) -> None:
    assert {choose_split(key, own, existing, 0) for key in KEYS} == possible


def test_a_missing_split_takes_its_share_of_the_training_split() -> None:
    splits = Counter(choose_split(key, "train", {"train", "test"}, 0) for key in KEYS)
    assert splits["validation"] / len(KEYS) == pytest.approx(SHARES["validation"], abs=0.02)


def _as_keys(keys: list[str], **options: int) -> dict[str, list[list[str]]]:
    settings = {"readers": 2, "shards": 8, "seed": 0} | options
    plan = make_plan(keys, [None] * len(keys), **settings)
    return {split: [[keys[i] for i in shard.members] for shard in shards] for split, shards in plan.items()}


def test_every_example_is_planned_once() -> None:
    plan = make_plan(KEYS, NO_SPLITS, readers=2, shards=8, seed=0)
    planned = [index for shards in plan.values() for shard in shards for index in shard.members]
    assert sorted(planned) == list(range(len(KEYS)))
    assert [shard.file for shard in plan["validation"]] == [shard_name("validation", i, 2) for i in range(2)]


def test_the_plan_does_not_depend_on_the_order_of_the_source() -> None:
    assert _as_keys(KEYS) == _as_keys(KEYS[::-1])


def test_shards_mix_what_is_sorted_in_the_source() -> None:
    for members in _as_keys(KEYS)["train"]:
        from_first_half = sum(key < KEYS[1000] for key in members) / len(members)
        assert 0.35 < from_first_half < 0.65  # 200 fair draws: four standard deviations


def test_an_example_keeps_its_split_when_the_source_grows() -> None:
    def split_of(keys: list[str]) -> dict[str, str]:
        return {key: split for split, shards in _as_keys(keys).items() for shard in shards for key in shard}

    before, after = split_of(KEYS), split_of([f"new/{index}" for index in range(500)] + KEYS)
    assert {key: after[key] for key in KEYS} == before


def test_the_seed_changes_split_and_order() -> None:
    first, second = _as_keys(KEYS, seed=0), _as_keys(KEYS, seed=1)
    assert {key for shard in first["test"] for key in shard} != {
        key for shard in second["test"] for key in shard
    }
    assert first["train"] != second["train"]


def test_the_order_is_independent_of_the_split() -> None:
    own = ["validation", "test"] + ["train"] * (len(KEYS) - 2)
    ordered = make_plan(KEYS, own, readers=1, shards=1, seed=0)["train"][0].members
    first_half = ordered[: len(ordered) // 2]
    # Were both the same hash, the first half would hold everything that hashes to validation and test.
    splits = Counter(choose_split(KEYS[index], None, set(), 0) for index in first_half)
    assert splits["train"] / len(first_half) == pytest.approx(SHARES["train"], abs=0.04)


def test_keys_may_be_any_file_name() -> None:
    keys = [f"ä b\n\udcff/{index}" for index in range(100)]
    assert sum(len(shard) for shards in _as_keys(keys).values() for shard in shards) == 100


def test_an_empty_split_is_refused_with_the_counts() -> None:
    with pytest.raises(
        SourceError, match=r"no example for validation and test \(train 3, validation 0, test 0\)"
    ):
        make_plan(["a", "b", "c"], ["train", "train", "train"], readers=1, shards=8, seed=0)
